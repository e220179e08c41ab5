"""The bubble equations: the slackness that a pipeline needs, in closed form."""
