"""From a planning problem to a plan, how far that is from the best, and what else would help. Imports no torch."""
