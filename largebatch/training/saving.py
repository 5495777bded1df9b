"""Saves a run and restores it, and compares the weights of the workers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from largebatch.distributed.agreement import require_same_bits
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, printable
from largebatch.tracking.environment import versions
from largebatch.tracking.scalars import read_ids
from largebatch.training.checkpoint import (
    Checkpoint,
    Found,
    Origin,
    copy_state,
    newest_checkpoint,
    parse_checkpoint,
    set_aside_damaged,
)
from largebatch.training.trainer import Trainer


def save_is_due(trainer: Trainer, *, since: int) -> bool:
    """Return True if a checkpoint is due; `since` is the update of the previous call."""
    every = trainer.recipe.execution.checkpoints.every_steps
    return _is_due(trainer, every, since=since) or trainer.step_log.save_due


def comparison_is_due(trainer: Trainer, *, since: int) -> bool:
    """Return True if the weights of the workers are to be compared; `since` is as above."""
    return _is_due(trainer, trainer.recipe.execution.compare_every, since=since)


def _is_due(trainer: Trainer, every: int | None, *, since: int) -> bool:
    return every is not None and trainer.state.progress.step // every > since // every


def save(trainer: Trainer) -> None:
    """Start to write a checkpoint of the state, which must be the same on every worker.

    Raises CheckpointError on worker 0, which writes, if the previous checkpoint could not be
    written and the recipe stops for that; DesynchronizedError as `compare_weights`.
    """
    begin = time.perf_counter()
    if trainer.recipe.execution.compare_every is not None:
        compare_weights(trainer)
    if trainer.backend.rank == 0:
        checkpoint = Checkpoint.of(
            trainer.recipe,
            copy_state(trainer.state.state_dict()),
            Origin(
                plan=asdict(trainer.plan),
                data=trainer.pipeline.splits,
                classes=list(map(printable, trainer.pipeline.classes)),
                versions=versions(),
                trackers=read_ids(trainer.checkpoints.parent),
            ),
        )
        _write(trainer, lambda: trainer.writer.write(checkpoint))
    seconds = time.perf_counter() - begin + trainer.writer.seconds
    trainer.step_log.note_saved(seconds=seconds)


def finish_saving(trainer: Trainer) -> None:
    """Wait until the last checkpoint is on the disk; raises as `save` does."""
    _write(trainer, trainer.writer.wait)


def _write(trainer: Trainer, write: Callable[[], None]) -> None:
    try:
        write()
    except CheckpointError as error:
        if trainer.recipe.execution.checkpoints.on_error == "stop":
            raise
        trainer.note(trainer.stage, str(error), kind="checkpoint")
        write()


def compare_weights(trainer: Trainer) -> None:
    """Raise DesynchronizedError on every worker unless all have the same weights."""
    tensors = trainer.state.model.state_dict().values()
    when = f"step {trainer.state.progress.step}"
    backend, workers = trainer.backend, trainer.pipeline.workers
    require_same_bits(tensors, backend, backend.device, when=when, workers=workers)


def restore(trainer: Trainer, checkpoint: Checkpoint, *, source: str = "the checkpoint") -> None:
    """Load the state of a checkpoint.

    Raises CheckpointError, which begins with `source`, if the checkpoint is of another run.
    """
    if checkpoint.progress.step > trainer.plan.steps:
        trainer.state.use(trainer.build_affine())
    with require_fit(source):
        trainer.state.load_state_dict(checkpoint.state)


@contextmanager
def require_fit(source: str) -> Iterator[None]:
    """Raise CheckpointError, which begins with `source`, if a saved state cannot be loaded."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{source}: does not fit this run: {type(error).__name__}: {reason[:500]}"
        ) from None


def share_checkpoint(newest: Found | None, backend: Backend) -> Checkpoint | None:
    """Return the checkpoint that worker 0 has read on every worker; the others pass None."""
    content = broadcast_bytes(newest.content if newest else None, backend)
    if newest is not None:
        return newest.checkpoint
    return parse_checkpoint(content, source="the checkpoint of worker 0") if content else None


def return_to_checkpoint(trainer: Trainer, *, after: str) -> bool:
    """Restore the newest checkpoint of this stage on every worker; return True if there is one.

    `after` is the reason in words.
    """
    finish_saving(trainer)
    newest = newest_checkpoint(trainer.checkpoints) if trainer.backend.rank == 0 else None
    if newest is not None:
        set_aside_damaged(trainer.checkpoints, step=newest.checkpoint.progress.step)
    checkpoint = share_checkpoint(newest, trainer.backend)
    if checkpoint is None or len(checkpoint.stages) != len(trainer.state.stages):
        return False
    to = checkpoint.progress.step
    text = f"rolled back to step {to}: {after}"
    trainer.note(trainer.stage, text, kind="rolled back", to=to)
    if checkpoint.progress.step == trainer.plan.steps:  # the affine stage starts again
        checkpoint = _without_optimizer(trainer, checkpoint)
    restore(trainer, checkpoint)
    trainer.begin()
    return True


def _without_optimizer(trainer: Trainer, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of the end of the schedule as the start of the affine stage.

    That stage has another optimizer, which starts without momentum.
    """
    trainer.state.use(trainer.build_affine())
    fresh = trainer.state.state_dict()
    state = {**checkpoint.state, "optimizer": fresh["optimizer"], "extra": fresh["extra"]}
    return replace(checkpoint, state=state)
