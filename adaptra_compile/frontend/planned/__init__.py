"""From compiled stages to their memory, a first plan and the workers that run it."""
