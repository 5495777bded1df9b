"""A process of an observed run, started by `running`.

The script runs as `python SCRIPT ...` would, and so does a module that follows `-m`. The folder of
the record gets `worker-RANK.jsonl`, a line for each update; `worker-RANK.json`, what the process
is; and `worker-RANK.log`, what the script prints.
"""

import faulthandler
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from largebatch.audit.resume.record import Update, write_line
from largebatch.audit.resume.watching import Watch
from largebatch.distributed.environment import LAUNCHER, own_rank, world_size
from largebatch.errors import DataError
from largebatch.optional import require_torchvision
from largebatch.runs.launch import reporting_errors

_RESUMABLE = 75
"""Exit code (EX_TEMPFAIL) of a program that stopped and can be resumed, this package's too."""


def main(words: Sequence[str]) -> None:
    """Run a script: TIMEOUT RECORDS FILES SCRIPT ..., FILES being its current folder.

    Raises DataError, in one line, if it fails.
    """
    timeout, records, files, *command = words
    folder = Path(records)
    rank = own_rank()
    log = (folder / f"worker-{rank}.log").open("w", encoding="utf-8", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # so that an error comes behind what was printed
        sys.stdout.reconfigure(line_buffering=True)
    require_torchvision()  # what most scripts import, also where it was built for another torch
    os.environ.pop(LAUNCHER, None)  # a script may be one of this package's commands
    os.chdir(files)
    with (folder / f"worker-{rank}.jsonl").open("w", encoding="utf-8") as lines:
        writer = Writer(lines, rank)
        watch = Watch(writer, partial(_progress, float(timeout), log))
        writer.watch = watch
        watch.progress()
        sys.addaudithook(_opened(watch, Path(files)))
        failure = None
        with watch.installed():
            try:
                run(command)
            except SystemExit as end:
                failure = _failure_of(end)
            except Exception as error:
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}"
            writer.write(end=True)
    faulthandler.cancel_dump_traceback_later()
    if failure:
        raise DataError(f"worker {rank}: {failure}")


def _progress(timeout: float, log: TextIO) -> None:
    """End this process, with its stacks in the log, unless this is called again in time."""
    faulthandler.dump_traceback_later(timeout, exit=True, file=log)


def _opened(watch: Watch, folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that sees which files of the run before are read, and which written."""
    before = {str(path) for path in folder.rglob("*") if path.is_file()}

    def see(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], str):
            return
        path, mode, _ = args
        name = os.path.basename(path)  # noqa: PTH119 -- called for every file
        if isinstance(mode, str) and "w" in mode:
            watch.see_written(name)
        elif not watch.number and os.path.abspath(path) in before:  # noqa: PTH100
            watch.see_loaded(name)

    return see


class Writer:
    """Writes updates as lines, in the process that opened the file only."""

    def __init__(self, lines: TextIO, rank: int) -> None:
        self.lines = lines
        self.rank = rank
        self.size = 1
        self.process = os.getpid()
        self.watch: Watch

    def __call__(self, update: Update) -> None:
        """Write an update, and what the process is so far: it may end by os._exit."""
        if os.getpid() == self.process:
            self.lines.write(write_line(update) + "\n")
            self.lines.flush()
            self.size = world_size()
            self.write(end=False)

    def write(self, *, end: bool) -> None:
        """Write what the process is, at its end with its last state."""
        summary = self.watch.summary(self.rank, self.size, with_end=end)
        path = Path(self.lines.name).with_suffix(".json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(summary), encoding="utf-8")
        part.replace(path)


def run(words: Sequence[str]) -> None:
    """Run a script, or a module behind -m, with its arguments."""
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _failure_of(end: SystemExit) -> str | None:
    """Return how a script exited, if it is a failure."""
    if end.code in {None, 0, _RESUMABLE}:
        return None
    if not isinstance(end.code, int):
        print(end.code, file=sys.stderr)  # noqa: T201 -- as Python does
    return f"it exited with {end.code}"


if __name__ == "__main__":
    with reporting_errors(f"worker {own_rank()}"):
        main(sys.argv[1:])
