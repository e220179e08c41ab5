"""The workers of a job and the processes that host them, as everything that joins them is built from."""
