"""Launch: the ranks of a job, and their connection."""
