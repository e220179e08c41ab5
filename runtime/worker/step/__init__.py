"""A step of one rank: its program, the messages and shapes of it, and the executor that runs it."""
