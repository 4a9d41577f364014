"""``python -m rankzero``: the same as the command ``rankzero``."""

import sys

from rankzero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
