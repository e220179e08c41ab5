"""Mail between the ranks' control threads: its messages, the queues in the store, and the relay over a tree of ranks."""
