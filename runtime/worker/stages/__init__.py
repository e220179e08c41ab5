"""The stages of one rank: their modules, microbatches of other replicas, buffers, hooks and accumulated gradients."""
