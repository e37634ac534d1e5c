"""Checks the arguments of `attend`."""

from torch import Tensor

from vicinal.attention.placed_prior import PlacedPrior, token_counts
from vicinal.errors import VicinalError
from vicinal.grid import Grid
from vicinal.priors.base import Prior

__all__ = ["check_call", "repeats"]


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prior: Prior | PlacedPrior | None,
    mask: Tensor | None,
    dropout: float,
) -> None:
    """Raises VicinalError if the arguments of `attend` do not fit one another."""
    # Shapes become text only where they are wrong: text of a symbolic size makes it a constant of the compiled graph.
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:2] != q.shape[:2] or k.shape[3] != q.shape[3]:
        raise VicinalError(f"attend takes q, k and v as (batch, heads, tokens, dim) alike, given {_shapes(q, k, v)}")
    if v.shape[:3] != k.shape[:3]:
        raise VicinalError(f"v must have the batch, heads and tokens of k, given {_shapes(q, k, v)}")
    if prior is not None:
        _check_prior(q, k, v, prior)
    if not q.dtype.is_floating_point or not q.device == k.device == v.device:
        raise _wrong_device(q, k, v, None)
    if not 0.0 <= dropout < 1.0:
        raise VicinalError(f"dropout is a probability in [0, 1), given {dropout}")
    if mask is not None:
        wanted = (*q.shape[:3], k.shape[2])
        sizes = zip(reversed(mask.shape), reversed(wanted), strict=False)
        fits = mask.dim() <= 4 and all(given == 1 or given == size for given, size in sizes)
        if not fits and not repeats(mask, q):
            raise VicinalError(
                f"mask must broadcast to (batch, heads, queries, keys) = {wanted}, given {tuple(mask.shape)}"
            )


def _check_prior(q: Tensor, k: Tensor, v: Tensor, prior: Prior | PlacedPrior) -> None:
    if q.shape[1] != prior.heads:
        raise VicinalError(f"the prior is for {prior.heads} heads, given {q.shape[1]}; {_shapes(q, k, v)}")
    queries, keys = token_counts(prior)
    if q.shape[2] != queries:
        raise _wrong_tokens("queries", q.shape[2], queries, prior.grid, _shapes(q, k, v))
    if k.shape[2] != keys:
        raise _wrong_tokens("keys", k.shape[2], keys, prior.grid, _shapes(q, k, v))
    if prior.device is not None and prior.device != q.device:
        raise _wrong_device(q, k, v, prior)


def _wrong_device(q: Tensor, k: Tensor, v: Tensor, prior: Prior | PlacedPrior | None) -> VicinalError:
    """Returns the error for inputs that are not floating-point numbers on one device."""
    given = [("q", q.device), ("k", k.device), ("v", v.device), ("prior", None if prior is None else prior.device)]
    devices = ", ".join(f"{name} {device}" for name, device in given if device is not None)
    return VicinalError(f"attend takes floating-point numbers on one device, given {q.dtype}; {devices}")


def repeats(mask: Tensor | None, q: Tensor) -> bool:
    """Returns whether a 4-D mask is for fewer images than `q`, of which there is a multiple: windows of each image."""
    if mask is None or mask.dim() != 4:
        return False
    given, images = mask.shape[0], q.shape[0]  # `len` would make a constant of a symbolic size
    return given != images and given > 1 and images % given == 0


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Returns the shapes of q, k and v as text."""
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _wrong_tokens(side: str, given: int, expected: int, grid: Grid | None, shapes: str) -> VicinalError:
    """Returns the error for another number of queries or keys (`side`) than that of the prior."""
    if grid is None:
        return VicinalError(f"the prior is for {expected} {side}, given {given}; {shapes}")
    if grid.prefix >= given:
        return VicinalError(
            f"the prior's {grid.prefix} prefix tokens leave no patch in {given} tokens ({side}); {shapes}"
        )
    return VicinalError(
        f"the prior is for {expected} tokens ({grid}), given {given} {side}; {shapes}. "
        "Another image size needs prior.resize(grid)"
    )
