"""Attention maps, rollout and head statistics: measuring, results, plots."""
