"""Where a flat graph is cut into stages."""
