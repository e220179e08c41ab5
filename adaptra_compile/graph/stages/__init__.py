"""The stages of a model: one interface, for stages that run graphs and stages that run modules."""
