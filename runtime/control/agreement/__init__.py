"""Agreement: how a rank prepares, confirms and enters a plan, and whether all ranks were given the same rows."""
