"""Synchronisation modes other than exact: what replicas exchange, when, and who takes part."""
