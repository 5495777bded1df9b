"""Run the command line with `python -m largebatch`."""

import sys

from largebatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
