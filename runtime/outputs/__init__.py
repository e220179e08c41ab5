"""The model's outputs of a step: kept per microbatch, joined to the whole batch, and sent to ranks that want them."""
