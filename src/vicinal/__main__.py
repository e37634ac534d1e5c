"""`python -m vicinal`: the command line, for torchrun and `accelerate launch`."""

import sys

from vicinal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
