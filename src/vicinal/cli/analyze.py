"""`vicinal analyze`: analyses of a trained model, one per file."""

import importlib
from collections.abc import Sequence

from vicinal.errors import unknown_name

__all__ = ["run"]

INSTRUMENTS = {
    "erf": "effective receptive fields: which pixels a patch depends on",
    "fit": "learned tables, of priors or relative positions, fitted by Gaussians",
    "masks": "tables of a prior, by layer and head, and their history",
    "attention": "attention maps, rollout, and distance and entropy of heads",
}


def run(args: Sequence[str]) -> None:
    """Runs the instrument that is the first argument after `vicinal analyze`."""
    if not args or args[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:12}{line}" for name, line in INSTRUMENTS.items())
        print(
            "usage: vicinal analyze INSTRUMENT RUN [--help] ...\n\n"
            "Analyzes a trained model. Plots and figures are written to analysis/ in the run folder, or to --out.\n\n"
            f"instruments:\n{lines}"
        )
        return
    if args[0] not in INSTRUMENTS:
        raise unknown_name("instrument", args[0], INSTRUMENTS)
    importlib.import_module(f"vicinal.cli.analyze_{args[0]}").run(args[1:])
