"""What users give to ``compile``: checked at the door, and agreed on by all ranks."""
