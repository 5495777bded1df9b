"""The four runs of an audit of a resumption: the whole, the whole again, its first part, the rest.

The first part and the rest share a folder, which is the current one of both; the two others have
one each. So a checkpoint with a relative name is where the rest looks for it.
"""

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from largebatch.audit.resume.record import (
    Run,
    Trace,
    Update,
    Worker,
    read_update,
    read_updates,
)
from largebatch.errors import DataError, LargebatchError, RequestedStopError, WorkerFailedError
from largebatch.runs.launch import Command, Processes, start_workers

_SHOWN_LINES = 10
"""Last lines of a failed script's output, for a message."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The records of the four runs; `rest` begins after as many updates as `first` has."""

    whole: Run
    repeat: Run
    first: Run
    rest: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What to run: the words behind `python` of three commands, and how."""

    whole: Sequence[str]
    first: Sequence[str]
    rest: Sequence[str]
    workers: int = 1
    rest_workers: int | None = None
    """Number of workers of the rest, if it is another."""

    timeout: float = 600.0
    """Seconds without an update or a batch after which a run is ended."""


def words_of(option: str, command: str) -> list[str]:
    """Return the words of a command behind `python`, with the script's path absolute.

    Raises DataError, with the option's name, for a command that cannot be run.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise DataError(f"--{option} {command!r}: {error}; correct the quotes") from None
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        if importlib.util.find_spec(words[1].partition(".")[0]) is None:
            raise DataError(f"--{option}: there is no module {words[1]}; correct its name")
        return words
    if not words or not words[0].endswith(".py"):
        raise DataError(
            f"--{option} {command!r}: expected a script and its arguments, such as 'train.py "
            "--epochs 2', or -m and a module; workers are started by --workers"
        )
    if not Path(words[0]).is_file():
        raise DataError(f"--{option}: there is no script {words[0]}; correct the path")
    return [str(Path(words[0]).resolve()), *words[1:]]


def observe(commands: Commands, out: Path) -> Runs:
    """Run the commands below `out` and return what they did; the whole runs twice.

    Raises DataError for a run that failed or made no update, for a first part that saved nothing,
    and for a rest that loaded nothing.
    """
    workers = commands.workers
    timeout = commands.timeout
    whole = _run(out, "whole", commands.whole, workers, timeout)
    repeat = _run(out, "repeat", commands.whole, workers, timeout)
    first = _run(out, "first", commands.first, workers, timeout)
    files = _files_of(out, "first")
    if not any(files.rglob("*")) and not any(_saves(worker) for worker in first):
        raise DataError(
            "--first: it saved nothing: no file is in its folder, and torch.save was not called; "
            "give it the options with which it saves a checkpoint"
        )
    rest = _run(out, "rest", commands.rest, commands.rest_workers or workers, timeout, files)
    if not any(worker.resumed_from for worker in rest):
        raise DataError(
            "--rest: it loaded nothing before its first update: torch.load was not called, and no "
            "file was opened that --first wrote; give it the options with which it resumes"
        )
    return Runs(whole=whole, repeat=repeat, first=first, rest=rest)


def _files_of(out: Path, name: str) -> Path:
    """Return the current folder of a run's script."""
    return out / name / "files"


def _run(
    out: Path,
    name: str,
    words: Sequence[str],
    workers: int,
    timeout: float,
    files: Path | None = None,
) -> Run:
    """Run a command in the folder `name`, with `files` as its current folder; return its record."""
    folder = out / name
    if folder.exists():
        raise DataError(f"{folder}: an audit has written to it; give --out another folder")
    folder.mkdir(parents=True)
    files = files or _files_of(out, name)
    files.mkdir(exist_ok=True)
    limits = [f"{timeout:g}", str(folder.resolve()), str(files.resolve())]
    command = ["-m", "largebatch.audit.resume.observing", *limits, *words]
    option = "whole" if name == "repeat" else name
    try:
        _start(command, workers, folder)
    except RequestedStopError:
        raise
    except (LargebatchError, WorkerFailedError) as error:
        raise DataError(_failure(option, str(error), folder)) from None
    run = read_run(folder)
    if len(run) < workers:
        raise DataError(
            f"--{option}: {workers - len(run)} of {workers} workers ended without a record; see "
            f"{folder}/worker-*.log"
        )
    if not all(worker.updates for worker in run):
        raise DataError(
            f"--{option}: it made no update of a torch.optim.Optimizer in a process that the audit "
            "started; workers are started by --workers, not by the script"
        )
    return run


def _start(command: Sequence[str], workers: int, folder: Path) -> None:
    """Run `python *command` as several workers, or alone, and wait for its end."""
    if workers > 1:
        start_workers(command, workers=workers)
    else:
        alone = [Command(name="worker 0", arguments=command)]
        Processes(sys.executable, alone, folder=folder).run()


def _failure(option: str, error: str, folder: Path) -> str:
    """Return the message for a script that failed: its last lines, and where the others are."""
    found = re.search(r"worker (\d+)", error)
    log = folder / f"worker-{found[1] if found else 0}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    last = "\n".join(lines[-_SHOWN_LINES:])
    reason = error.splitlines()[0]
    hint = ""
    if "FileNotFoundError" in reason or "No such file" in reason:
        hint = "; scripts run in an empty folder: give data by absolute paths"
    return f"--{option} failed: {reason}{hint}\n{last}\nall of its output: {log}"


def _saves(worker: Worker) -> bool:
    states = [*worker.updates, *([] if worker.end is None else [worker.end])]
    return bool(worker.saved_aside) or any(state.saved for state in states)


def read_run(folder: Path) -> Run:
    """Return the records of a run that `observing` wrote, by rank."""
    paths = sorted(folder.glob("worker-*.json"), key=lambda it: int(it.stem.partition("-")[2]))
    return tuple(_read_worker(path) for path in paths)


def _read_worker(path: Path) -> Worker:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return worker_from(fields, tuple(read_updates(path.with_suffix(".jsonl"))))


def worker_from(fields: dict[str, Any], updates: Sequence[Update]) -> Worker:
    """Return the record of a worker, without copies of the model that are not averages.

    `fields` are those of a Worker without its updates, and `averages`, the numbers of the copies
    that changed.
    """
    fields = dict(fields)
    averages = {str(number): str(place) for place, number in enumerate(fields.pop("averages"))}
    end = fields.pop("end")
    lists = {name: tuple(it) for name, it in fields.items() if isinstance(it, list)}
    return Worker(
        **fields | lists,
        updates=tuple(_with_averages(it, averages) for it in updates),
        end=None if end is None else _with_averages(read_update(json.dumps(end)), averages),
    )


def _with_averages(update: Update, numbers: dict[str, str]) -> Update:
    """Keep the averages with these numbers, and give them the ones they map to."""
    averages: dict[str, Trace] = {}
    for key, trace in update.averages.items():
        number, _, name = key.partition(":")
        if number in numbers:
            averages[f"{numbers[number]}:{name}"] = trace
    return replace(update, averages=averages)
