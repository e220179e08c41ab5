"""Effects of a model's code beside what it returns: state that it keeps, and random numbers that are not torch's."""
