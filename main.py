"""The reference program's command line, mapped onto `vicinal train`; `python main.py --help` says how."""

import sys

from vicinal.cli.reference import run

if __name__ == "__main__":
    sys.exit(run())
