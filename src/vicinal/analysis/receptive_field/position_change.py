"""A model whose positions are others for a while: random ones, or none.

What a model knows of places sits in absolute embeddings, in tables or small networks of relative positions, and in the
priors of this package. With it changed and all else as trained, one sees what of a receptive field comes from it: the
comparison of Kim et al., arXiv:2305.04722, Figure 4.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vicinal.attachment.subclass import WithPrior
from vicinal.errors import VicinalError, unknown_name
from vicinal.priors.registry import build_prior

__all__ = ["Positions", "changed_positions", "is_rotary"]

Positions = Literal["trained", "random", "zero"]

START = 0.02  # deviation that tables of positions start from in timm, transformers and torchvision

# What the libraries call them. A name counts wherever it stands, so that all parameters of a module of that name do.
ABSOLUTE = re.compile(
    r"(abs_|absolute_|mid_)?pos(ition|itional)?_(embed|embedding|embeddings|emb|embd|encoding)(\d|_\w+)?"
)
RELATIVE = re.compile(
    r"(shared_)?rel(ative)?_pos\w*|cpb_mlp|continuous_position_bias_mlp|meta_mlp|attention_biases|"
    r"relative_attention_bias|(height|width)_rel|pos_proj|(patch|pixel)_pos"
)
ROTARY = re.compile("rope|rotary")
NETWORK = (nn.Linear, nn.Conv2d, nn.LayerNorm)


@contextlib.contextmanager
def changed_positions(model: nn.Module, positions: Positions = "random", *, seed: int = 0) -> Iterator[list[str]]:
    """Give a model other positions inside of `with`, and its own back behind it, also after an error.

    >>> import vicinal
    >>> from vicinal.analysis.receptive_field.position_change import changed_positions
    >>> model = vicinal.create_model("vit-micro", prior="gab", depth=1)
    >>> with changed_positions(model, "zero") as changed:
    ...     print(changed, bool((model.pos_embed == 0).all()))
    ['pos_embed', 'blocks.0.attn.prior'] True

    Args:
        model: any vision model. Rotary positions are computed, not stored, and stay: see `is_rotary`. So do
            convolutions, which know what is near.
        positions: `random` starts them anew: tables from N(0, 0.02^2), or the deviation that the model states or, if
            they are fixed, that they have; small networks as torch starts them; priors as `build_prior` makes them.
            `zero` makes them say nothing: tables and networks zero, priors neutral. `trained` leaves them.
        seed: of what is drawn at random; the random state outside is untouched.

    Yields the names of what was changed.
    """
    if positions not in get_args(Positions):
        raise unknown_name("positions", positions, get_args(Positions))
    if positions == "trained":
        yield []
        return
    tables = dict(_tables(model))
    priors: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, WithPrior) and module.prior.spec != "none"
    }
    if not tables and not priors:
        raise VicinalError(
            f"{type(model).__name__} has no position embeddings, relative positions or prior to make {positions}; "
            "use positions trained" + (", rotary positions cannot be changed" if is_rotary(model) else "")
        )
    own_tables = {name: table.detach().clone() for name, table in tables.items()}
    own_priors = {name: module.prior for name, module in priors.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, table in tables.items():
                _change(model, name, table, positions)
            for module in priors.values():
                module.prior = _other_prior(module.prior, positions)
        _forget(model)
        yield [*tables, *(f"{name}.prior" for name in priors)]
    finally:
        with torch.no_grad():
            for name, table in tables.items():
                table.copy_(own_tables[name])
        for name, module in priors.items():
            module.prior = own_priors[name]
        _forget(model)


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters that say where patches are, and fixed tables of absolute positions."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "prior" not in parts and any(ABSOLUTE.fullmatch(part) or RELATIVE.fullmatch(part) for part in parts):
            yield name, parameter
    for name, buffer in model.named_buffers():
        fixed = ABSOLUTE.fullmatch(name.rpartition(".")[2]) and not ROTARY.search(name)
        if fixed and buffer.is_floating_point():
            yield name, buffer


@torch.no_grad()
def _change(model: nn.Module, name: str, table: Tensor, positions: Positions) -> None:
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    if positions == "zero":
        table.zero_()
    elif isinstance(owner, NETWORK):
        if table is owner.weight:
            owner.reset_parameters()  # its bias too
    else:
        fixed = not isinstance(table, nn.Parameter)
        deviation = float(table.std()) if fixed else getattr(owner, "token_std", START)
        table.copy_(deviation * torch.randn(table.shape))


def _other_prior(prior: Any, positions: Positions) -> nn.Module:
    spec, options = (prior.spec, prior.spec_options) if positions == "random" else ("none", {})
    place = {"heads": prior.heads, "grid": prior.grid, "layer": prior.layer, "depth": prior.depth}
    other: nn.Module = build_prior(spec, **place, **options)
    own = next(prior.parameters(), None)
    if own is not None:
        other.to(own.device, own.dtype)
    return other.train(prior.training)


def _forget(model: nn.Module) -> None:
    """LeViT and its kin keep looked-up biases between runs in evaluation."""
    for module in model.modules():
        if isinstance(getattr(module, "attention_bias_cache", None), dict):
            module.attention_bias_cache = {}  # type: ignore[assignment]


def is_rotary(model: nn.Module) -> bool:
    """Whether a model has rotary positions, which are computed and cannot be changed."""
    return any(ROTARY.search(name) for name, _ in model.named_modules())
