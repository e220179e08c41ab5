"""What travels in a step beside activations: shared gradients, losses, gradient norms and probes."""
