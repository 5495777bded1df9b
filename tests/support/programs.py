"""Programs that tests run as a user would, with the package of this tree."""

import os
import subprocess
import sys
from pathlib import Path

import largebatch


def output_of(*command: str, cwd: Path | None = None, timeout: float = 600) -> str:
    """Run a program on the CPU, on one thread; return what it prints, or fail with all of it."""
    here = str(Path(largebatch.__file__).parents[1])
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_DEFAULT_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def with_default_signals(*command: str | Path) -> list[str]:
    """Return a command that restores the default actions of signals, then becomes this one.

    A child inherits what its parent ignores: SIGINT under `make test &`, SIGHUP under nohup.
    """
    return [sys.executable, "-S", "-E", "-c", _DEFAULT_SIGNALS, *map(str, command)]
