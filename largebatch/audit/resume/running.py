"""The four runs of an audit of a resumption: the whole, the whole again, its first part, the rest.

The first part and the rest share a folder, which is the current one of both; the two others have
one each. So a checkpoint with a relative name is where the rest looks for it.
"""

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from largebatch.audit.resume.record import Trace, Update, Worker, read_update, read_updates
from largebatch.errors import DataError

Run = tuple[Worker, ...]
"""The records of a run's workers, by rank."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The records of the four runs; `rest` begins after as many updates as `first` has."""

    whole: Run
    repeat: Run
    first: Run
    rest: Run


def observe(
    whole: Sequence[str],
    first: Sequence[str],
    rest: Sequence[str],
    *,
    workers: int = 1,
    rest_workers: int | None = None,
    out: Path,
    timeout: float = 600,
) -> Runs:
    """Run three commands, each with the words behind `python`, and return what they did.

    The whole runs twice. `rest_workers` is the number of workers of the rest, if it is another.
    Raises DataError for a command that cannot be compared.
    """
    raise NotImplementedError


def read_run(folder: Path) -> Run:
    """Return the records of a run that `observing` wrote, by rank."""
    paths = sorted(folder.glob("worker-*.json"), key=lambda it: int(it.stem.partition("-")[2]))
    return tuple(read_worker(path) for path in paths)


def read_worker(path: Path) -> Worker:
    """Return the record of a worker, without copies of the model that are not averages."""
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    averages = {str(number): str(place) for place, number in enumerate(fields.pop("averages"))}
    end = fields.pop("end")
    updates = tuple(read_updates(path.with_suffix(".jsonl")))
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
