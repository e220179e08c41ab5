"""Copies between a device and messages in the memory of the host."""
