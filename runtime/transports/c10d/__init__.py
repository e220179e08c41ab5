"""Messages over torch.distributed."""
