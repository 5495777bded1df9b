"""A process of an observed run: `python -m largebatch.audit.resume.observing FOLDER SCRIPT ...`.

The script runs as `python SCRIPT ...` would, with FOLDER as its current folder, and so does a
module that follows `-m`. FOLDER gets `worker-RANK.jsonl`, a line for each update,
`worker-RANK.json`, what the process is, and `worker-RANK.log`, what the script prints.
"""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from largebatch.audit.resume.record import Update, Worker, write_line
from largebatch.audit.resume.watching import Watch
from largebatch.distributed.environment import LAUNCHER, own_rank, world_size


def main(words: Sequence[str]) -> int:
    """Run the script and return its exit code."""
    folder = Path(words[0])
    os.environ.pop(LAUNCHER, None)
    rank = own_rank()
    log = (folder / f"worker-{rank}.log").open("w", encoding="utf-8", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.chdir(folder)
    with (folder / f"worker-{rank}.jsonl").open("w", encoding="utf-8") as lines:
        watch = Watch(Writer(lines))
        code = 0
        with watch.installed():
            size = world_size()
            try:
                run(words[1:])
            except SystemExit as end:
                code = _code_of(end)
            except BaseException:
                traceback.print_exc()
                code = 1
            worker = worker_of(watch, rank, size)
    summary = asdict(worker) | {"averages": sorted(watch.averages.changed)}
    del summary["updates"]
    (folder / f"worker-{rank}.json").write_text(json.dumps(summary), encoding="utf-8")
    return code


@dataclass(slots=True)
class Writer:
    """Writes each update as a line, in the process that opened the file only."""

    lines: TextIO
    process: int = 0

    def __post_init__(self) -> None:
        self.process = os.getpid()

    def __call__(self, update: Update) -> None:
        if os.getpid() == self.process:
            self.lines.write(write_line(update) + "\n")
            self.lines.flush()


def run(words: Sequence[str]) -> None:
    """Run a script, or a module behind -m, with its arguments."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def worker_of(watch: Watch, rank: int, size: int) -> Worker:
    """Return what a process is, without its updates."""
    loader = watch.batches.training
    samples = None
    if loader is not None and hasattr(loader.dataset, "__len__"):
        samples = len(loader.dataset)
    return Worker(
        rank=rank,
        size=size,
        samples=samples,
        workers_of_loader=0 if loader is None else loader.num_workers,
        resumed_from=tuple(watch.resumed_from),
        missing_keys=tuple(watch.missing_keys),
        unexpected_keys=tuple(watch.unexpected_keys),
        end=watch.end(),
    )


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201 -- as Python does
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
