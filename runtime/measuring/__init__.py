"""Measuring: the time of every op and message of a step, and REDUCE, as records. Imports no torch."""
