"""Partition of a flat graph into stages."""
