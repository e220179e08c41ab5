"""Layouts: which rank takes which stage of which replica. Imports no torch."""
