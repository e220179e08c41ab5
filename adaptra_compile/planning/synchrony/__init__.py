"""Synchronisation modes of replicas: what an update of each takes in a case, and which one reaches a loss first."""
