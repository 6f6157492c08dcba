"""`python -m lightning_embodied`: the same as the `lightning-embodied` command."""

import sys

from lightning_embodied.cli import main

if __name__ == "__main__":
    sys.exit(main())
