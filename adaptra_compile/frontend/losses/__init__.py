"""What a loss makes of the microbatches of a batch: their weights in it, and whether it takes rows together."""
