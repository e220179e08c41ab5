"""Sums over replicas as data: buckets, rounds of messages, and what these take over given links. Imports no torch."""
