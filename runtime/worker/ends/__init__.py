"""The ends of training steps: what is in the gradients, and by what they are divided."""
