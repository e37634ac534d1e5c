"""Parameters, operations and training memory of a model."""
