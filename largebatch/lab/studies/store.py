"""The records of a study: one JSON file a run, complete or absent.

Any number of processes, on one machine or many, may fill one folder at once. A run is claimed by
creating a file exclusively: NAME.claim-000001, or the next number if the owner of the newest claim
is gone. So two processes never take over the same run, also if both see that its owner is gone.

    FOLDER/RECIPE/VARIANT/cell.json       the definition of the cell
    FOLDER/RECIPE/VARIANT/seed-1.json     the record of a run
    FOLDER/RECIPE/VARIANT/seed-1/         its run folder, if it trains with checkpoints
"""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from largebatch.errors import LONGEST_NAME, StudyError, clip
from largebatch.lab.studies.study import Cell, Slot
from largebatch.recipe.loading import differences
from largebatch.storage import write_whole

CELL = "cell.json"
DRAWN = ".drawn"
"""Suffix of the file with the rate of a trial, which is drawn before it starts."""

GRACE_SECONDS = 180.0
"""Seconds without a heartbeat after which the owner of a claim is gone."""

Json = dict[str, Any]


class Store:
    """The folder of a study."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._clock = clock
        self._held: dict[Path, Path] = {}
        """Claim files of this process by the file of the record."""

        self._seen: dict[Path, tuple[int, float]] = {}
        """The last heartbeat of other claims, and when this process first saw it."""

    def path(self, cell: Cell, slot: Slot) -> Path:
        """Return the file of a record."""
        return self.folder / cell.name / f"{slot.name}.json"

    def define(self, cells: Sequence[Cell]) -> None:
        """Write the definitions of cells.

        Raises StudyError for records of another definition before it writes one.
        """
        contents = {self.folder / cell.name / CELL: _as_read(cell.definition) for cell in cells}
        for path, content in contents.items():
            there = _read(path)
            if there is not None and there != content:
                key, old, new = next(differences(there, content))
                raise StudyError(
                    f"{path.parent}: was recorded with other settings than the study has now: "
                    f"{key} is {clip(json.dumps(old), LONGEST_NAME)} there and "
                    f"{clip(json.dumps(new), LONGEST_NAME)} here; give another --out, or remove it"
                )
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(content).encode())

    def read(self, cell: Cell, slot: Slot) -> Json | None:
        """Return a record; None if there is none. Raises StudyError for a damaged one."""
        return _read(self.path(cell, slot))

    def write(self, cell: Cell, slot: Slot, record: Json) -> None:
        """Record a run, unless another process has, and release its claims."""
        path = self.path(cell, slot)
        if not path.exists():
            write_whole(path, json.dumps(record, indent=1).encode())
        self._held.pop(path, None)
        for claim in reversed(_claims(path)):
            claim.unlink(missing_ok=True)

    def claim(self, cell: Cell, slot: Slot) -> bool:
        """Claim a run; return False if it is recorded or another process is making it."""
        path = self.path(cell, slot)
        claims = _claims(path)
        if path in self._held or path.exists() or (claims and not self._is_gone(claims[-1])):
            return False
        number = 1 + (int(claims[-1].name.rpartition("-")[2]) if claims else 0)
        own = path.with_name(f"{path.stem}.claim-{number:06}")
        try:
            with own.open("x", encoding="utf-8") as file:
                json.dump({"machine": _machine(), "process": os.getpid()}, file)
        except FileExistsError:
            return False
        self._held[path] = own
        if path.exists():  # recorded since the first look
            self.release(cell, slot)
            return False
        return True

    def release(self, cell: Cell, slot: Slot) -> None:
        """Give up a claim without a record, for this process or another to resume."""
        claim = self._held.pop(self.path(cell, slot), None)
        if claim is not None:
            claim.unlink(missing_ok=True)

    def release_all(self) -> None:
        """Give up all claims of this process."""
        while self._held:
            self._held.popitem()[1].unlink(missing_ok=True)

    def beat(self) -> None:
        """Write a heartbeat into the claims of this process."""
        for claim in list(self._held.values()):
            with suppress(OSError):
                os.utime(claim)

    def rate(self, cell: Cell, slot: Slot, draw: Callable[[], float | None]) -> float | None:
        """Return the searched rate of a claimed run; it is drawn once, also if it is resumed."""
        path = self.path(cell, slot).with_suffix(DRAWN)
        there = _read(path) or {"rate": draw()}
        if slot.trial:
            write_whole(path, json.dumps(there).encode())
        rate: float | None = there["rate"]
        return rate

    def _is_gone(self, claim: Path) -> bool:
        """Return True if the owner of a claim has ended, or gave no heartbeat for too long.

        Ages are measured on the clock of this process; those of machines need not agree.
        """
        try:
            beat = claim.stat().st_mtime_ns
            owner = json.loads(claim.read_bytes() or b"null")
        except FileNotFoundError:
            return False
        except ValueError:
            owner = None
        is_here = isinstance(owner, dict) and owner.get("machine") == _machine()
        if is_here and (owner["process"] == os.getpid() or not _exists(owner["process"])):
            return True
        now = self._clock()
        seen, since = self._seen.get(claim, (None, now))
        if seen != beat:
            self._seen[claim] = beat, now
            return False
        return now - since > GRACE_SECONDS


def _as_read(definition: Json) -> Json:
    as_read: Json = json.loads(json.dumps(definition))  # tuples become lists
    return as_read


def _claims(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.stem}.claim-*"))


def _read(path: Path) -> Json | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise StudyError(f"{path}: is not a record of a study; remove it")
    return content


@cache
def _machine() -> str:
    """Return an id of this machine and its PID namespace: containers may share a host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return platform.node()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
