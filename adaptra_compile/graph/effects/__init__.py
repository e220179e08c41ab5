"""Effects of a model's code beside the tensors that it returns: state that it keeps, and random numbers that are not torch's."""
