"""Batches of other shapes than the one for which a pipeline was compiled."""
