"""What a training loop changes of a model after its compilation: noticed before the next step, and compiled anew."""
