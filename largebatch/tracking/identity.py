"""Which run of a tracker belongs to a run folder: its id there, in a file and in checkpoints."""

import re
from pathlib import Path

from largebatch.storage import write_whole

_IS_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What becomes part of a path; an id may come from a stranger's checkpoint."""

WITH_IDS = ("wandb", "mlflow")
"""The trackers that give a run an id."""


def write_id(folder: Path, tracker: str, identity: str) -> None:
    """Note the id of the folder's run in a tracker."""
    write_whole(folder / f"{tracker}-id", identity.encode())


def read_id(folder: Path, tracker: str, *, otherwise: str | None = None) -> str | None:
    """Return the id of the folder's run in a tracker; else the other one, if that can be one."""
    path = folder / f"{tracker}-id"
    known = path.read_text(encoding="utf-8", errors="replace") if path.exists() else otherwise
    return known if known is not None and _IS_ID.fullmatch(known) else None


def read_ids(folder: Path) -> dict[str, str | None]:
    """Return the ids of the folder's run in all trackers, as checkpoints hold them."""
    return {tracker: read_id(folder, tracker) for tracker in WITH_IDS}
