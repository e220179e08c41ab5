"""The coordinator's decisions: when to plan, with which compiler, and when to propose. Imports no torch."""
