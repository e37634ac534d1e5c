"""`vicinal VERB ...`: finds the verb's file, and prints errors as short messages.

A verb's file is imported when the verb is called, so `vicinal --help` loads nothing heavy.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import vicinal
from vicinal.errors import VicinalError, unknown_name

VERBS = {
    "train": "train a model, with a prior or without; writes a run folder",
    "eval": "evaluate a run on one of its splits",
    "predict": "what a trained model makes of your own pictures",
    "analyze": "what a trained model sees: receptive fields, fits, masks, attention",
    "export": "write a trained model as ONNX or as a torch.export program",
    "datasets": "list the sets of images, or look into one",
    "priors": "list the spatial priors and their options, or draw them",
    "cost": "parameters, multiplications and memory of models with and without priors",
    "models": "list models, or find out which of them take a prior",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, or 2 for bad input."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(f"vicinal {vicinal.__version__}")
        return 0
    try:
        if words[0] not in VERBS:
            raise unknown_name("command", words[0], VERBS)
        importlib.import_module(f"vicinal.cli.{words[0]}").run(words[1:])
    except VicinalError as error:
        if debug:
            raise
        if os.environ.get("RANK", "0") == "0":  # of several processes, one speaks
            print(f"vicinal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vicinal: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
    return 0


def usage() -> str:
    """What `vicinal --help` prints."""
    verbs = "\n".join(f"  {name:12}{line}" for name, line in VERBS.items())
    return (
        "usage: vicinal COMMAND [--help] ...\n\n"
        "Spatial priors for vision transformers, so that they train well on small data.\n\n"
        f"commands:\n{verbs}\n\n"
        "options:\n  --help      this, or a command's own help\n  --version   print the version\n"
        "  --debug     show where an error comes from"
    )


if __name__ == "__main__":
    sys.exit(main())
