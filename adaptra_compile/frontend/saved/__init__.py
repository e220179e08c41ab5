"""What a checkpoint has of a run: the optimizer's state by names, and the names of the model's own state_dict."""
