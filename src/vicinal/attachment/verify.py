"""Checks on noise that a prior acts on each attention module as the formula says.

An identity prior must change nothing. A prior with another number at every offset must do what a lookup pair by pair of
tokens does, from the cells of every window; the identity alone would not notice a wrong grid. Module outputs are
compared, because LayerScale hides errors in the model's output.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.attachment.subclass import PriorSite, add_prior, remove_prior
from vicinal.attachment.uneven_prior import uneven_prior, values_by_pair, wraps
from vicinal.attention.multi_head import multi_head
from vicinal.cells import Cells, PairLayout
from vicinal.errors import VicinalError
from vicinal.inspection.attention_mode import AttentionMode, FusedCall, Operation
from vicinal.inspection.model_runner import ModelRunner
from vicinal.inspection.refusal import Refusal, RefusalKind
from vicinal.inspection.sites import AttentionSite
from vicinal.priors.base import Prior

__all__ = ["verify_sites"]

ROUNDING = 1e-5  # of the largest output
MAX_DIFFERENCE = 0.01  # of the effect of the prior
MAX_HIDING = 1e-3  # weights that are all smaller than this hide what is in front of them


def verify_sites(runner: ModelRunner, sites: Sequence[AttentionSite]) -> dict[str, Refusal]:
    """Checks all modules in one run of the model.

    Args:
        runner: the model, in evaluation mode, without priors and in full precision; and its images.
        sites: those that take a prior.

    Returns:
        Why a prior would not act as it should, by the name of the site.
    """
    refused: dict[str, Refusal] = {}
    made_for_inference = any(x.is_inference() for x in runner.model.parameters())
    with contextlib.ExitStack() as stack:
        # In-place changes of tensors that were made in inference mode are allowed only inside of it.
        stack.enter_context(torch.inference_mode() if made_for_inference else torch.no_grad())
        # Those that carry a prior were verified when they got it.
        unverified = {site.name: site for site in sites if "prior_site" not in vars(site.module)}
        for site in unverified.values():
            stack.enter_context(_checked_forward(site, unverified, refused))
        if unverified:
            with contextlib.suppress(_AllVerified):
                runner(runner.noise(1))
    return refused


class _AllVerified(BaseException):
    """Ends the run. Not an `Exception`, so that no code of the model takes it for a failure."""


@contextlib.contextmanager
def _checked_forward(
    site: AttentionSite, unverified: dict[str, AttentionSite], refused: dict[str, Refusal]
) -> Iterator[None]:
    """Replaces a module's forward by one that checks a prior on the first call."""
    module, before = site.module, site.module.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if unverified.pop(site.name, None) is not None:
            try:
                _check(site, args, kwargs, refused)
            except VicinalError as error:
                refused[site.name] = Refusal(RefusalKind.UNSUPPORTED, str(error))
            if not unverified:
                raise _AllVerified
        return before(*args, **kwargs) if before is not None else type(module).forward(module, *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _check(site: AttentionSite, args: tuple[Any, ...], kwargs: dict[str, Any], refused: dict[str, Refusal]) -> None:
    """Compares a module's outputs on noise, and notes a refusal if they are wrong."""
    module, layout, cells = site.module, site.layout, site.queries
    assert layout is not None
    given, names = [*args, *kwargs.values()], list(kwargs)
    tokens = next((x for x in given if isinstance(x, Tensor) and x.is_floating_point()), None)
    if tokens is not None:
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens)
        given = [noise if x is tokens else x for x in given]
    keywords = dict(zip(names, given[len(args) :], strict=True))

    def run() -> Tensor:
        return _first_tensor(type(module).forward(module, *given[: len(args)], **keywords))

    device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
    uneven = uneven_prior(site.heads, layout).to(device)
    with _nothing_hidden(module):
        plain = run()
        with _PairByPair(uneven, site, device):
            expected = run()
        outputs = []
        for prior in (Prior(site.heads, layout.grid), uneven):
            add_prior(module, prior, PriorSite.of(site), layout)
            try:
                outputs.append(run())
            finally:
                remove_prior(module)
    rounding = ROUNDING * float(plain.abs().max())
    effect = float((expected - plain).abs().max())
    kind, reason = RefusalKind.UNVERIFIED, ""
    if float((outputs[0] - plain).abs().max()) > rounding:
        reason = "a prior that changes nothing changes its output"
    elif effect <= rounding:
        kind, reason = RefusalKind.UNUSED, "its output does not depend on its patch-to-patch attention weights"
    elif float((outputs[1] - expected).abs().max()) > rounding + MAX_DIFFERENCE * effect:
        reason = "a prior does not act on its logits as the formula says"
        if not isinstance(layout, PairLayout) and isinstance(cells, Cells) and wraps(cells, layout):
            reason = "its shifted windows let tokens from opposite edges of the image attend to each other"
    if reason:
        refused[site.name] = Refusal(kind, reason)


