"""`python -m largebatch` is `largebatch`."""

import sys

from largebatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
