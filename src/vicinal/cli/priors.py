"""`vicinal priors`: lists, describes and draws priors."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from vicinal.cli._flags import call_with_flags
from vicinal.grid import Grid
from vicinal.priors import build_prior, get_prior, list_priors, prior_options
from vicinal.text_table import text_table
from vicinal.typed_value import describe_type

__all__ = ["run"]


def priors(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    draw: Path | None = None,
    heads: int = 6,
    grid: tuple[int, int] = (8, 8),
) -> None:
    """Lists the spatial priors and their options, or draws them.

    Args:
        name: Prior to describe in full, or a spec such as gmm:kernels=3 to draw; all of them by default.
        draw: File for a plot of the prior, or of all of them.
        heads: Number of heads, for drawing and for counting parameters.
        grid: Height and width in patches, for drawing and for counting parameters.
    """
    place = Grid(*grid)
    if draw is not None:
        from vicinal.priors.plot import draw_priors, example_priors

        chosen = {name: build_prior(name, heads=heads, grid=place)} if name else example_priors(heads=heads, grid=place)
        print(f"wrote {draw_priors(chosen, draw)}")
    elif name is not None:
        print(describe(name))
    else:
        print(table(heads, place))


def table(heads: int, grid: Grid) -> str:
    """Returns a table of all priors, with their options."""
    lines = [f"parameters per layer are for {heads} heads on a {grid.height} x {grid.width} grid", ""]
    rows = [["prior", "parameters", "what it does, and its options with their defaults"]]
    for name in list_priors():
        count = sum(parameter.numel() for parameter in build_prior(name, heads=heads, grid=grid).parameters())
        rows.append([name, str(count), _summary(name)])
        options = [f"{option.name}={option.default}".lower() for option in prior_options(name)]
        rows += [["", "", ", ".join(options)]] if options else []
    lines += [
        text_table(rows, right=[1]),
        "",
        "write them as name:option=value,option=value and join several with +, as in gmm:kernels=3,init=spread+gab",
    ]
    return "\n".join(lines)


def describe(name: str) -> str:
    """Returns the formula of a prior, its options, and the values each of them takes."""
    cls = get_prior(name)
    module = inspect.getmodule(cls)
    formula = inspect.getdoc(module) or ""
    takes = [
        f"  {option.name}={str(option.default).lower()}: {describe_type(option.type)}" for option in prior_options(name)
    ]
    return "\n".join(
        [formula, "", inspect.getdoc(cls) or "", "", f"options of {name} and what they take:", *(takes or ["  none"])]
    )


def _summary(name: str) -> str:
    return (inspect.getdoc(get_prior(name)) or "").split("\n")[0].rstrip(".")


def run(args: Sequence[str]) -> None:
    """Parses the arguments after `vicinal priors`, and prints or draws."""
    call_with_flags(priors, "vicinal priors", args)
