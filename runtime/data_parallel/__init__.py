"""Data parallelism: replicas of a pipeline, whose gradients are averaged and whose buffers are kept equal."""
