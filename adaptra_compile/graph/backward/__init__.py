"""From a piece of the flat graph to its F, I and W graphs."""
