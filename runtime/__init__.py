"""The runtime: executes a program on every rank, measures it, and switches plans at step boundaries."""
