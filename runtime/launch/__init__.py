"""Where the ranks of a job are, and how they connect."""
