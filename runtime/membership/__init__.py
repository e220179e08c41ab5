"""Job membership: the ranks of a job that live, and the cause of the end of those that don't."""
