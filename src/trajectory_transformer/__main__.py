"""`python -m trajectory_transformer` is `tt`."""

import sys

from trajectory_transformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
