"""The transport over torch.distributed."""
