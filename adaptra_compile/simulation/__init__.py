"""Time and memory of a program: cost models, the event simulation, timelines. Imports no torch."""
