"""A pipeline that runs in this process: its workers, its batches, its state, and how it changes between steps."""
