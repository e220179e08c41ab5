"""What a program costs in time and memory: cost models, the event simulation, timelines. Imports no torch."""
