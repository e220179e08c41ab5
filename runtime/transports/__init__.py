"""Transports, which carry messages between ranks behind one interface."""
