"""The stages of a model on their ranks, whatever they are made of."""
