"""Compiler passes: each file is one pass, named like the file."""