def _first_tensor(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


class _PairByPair(AttentionMode):
    """Applies a prior to plain attention by looking every pair of tokens up in its table, window by window."""

    def __init__(self, prior: Prior, site: AttentionSite, device: torch.device) -> None:
        super().__init__()
        self.site = site
        # (windows or 1, heads, queries, keys) each
        self.scale, self.bias = (x.to(device) for x in values_by_pair(prior, site))
        self.products = self.softmaxes = self.fused = 0
        self.shape: tuple[int, ...] = ()

    def on_product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiplies."""
        result, number = func(*args, **kwargs), self.products
        self.products += 1
        for place, step in enumerate(self.site.steps):
            if step.operation is Operation.PLAIN and step.product == number:
                self.shape = tuple(result.shape)
                added = kwargs.get("beta", 1) * args[0] if len(args) == 3 and isinstance(args[0], Tensor) else 0
                return (result - added) * self._laid_out(self.scale, self.shape, place) + added
        return result

    def on_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds."""
        number = self.softmaxes
        self.softmaxes += 1
        for place, step in enumerate(self.site.steps):
            if step.operation is Operation.PLAIN and step.softmax == number:
                bias = self._laid_out(self.bias, self.shape, place).reshape(args[0].shape)
                return func(args[0] + bias, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def on_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: FusedCall) -> Tensor:
        """Computes a fused call by the formula."""
        number = self.fused
        self.fused += 1
        for place, step in enumerate(self.site.steps):
            if step.operation is Operation.FUSED and step.product == number:
                return self._attention(call.query, call.key, call.value, call.attn_mask, call.scale, place)
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def on_multi_head(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Computes `F.multi_head_attention_forward` by the formula."""
        parts = multi_head(*args, **kwargs)
        return parts.run(
            lambda q, k, v, mask, **_: self._weights(q, k, mask, None, 0) @ v,
            lambda q, k, mask: self._weights(q, k, mask, None, 0),
        )

    def _laid_out(self, values: Tensor, shape: tuple[int, ...], place: int) -> Tensor:
        layout = self.site.head_layout
        if layout.turns > 1:
            values = values[:, place : place + 1]
        if self.site.steps[place].transposed:
            values = values.mT
        return layout.expand(values, shape)

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, place: int) -> Tensor:
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        shape = tuple(logits.shape)
        logits = logits * self._laid_out(self.scale, shape, place) + self._laid_out(self.bias, shape, place)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        return logits.softmax(-1)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, place: int
    ) -> Tensor:
        return self._weights(q, k, mask, scale, place) @ v


@contextlib.contextmanager
def _nothing_hidden(module: nn.Module) -> Iterator[None]:
    """Puts noise in place of weights that start at or near zero, such as a LayerScale, and restores them after."""
    hiding = {
        parameter: parameter.clone()
        for name, parameter in module.named_parameters()
        if not name.endswith("bias") and parameter.numel() and parameter.abs().max() < MAX_HIDING
    }
    for parameter in hiding:
        parameter.normal_(generator=torch.Generator(parameter.device).manual_seed(0))
    try:
        yield
    finally:
        for parameter, value in hiding.items():
            parameter.copy_(value)
