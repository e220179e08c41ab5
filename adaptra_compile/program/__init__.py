"""The pipeline program: who runs which op in which order, and the rules that make it legal. Imports no torch."""

from adaptra.program.program import Kind, Op, Program, parse_op, parse_recorded_op, place_in, refuse_size

__all__ = ["Kind", "Op", "Program", "parse_op", "parse_recorded_op", "place_in", "refuse_size"]
