"""Routes of microbatches through the workers of several replicas, their planner and its bound. Imports no torch."""
