"""The survival of a job that loses processes: what is known of it, what is decided, and the epoch that follows."""
