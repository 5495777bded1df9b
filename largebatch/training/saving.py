"""Saves a run and restores it, and compares the weights of the workers."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from largebatch.data.pipeline import Pipeline
from largebatch.distributed.agreement import require_same_bits
from largebatch.distributed.backend import Backend
from largebatch.errors import CheckpointError, printable
from largebatch.recipe.recipe import Recipe
from largebatch.training.checkpoint import (
    Checkpoint,
    Origin,
    Writer,
    copy_state,
)
from largebatch.training.state import TrainState
from largebatch.training.step_log import Requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """Writes the state of a run into its checkpoints, and reads it."""

    recipe: Recipe
    """Written into every checkpoint."""

    state: TrainState
    backend: Backend
    pipeline: Pipeline
    requests: Requests
    writer: Writer

    def is_due(self, *, since: int) -> bool:
        """Return True if a checkpoint is due; `since` is the update of the previous call."""
        every = self.recipe.execution.checkpoints.every_steps
        return self._is_due(every, since=since) or self.requests.save_due

    def comparison_is_due(self, *, since: int) -> bool:
        """Return True if the weights of the workers are to be compared; `since` is as above."""
        return self._is_due(self.recipe.execution.compare_every, since=since)

    def _is_due(self, every: int | None, *, since: int) -> bool:
        return every is not None and self.state.progress.step // every > since // every

    def save(self) -> None:
        """Start to write a checkpoint of the state, which must be the same on every worker.

        Raises CheckpointError on worker 0, which writes, if the previous checkpoint could not be
        written; DesynchronizedError as `compare`.
        """
        begin = time.perf_counter()
        if self.recipe.execution.compare_every is not None:
            self.compare()
        if self.backend.rank == 0:
            checkpoint = Checkpoint.of(
                self.recipe,
                copy_state(self.state.state_dict()),
                Origin(
                    data=self.pipeline.splits,
                    classes=list(map(printable, self.pipeline.classes)),
                ),
            )
            self.writer.write(checkpoint)
        seconds = time.perf_counter() - begin + self.writer.seconds
        self.requests.note_saved(seconds=seconds)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk; raises as `save` does."""
        self.writer.wait()

    def compare(self) -> None:
        """Raise DesynchronizedError on every worker unless all have the same weights."""
        tensors = self.state.model.state_dict().values()
        when = f"step {self.state.progress.step}"
        require_same_bits(tensors, self.backend, self.backend.device, when=when)

    def restore(self, checkpoint: Checkpoint, *, source: str = "the checkpoint") -> None:
        """Load the state of a checkpoint.

        Raises CheckpointError, which begins with `source`, if the checkpoint is of another run.
        """
        if checkpoint.progress.step > self.pipeline.plan.steps:
            self.state.begin_affine()
        with require_fit(source):
            self.state.load_state_dict(checkpoint.state)
        self.state.progress = replace(checkpoint.progress)
        self.state.stages = list(checkpoint.stages)


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
