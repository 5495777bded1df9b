"""Which run of a tracker belongs to a run folder: its id there, in a file and in checkpoints."""

import re
from pathlib import Path

from largebatch.storage import write_whole

_IS_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
"""What becomes part of a path, and of an artifact's name; an id may come from a stranger's
checkpoint. W&B's artifacts have no other characters."""

WITH_IDS = ("wandb", "mlflow")
"""The trackers that give a run an id."""


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a run."""
    return _IS_ID.fullmatch(text) is not None


def write_id(folder: Path, tracker: str, identity: str) -> None:
    """Note the id of the folder's run in a tracker."""
    write_whole(folder / f"{tracker}-id", identity.encode())


def read_id(folder: Path, tracker: str, *, otherwise: str | None = None) -> str | None:
    """Return the id of the folder's run in a tracker; else the other one, if that can be one."""
    path = folder / f"{tracker}-id"
    known = path.read_text(encoding="utf-8", errors="replace") if path.exists() else otherwise
    return known if known is not None and is_id(known) else None


def read_ids(folder: Path) -> dict[str, str | None]:
    """Return the ids of the folder's run in all trackers, as checkpoints hold them."""
    return {tracker: read_id(folder, tracker) for tracker in WITH_IDS}
