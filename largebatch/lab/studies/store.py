"""The store of a study: one JSON file a run, complete or absent.

Any number of processes, on one machine or many, may fill one folder at once. A run is claimed by a
lock, which the system releases when its owner ends, so nobody takes over a run that is under way.

    FOLDER/RECIPE/VARIANT/cell.json       the definition of the cell
    FOLDER/RECIPE/VARIANT/seed-1.json     the record of a run
    FOLDER/RECIPE/VARIANT/seed-1/         its run folder, if it trains with checkpoints
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO

from pydantic_core import to_json, to_jsonable_python

from largebatch.errors import LONGEST_NAME, StudyError, clip
from largebatch.lab.studies.records import Json
from largebatch.lab.studies.study import Cell, Slot, Values
from largebatch.recipe.loading import differences
from largebatch.storage import write_whole, writing

CELL, CLAIM = "cell.json", ".claim"
DRAWN = ".drawn"
"""Suffix of the file with the values of a trial, which are drawn before it starts."""

_writing = partial(
    writing, error=StudyError, hint="make room and repeat the same command, which resumes"
)


def identity(cell: Cell, slot: Slot) -> Json:
    """Return the part of a record that says whose it is."""
    definition = json.dumps(to_jsonable_python(cell.definition), sort_keys=True)
    return {
        "recipe": cell.configuration,
        "variant": cell.variant,
        "run": slot.name,
        "seed": slot.seed,
        "definition_sha256": sha256(definition.encode()).hexdigest(),
    }


class Store:
    """The folder of a study."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[Path, IO[bytes]] = {}
        """Locked files of this process by the file of the record."""

    def path(self, cell: Cell, slot: Slot) -> Path:
        """Return the file of a record."""
        return self.folder / cell.name / f"{slot.name}.json"

    def require_writable(self) -> None:
        """Raise StudyError unless this user can write in the folder, or make it."""
        there = next(
            path for path in (self.folder, *self.folder.absolute().parents) if path.exists()
        )
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise StudyError(
                f"{self.folder}: cannot be written: {there} is not a folder that this user can "
                "write to; choose another --out"
            )

    def define(self, cells: Sequence[Cell]) -> None:
        """Write the definitions of cells.

        Raises StudyError for records of another definition before it writes one.
        """
        self.require_same(cells)
        for cell in cells:
            path = self.folder / cell.name / CELL
            with _writing(path):
                write_whole(path, json.dumps(to_jsonable_python(cell.definition)).encode())

    def require_same(self, cells: Sequence[Cell]) -> None:
        """Raise StudyError for records of another definition of a cell."""
        for cell in cells:
            path = self.folder / cell.name / CELL
            content = to_jsonable_python(cell.definition)
            there = _read(path)
            if there is not None and there != content:
                other = "its definition", there, content
                key, old, new = next(differences(there, content), other)
                raise StudyError(
                    f"{path.parent}: was recorded with other settings than the study has now: "
                    f"{key} is {clip(json.dumps(old), LONGEST_NAME)} there and "
                    f"{clip(json.dumps(new), LONGEST_NAME)} here; give another --out, or remove it"
                )

    def read(self, cell: Cell, slot: Slot) -> Json | None:
        """Return a record; None if there is none.

        Raises StudyError for a damaged one, and for that of another run: a file that was copied or
        renamed, or that another study made.
        """
        path = self.path(cell, slot)
        record = _read(path)
        for key, expected in identity(cell, slot).items() if record is not None else ():
            assert record is not None
            if key not in record:
                raise StudyError(f"{path}: has no {key}, which every record has; remove it")
            value = record[key]
            if type(value) is not type(expected) or value != expected:
                raise StudyError(
                    f"{path}: is the record of another run: its {key} is "
                    f"{clip(json.dumps(value), LONGEST_NAME)}, expected {json.dumps(expected)}; "
                    "remove it"
                )
        return record

    def write(self, cell: Cell, slot: Slot, record: Json) -> None:
        """Record a run, unless another process has, and release its claim.

        Raises StudyError if it cannot be written.
        """
        path = self.path(cell, slot)
        with _writing(path):
            if not path.exists():
                content = {**record, **identity(cell, slot)}
                write_whole(path, to_json(content, indent=1, inf_nan_mode="null"))
            # While the lock is held: who opens the removed file gets a lock, looks again, and finds
            # a record.
            path.with_suffix(CLAIM).unlink(missing_ok=True)
        self.release(cell, slot)

    def claim(self, cell: Cell, slot: Slot) -> bool:
        """Claim a run; return False if it is recorded or another process is making it.

        Raises StudyError where the file system has no locks.
        """
        path = self.path(cell, slot)
        if path in self._held or path.exists():
            return False
        with ExitStack() as opened:
            with _writing(path):
                file = opened.enter_context(path.with_suffix(CLAIM).open("ab"))
            # A lock and not the file itself is the claim, since the system releases it when its
            # owner dies.
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                raise StudyError(
                    f"{self.folder}: cannot be locked ({error.strerror}), and processes share a "
                    "study by locks; give an --out on another file system"
                ) from None
            if path.exists():  # recorded since the first look
                return False
            self._held[path] = file
            opened.pop_all()  # until it is released
        return True

    def release(self, cell: Cell, slot: Slot) -> None:
        """Give up a claim, for this process or another to resume."""
        file = self._held.pop(self.path(cell, slot), None)
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a forked process has it open
            file.close()

    def release_all(self) -> None:
        """Give up all claims of this process, which ends."""
        while self._held:
            self._held.popitem()[1].close()

    def values(self, cell: Cell, slot: Slot, draw: Callable[[], Values]) -> Values:
        """Return the values of the searched keys of a claimed run.

        Those of a trial are drawn once, also if it is resumed. Raises StudyError for a damaged
        file of them.
        """
        if not slot.trial:
            return draw()
        path = self.path(cell, slot).with_suffix(DRAWN)
        drawn = _read(path)
        if drawn is None:
            drawn = dict(draw())
            with _writing(path):
                write_whole(path, json.dumps(drawn).encode())
        for key, value in drawn.items():
            if type(value) is not float or not 0 < value < math.inf:
                raise StudyError(
                    f"{path}: {key} is {clip(json.dumps(value), LONGEST_NAME)}, expected a number "
                    "above 0; remove the file"
                )
        return drawn


def _read(path: Path) -> Json | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise StudyError(f"{path}: is not a record of a study; remove it")
    return content
