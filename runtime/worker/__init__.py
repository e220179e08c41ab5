"""One rank at work: follows its plan from step to step and runs its stages."""
