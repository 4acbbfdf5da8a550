"""``python -m manylora``: the command ``manylora``, where its script is not on the path."""

import sys

from manylora.cli import main

if __name__ == "__main__":
    sys.exit(main())
