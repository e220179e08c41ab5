"""Sums over replicas whose bits depend on their terms alone. Terms travel in rounds, and the owner of a part adds them."""
