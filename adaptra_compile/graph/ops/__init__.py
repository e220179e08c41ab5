"""Properties of torch's tensors and ops, and their execution on fake tensors."""
