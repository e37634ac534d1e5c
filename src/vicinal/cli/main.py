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
    "train": "train a model, with or without a prior; writes a run folder",
    "eval": "evaluate a run on one of its splits",
    "predict": "predict the classes of your own images",
    "study": "compare arms over seeds, with statistics: plan, run, show",
    "compare": "compare finished runs, paired by seed, with the same statistics",
    "report": "write a page about a study, a comparison or a run: one HTML file",
    "analyze": "measure and draw receptive fields, fitted tables, masks, attention",
    "export": "write a trained model as an ONNX or torch.export file",
    "datasets": "list datasets, or describe one",
    "priors": "list the spatial priors and their options, or draw them",
    "cost": "count parameters, MACs and memory of models with and without priors",
    "models": "list models, or survey which of them take a prior",
    "doctor": "show versions, devices, caches, and how attention is computed here",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb. Returns the exit code: 0, 2 for bad input, or 130 after Ctrl-C."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in args
    args = [word for word in args if word != "--debug"]
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0
    if args[0] == "--version":
        print(f"vicinal {vicinal.__version__}")
        return 0
    try:
        if args[0] not in VERBS:
            raise unknown_name("command", args[0], VERBS)
        importlib.import_module(f"vicinal.cli.{args[0]}").run(args[1:])
    except VicinalError as error:
        if debug:
            raise
        if os.environ.get("RANK", "0") == "0":  # of several processes, only the first prints
            print(f"vicinal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vicinal: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the pipe, such as head, has closed it
        sys.stderr.close()
    return 0


def usage() -> str:
    """Returns the text of `vicinal --help`."""
    verbs = "\n".join(f"  {name:12}{line}" for name, line in VERBS.items())
    return (
        "usage: vicinal COMMAND [--help] ...\n\n"
        "Spatial priors for vision transformers, so that they train well on small data.\n\n"
        f"commands:\n{verbs}\n\n"
        "options:\n  --help      show this text, or the help of a command\n  --version   print the version\n"
        "  --debug     show the traceback of an error"
    )


if __name__ == "__main__":
    sys.exit(main())
