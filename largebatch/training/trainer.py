"""The objects of a run on one worker, and its measurements.

`stages` runs the stages with them, `judging` ends a stage, `saving` writes and restores
checkpoints.
"""

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from largebatch.data.pipeline import CleanSamples, Pipeline
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.models.batchnorm import Spans
from largebatch.models.views import MeanOfViews
from largebatch.models.wrappers import uncompiled
from largebatch.optim.schedule_free import at_average, is_averaging, store_average
from largebatch.polish.statistics import Drift, polish
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.optimizers import ScheduleFree
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import (
    Evaluation,
    Event,
    Note,
    NoteKind,
    StageName,
    Start,
    Tracker,
    now,
)
from largebatch.training.checkpoint import Writer
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.loss import Criterion
from largebatch.training.profiling import Profiler
from largebatch.training.state import TrainState, Updater
from largebatch.training.step_log import StepLog

Updates = Callable[["Trainer", StageName, range, int], Generator[None, None, None]]
"""Makes the remaining updates of a stage, a range of the plan's, and yields after one or several of
them: whenever every worker has the same state, so that it can be evaluated and saved.

The last argument is the update after which this part of the run ends. An extension may yield only
there and where `plan.evaluate_after` and the checkpoints of the recipe need it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The objects of one run on one worker. Attributes are never rebound."""

    recipe: Recipe
    plan: Plan
    backend: Backend
    pipeline: Pipeline
    criterion: Criterion
    spans: Spans
    state: TrainState
    build_affine: Callable[[], Updater]
    """Freezes the weights that the affine stage does not train; returns the updater of the rest."""

    trackers: list[Tracker]
    """Trackers of the run; empty on all workers but the first."""

    emit: Callable[[Event], None]
    """Sends an event to the trackers."""

    step_log: StepLog
    checkpoints: Path
    writer: Writer
    """Writes to `checkpoints`."""

    updates: Updates
    """Makes the updates of a stage: `synchronous_updates`, or those of an extension."""

    profiler: Profiler | None = None
    """Profiles some synchronous updates; None on workers other than the first."""

    began: float = field(default_factory=time.time)
    """Start of this worker's construction, in seconds since 1970."""

    def begin(self) -> None:
        """Emit the start of the run, or of a part that is computed again."""
        self.emit(
            Start(
                time=now(),
                resume_step=self.state.progress.step,
                recipe=self.recipe.name,
                plan=self.plan,
                layers=self.step_log.layers,
                weights_sha256=self.state.weights_sha256,
                unusable_images=self.pipeline.unusable,
            )
        )

    def measure(self, each: Callable[[Tensor, Tensor], object] = lambda *_: None) -> Metrics:
        """Evaluate the current model on the validation data; `each` is as in evaluate.

        If the optimizer averages weights, evaluate their average, with statistics of its own.
        """
        expected = self.recipe.data.val_split
        return self._evaluate(self.pipeline.validation(), expected=expected, each=each)

    def measure_training(self) -> Metrics:
        """Evaluate the current model on all training images, without augmentation."""
        samples = CleanSamples(self.pipeline, self.recipe.train_samples)
        return self._evaluate(samples, expected=samples.samples)

    def measure_held_out(self) -> Metrics:
        """Evaluate the current model on the training samples that are held out."""
        expected = len(self.pipeline.held_out_samples)
        return self._evaluate(self.pipeline.held_out(), expected=expected)

    def _evaluate(
        self,
        batches: Iterable[Batch],
        *,
        expected: int | None = None,
        each: Callable[[Tensor, Tensor], object] = lambda *_: None,
    ) -> Metrics:
        model, views = self.state.model, self.recipe.evaluation.views
        if views > 1:
            model = MeanOfViews(model, views=views)
        with self._measurable():
            return evaluate(model, batches, self.backend, expected=expected, each=each)

    def measure_statistics(self, samples: int, *, sequential: bool = False) -> Drift:
        """Polish the statistics of the model over the first samples of the training order."""
        images = CleanSamples(self.pipeline, samples)
        return polish(self.state.model, images, self.backend, sequential=sequential)

    @contextmanager
    def _measurable(self) -> Iterator[None]:
        """Run the model uncompiled, and at the average of its weights if the optimizer has one."""
        optimizer = self.state.updater.optimizer
        with uncompiled():
            if not is_averaging(optimizer.param_groups):
                yield
                return
            with at_average(self.state.model, optimizer):
                self._measure_average()
                yield

    def store_average(self) -> None:
        """Copy the average of the weights into the model, if the optimizer has one."""
        optimizer = self.state.updater.optimizer
        if is_averaging(optimizer.param_groups):
            store_average(optimizer)
            self._measure_average()

    def _measure_average(self) -> None:
        section = self.recipe.optimizer
        if isinstance(section, ScheduleFree) and section.statistics_samples is not None:
            self.measure_statistics(section.statistics_samples)

    def evaluate(
        self, stage: StageName, each: Callable[[Tensor, Tensor], object] = lambda *_: None
    ) -> Metrics:
        """Evaluate the current model and emit the event; `each` is as in evaluate."""
        begun = time.perf_counter()
        gc.collect()  # here, because it never does so by itself: see process.py
        metrics = self.measure(each)
        step = self.state.progress.step
        self.emit(
            Evaluation(
                stage=stage,
                step=step,
                epoch=self.plan.epoch(step),
                seconds=time.perf_counter() - begun,
                **asdict(metrics),
            )
        )
        return metrics

    def note(
        self, stage: StageName, text: str, *, kind: NoteKind = "remark", **numbers: float
    ) -> None:
        """Emit a note."""
        step = self.state.progress.step
        self.emit(Note(kind=kind, stage=stage, step=step, text=text, numbers=numbers))

    @property
    def stage(self) -> StageName:
        """Name of the current stage, by the number of updates done."""
        step = self.state.progress.step
        if step > self.plan.steps:
            return "affine"
        return "clean" if step > self.plan.train_steps else "train"
