"""Which ranks of a job live, and what ended those that don't."""
