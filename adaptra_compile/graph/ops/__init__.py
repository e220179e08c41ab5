"""Torch's tensors and ops: what is known of them, and how they are run on fake tensors."""
