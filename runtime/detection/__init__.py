"""From measurements to a cost model, and what has turned slow, lossy or healthy again. Imports no torch."""
