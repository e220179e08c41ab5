"""Capture: a model and an example become one flat FX graph, which is compared with the ops that eager torch runs."""
