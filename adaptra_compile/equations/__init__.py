"""The bubble equations: the slack that a pipeline needs, in closed form."""
