"""From a model and an example to one flat FX graph, and whether that runs what eager torch runs."""
