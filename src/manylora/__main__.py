"""Runs the command ``manylora`` as ``python -m manylora``, where its script is not on the path."""

import sys

from manylora.cli import main

if __name__ == "__main__":
    sys.exit(main())
