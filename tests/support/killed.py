"""A worker of a run is killed from outside."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def kill_worker(rank: int, out: Path, *, at_step: int) -> None:
    """Wait for a step of a run, then SIGKILL one of its workers."""
    path = out / "log.jsonl"
    while not path.exists() or path.read_text().count('"event":"step"') < at_step:
        time.sleep(0.05)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes().split(b"\0")
            if str(out).encode() in words and f"RANK={rank}".encode() in variables:
                os.kill(int(folder.name), signal.SIGKILL)
