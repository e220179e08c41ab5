"""Differentiation: a piece of the flat graph becomes F, I and W graphs."""
