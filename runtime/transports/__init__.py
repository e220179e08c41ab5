"""Transports: how messages travel between ranks, behind one protocol."""
