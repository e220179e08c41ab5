"""The user's API, and the path from a model to running workers."""
