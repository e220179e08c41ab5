"""From a model to stage graphs: capture, partition, differentiate. Imports torch."""
