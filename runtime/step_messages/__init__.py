"""Messages of a step besides activations: shared gradients, losses, gradient norms and probes."""
