"""Reconfiguration between two steps: role changes and cut changes that all ranks agree on, with state transfer."""
