"""The worker of one rank: it follows its plan from step to step and runs its stages."""
