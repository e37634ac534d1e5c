"""`vicinal analyze`: what a trained model sees, one instrument per file."""

import importlib
from collections.abc import Sequence

from vicinal.errors import unknown_name

__all__ = ["run"]

INSTRUMENTS = {
    "erf": "effective receptive fields: which pixels a patch depends on",
    "fit": "learned tables, of priors or relative positions, fitted by Gaussians",
    "masks": "what a prior has learned, layer by layer and head by head",
    "attention": "where a model looks: maps, rollout, distance and entropy of its heads",
}


def run(words: Sequence[str]) -> None:
    """Parse the words behind the verb and act."""
    if not words or words[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:12}{line}" for name, line in INSTRUMENTS.items())
        print(
            "usage: vicinal analyze INSTRUMENT RUN [--help] ...\n\n"
            "Look at a trained model. Pictures and figures go to the run's folder analysis/, or to --out.\n\n"
            f"instruments:\n{lines}"
        )
        return
    if words[0] not in INSTRUMENTS:
        raise unknown_name("instrument", words[0], INSTRUMENTS)
    importlib.import_module(f"vicinal.cli.analyze_{words[0]}").run(words[1:])
