"""Whether a function transform is active: `torch.func`, or forward-mode AD.

Both give tensors a meaning besides their values (a batch axis, a tangent). A kernel that torch has no rule for would
lose it silently, and a cache would keep it beyond the transform.
"""

import torch
from torch.autograd import forward_ad

__all__ = ["transforms_active"]


def transforms_active() -> bool:
    """Returns whether `torch.func` (`vmap`, `grad`, `jvp`) or a level of forward-mode AD is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
