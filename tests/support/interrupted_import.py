"""Run a module that is interrupted twice while it imports another one, as by Ctrl-C.

    python interrupted_import.py IMPORTED MODULE [ARGUMENT...]

An import takes seconds, and a signal in it reaches code of other packages.
"""

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from types import ModuleType


class InterruptingFinder:
    """Sends this process two SIGINT when a module is looked for; finds nothing itself."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Interrupt this process if it is the module."""
        if name != self.module:
            return
        sys.meta_path.remove(self)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    _, imported, run, *arguments = sys.argv
    sys.argv[1:] = arguments
    sys.meta_path.insert(0, InterruptingFinder(imported))
    runpy.run_module(run, run_name="__main__", alter_sys=True)
