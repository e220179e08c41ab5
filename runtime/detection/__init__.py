"""Detection: from measurements to a cost model, and the stages and edges that have changed. Imports no torch."""
