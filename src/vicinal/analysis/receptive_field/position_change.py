"""Replaces the position information of a model for a while, with random values or zeros.

It is in absolute embeddings, in tables or small networks of relative positions, and in the priors of this package. With
it replaced and all else as trained, the receptive field shows what comes from the content: the comparison of Kim et
al., arXiv:2305.04722, Figure 4.
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

INITIAL_STD = 0.02  # of position tables in timm, transformers and torchvision

# Names in the libraries. A name matches at any level, so that it matches all parameters of a module of that name.
ABSOLUTE_NAMES = re.compile(
    r"(abs_|absolute_|mid_)?pos(ition|itional)?_(embed|embedding|embeddings|emb|embd|encoding)(\d|_\w+)?"
)
RELATIVE_NAMES = re.compile(
    r"(shared_)?rel(ative)?_pos\w*|cpb_mlp|continuous_position_bias_mlp|meta_mlp|attention_biases|"
    r"relative_attention_bias|(height|width)_rel|pos_proj|(patch|pixel)_pos"
)
ROTARY_NAMES = re.compile("rope|rotary")
NETWORK_LAYERS = (nn.Linear, nn.Conv2d, nn.LayerNorm)


@contextlib.contextmanager
def changed_positions(model: nn.Module, positions: Positions = "random", *, seed: int = 0) -> Iterator[list[str]]:
    """Replaces the position information of a model inside `with`; it is restored after it, also after an error.

    >>> import vicinal
    >>> from vicinal.analysis.receptive_field import changed_positions
    >>> model = vicinal.create_model("vit-micro", prior="gab", depth=1)
    >>> with changed_positions(model, "zero") as changed:
    ...     print(changed, bool((model.pos_embed == 0).all()))
    ['pos_embed', 'blocks.0.attn.prior'] True

    Args:
        model: any vision model. Rotary positions, which are computed and not stored, are kept: see `is_rotary`. So are
            convolutions, which are local.
        positions: `random` initializes them again: tables from N(0, 0.02^2), or with the standard deviation that the
            model declares or, if they are fixed, that they have; small networks as torch does; priors as `build_prior`
            does. `zero` sets tables and networks to zero, and replaces priors by `none`. `trained` keeps everything.
        seed: of the random values; the global random state is not changed.

    Yields:
        The names of the parameters, buffers and priors that were replaced.

    Raises:
        VicinalError: if the model has no position information that can be replaced.
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
            "use positions='trained'" + (", rotary positions cannot be changed" if is_rotary(model) else "")
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
        _clear_caches(model)
        yield [*tables, *(f"{name}.prior" for name in priors)]
    finally:
        with torch.no_grad():
            for name, table in tables.items():
                table.copy_(own_tables[name])
        for name, module in priors.items():
            module.prior = own_priors[name]
        _clear_caches(model)


def _tables(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of learned positions, and of fixed tables of absolute positions."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "prior" not in parts and any(
            ABSOLUTE_NAMES.fullmatch(part) or RELATIVE_NAMES.fullmatch(part) for part in parts
        ):
            yield name, parameter
    for name, buffer in model.named_buffers():
        fixed = ABSOLUTE_NAMES.fullmatch(name.rpartition(".")[2]) and not ROTARY_NAMES.search(name)
        if fixed and buffer.is_floating_point():
            yield name, buffer


@torch.no_grad()
def _change(model: nn.Module, name: str, table: Tensor, positions: Positions) -> None:
    """Replaces the values of one parameter or buffer."""
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    if positions == "zero":
        table.zero_()
    elif isinstance(owner, NETWORK_LAYERS):
        if table is owner.weight:
            owner.reset_parameters()  # resets its bias too
    else:
        fixed = not isinstance(table, nn.Parameter)
        std = float(table.std()) if fixed else getattr(owner, "token_std", INITIAL_STD)
        table.copy_(std * torch.randn(table.shape))


def _other_prior(prior: Any, positions: Positions) -> nn.Module:
    """Returns a new prior for the place of another: initialized again, or `none`."""
    spec, options = (prior.spec, prior.spec_options) if positions == "random" else ("none", {})
    place = {"heads": prior.heads, "grid": prior.grid, "layer": prior.layer, "depth": prior.depth}
    other: nn.Module = build_prior(spec, **place, **options)
    own = next(prior.parameters(), None)
    if own is not None:
        other.to(own.device, own.dtype)
    return other.train(prior.training)


def _clear_caches(model: nn.Module) -> None:
    """Clears the caches in which timm's LeViT-like models keep biases between runs in evaluation mode."""
    for module in model.modules():
        if isinstance(getattr(module, "attention_bias_cache", None), dict):
            module.attention_bias_cache = {}  # type: ignore[assignment]


def is_rotary(model: nn.Module) -> bool:
    """Returns whether a model has rotary positions, which are computed and cannot be replaced."""
    return any(ROTARY_NAMES.search(name) for name, _ in model.named_modules())
