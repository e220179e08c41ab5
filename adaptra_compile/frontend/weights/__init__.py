"""Values for models on the meta device: each rank gets those of its own stages, from a checkpoint or drawn afresh."""
