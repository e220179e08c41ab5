"""Replicas of a pipeline: gradients averaged, buffers kept equal."""
