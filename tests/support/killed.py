"""A worker of a run is killed from outside."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def kill_worker(rank: int, out: Path, *, at_step: int) -> None:
    """Wait for a step of a run, then SIGKILL one of its workers, which start in order."""
    path = out / "log.jsonl"
    while not path.exists() or path.read_text().count('"event":"step"') < at_step:
        time.sleep(0.05)
    of_run = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(out).encode() in (folder / "cmdline").read_bytes():
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                of_run[int(folder.name)] = int(parent)
    workers = sorted(process for process, parent in of_run.items() if parent in of_run)
    os.kill(workers[rank], signal.SIGKILL)
