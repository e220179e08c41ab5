"""Changes of roles and cuts between two steps: agreed on by all ranks, state moved between them."""
