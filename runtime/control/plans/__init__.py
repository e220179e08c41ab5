"""Plans, the log that says from which step each runs, and the events that tell of them. Imports no torch."""
