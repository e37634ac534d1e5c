"""How a prior meets q, k and v: one plain reference, and fast paths that are tested against it."""

from vicinal.attention.dispatch import attend, attend_plain, attention_weights

__all__ = ["attend", "attend_plain", "attention_weights"]
