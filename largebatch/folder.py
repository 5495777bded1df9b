"""Which folder a run goes into, and whether it may; light enough to ask before PyTorch is there."""

import os
from datetime import datetime
from pathlib import Path

from largebatch.errors import CheckpointError
from largebatch.recipe.recipe import Recipe


def default_folder(recipe: Recipe) -> Path:
    """Return the run folder of a run that is given none: runs/<name>-<time>."""
    return Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise CheckpointError unless a run may start in this folder, or go on in it."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; --out names a folder")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(above, os.W_OK):
        raise CheckpointError(f"{folder}: {above} cannot be written to; choose another --out")
    if resume and not (folder / "recipe.yaml").exists():
        raise CheckpointError(f"{folder}: there is no run to resume; leave --resume out")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise CheckpointError(
            f"{folder}: already holds files; choose another --out, or add --resume to go on with "
            "the run in it"
        )
