"""Programs that tests run as a user would, with the package of this tree."""

import os
import subprocess
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
