"""The subjects of a pipeline's API: state, layout and what it shows."""
