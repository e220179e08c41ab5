"""What users call, and the path from their model to running workers."""
