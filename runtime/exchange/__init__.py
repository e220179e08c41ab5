"""Tensors and facts that ranks exchange outside of a step: as a stream, over a process group, or by the store."""
