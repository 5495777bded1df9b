"""The ids of a run in trackers, stored in the run folder and in checkpoints."""

import re
from pathlib import Path

from largebatch.storage import write_whole

_IS_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
"""Characters of an id, which becomes part of a path and of an artifact's name. An id may come
from an untrusted checkpoint; W&B's artifacts allow no other characters."""

WITH_IDS = ("wandb", "mlflow")
"""Trackers that give a run an id."""


def is_id(text: str) -> bool:
    """Return True if a text is a valid id of a run."""
    return _IS_ID.fullmatch(text) is not None


def write_id(folder: Path, tracker: str, identity: str) -> None:
    """Store the id of the folder's run in a tracker."""
    write_whole(folder / f"{tracker}-id", identity.encode())


def read_id(folder: Path, tracker: str, *, otherwise: str | None = None) -> str | None:
    """Return the id of the folder's run in a tracker; without one, `otherwise` if it is valid."""
    path = folder / f"{tracker}-id"
    known = path.read_text(encoding="utf-8", errors="replace") if path.exists() else otherwise
    return known if known is not None and is_id(known) else None


def read_ids(folder: Path) -> dict[str, str | None]:
    """Return the ids of the folder's run in all trackers, for checkpoints."""
    return {tracker: read_id(folder, tracker) for tracker in WITH_IDS}
