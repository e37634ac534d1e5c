"""Effective receptive fields: measuring, the result, plots."""
