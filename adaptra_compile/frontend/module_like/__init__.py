"""What a pipeline has in common with a torch.nn.Module, and a clear error for the rest."""
