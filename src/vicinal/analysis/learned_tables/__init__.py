"""Learned tables and masks of priors and relative biases: reading, fitting, plots."""
