"""Devices: the clocks of ops that run asynchronously, and packing of messages in their memory."""
