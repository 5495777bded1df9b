"""Run the command line, as `largebatch` or `python -m largebatch`."""

import sys


def main() -> int:
    """Run the command of this process's arguments and return its exit code."""
    from largebatch.cli import main as command_line

    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
