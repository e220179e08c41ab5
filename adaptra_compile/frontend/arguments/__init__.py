"""The arguments of ``compile``: checked first of all, and agreed on by all ranks."""
