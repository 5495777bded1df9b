"""The run folder as a record: what it holds at the start, and what a run resumes from."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError
from largebatch.recipe.loading import dump_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.storage import write_whole
from largebatch.tracking.console import Console
from largebatch.tracking.events import (
    CHECKPOINTS,
    LOG,
    RECIPE,
    JsonLines,
    Start,
    Tracker,
)
from largebatch.tracking.wandb import Wandb
from largebatch.training.state import Checkpoint, newest_checkpoint, parse_checkpoint
from largebatch.training.trainer import Trainer

Resume = bool | Literal["auto"]


def open_folder(trainer: Trainer, folder: Path) -> list[Tracker]:
    """Make the run folder and return what follows the run; worker 0 only."""
    recipe, plan, index = trainer.recipe, trainer.plan, trainer.pipeline
    trackers: list[Tracker] = [Console()]
    if "wandb" in recipe.tracking:
        config = {**recipe.model_dump(mode="json"), "plan": asdict(plan)}
        trackers.append(Wandb(folder, config))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RECIPE, dump_recipe(recipe).encode())
        trackers.insert(1, JsonLines(folder / LOG))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None
    start = Start(
        time=datetime.now(UTC).replace(microsecond=0),
        resume_step=trainer.state.progress.step,
        recipe=recipe.name,
        plan=plan,
        unusable_images=len(index.train_index.bad) + len(index.val_index.bad),
    )
    for tracker in trackers:
        tracker.record(start)
    return trackers


def read_checkpoint(recipe: Recipe, folder: Path, backend: Backend) -> Checkpoint | None:
    """Return the state to go on from, on every worker; None if the run saved nothing yet.

    Worker 0 reads it for all. Raises CheckpointError if it belongs to another recipe.
    """
    with backend.busy():
        content = newest_checkpoint(folder / CHECKPOINTS) if backend.rank == 0 else None
    content = broadcast_bytes(content, backend)
    if not content:
        return None
    checkpoint = parse_checkpoint(content, source=str(folder))
    there, here = checkpoint.recipe.mathematics, recipe.mathematics
    if there != here:
        changed = "; ".join(_differences(there.model_dump(), here.model_dump()))
        raise CheckpointError(f"{folder}: the run there has another recipe: {changed}")
    return checkpoint


def _differences(there: Any, here: Any, where: str = "") -> Iterator[str]:  # noqa: ANN401 -- any JSON
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            dotted = f"{where}.{key}".lstrip(".")
            yield from _differences(there.get(key), here.get(key), dotted)
    elif there != here:
        yield f"{where} is {there} there and {here} here"


def default_folder(recipe: Recipe) -> Path:
    """Return the run folder of a run that is given none: runs/<name>-<time>."""
    return Path("runs") / f"{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}"


def check_folder(folder: Path, *, resume: Resume) -> None:
    """Raise CheckpointError unless a run may start in this folder, or go on in it; auto: either."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; --out names a folder")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(above, os.W_OK):
        raise CheckpointError(f"{folder}: {above} cannot be written to; choose another --out")
    if resume == "auto":
        resume = (folder / RECIPE).exists()
    if resume and not (folder / RECIPE).exists():
        raise CheckpointError(f"{folder}: there is no run to resume; leave --resume out")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise CheckpointError(
            f"{folder}: already holds files; choose another --out, or add --resume to go on with "
            "the run in it"
        )
