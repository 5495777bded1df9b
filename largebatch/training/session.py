"""A run on one worker: what its stages use, and the training loop over the batches of one.

`stages` has what happens with it, in order.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from largebatch.data.pipeline import Pipeline
from largebatch.data.types import Batches
from largebatch.distributed.backend import Backend
from largebatch.models.batchnorm import Spans
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.polish import Polish
from largebatch.tracking.events import StageName, Start, now
from largebatch.training.checkpoint import Saver
from largebatch.training.graph import UseGraph, step_for
from largebatch.training.judging import Evaluator, Judge
from largebatch.training.loop import Criterion, Step, Update, step_seeds, train
from largebatch.training.replay import Replay
from largebatch.training.state import TrainState
from largebatch.training.step_log import Requests, RunLog, StepLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The objects that make the updates of a run, on one worker. Attributes are never rebound."""

    state: TrainState
    plan: Plan
    pipeline: Pipeline
    backend: Backend
    criterion: Criterion
    spans: Spans
    log: RunLog
    step_log: StepLog
    requests: Requests
    seed: int
    skip_nonfinite: bool
    clip_norm: float | None
    graph: UseGraph
    replay: Replay | None = None
    """Compares passes of the workers in some updates; None without execution.replay_every."""


class StageSteps(NamedTuple):
    """The updates of a stage that remain, a range of the plan's."""

    stage: StageName
    steps: range
    end: int
    """The update after which this part of the run ends."""

    clean: bool
    """True if they are on clean images."""


Updates = Callable[[Training, StageSteps], Generator[None, None, None]]
"""Makes the updates of a stage, and yields after one or several of them: whenever every worker has
the same state, so that it can be evaluated and saved.

An extension may yield only at the end of the part and where `plan.evaluate_after` and the
checkpoints of the recipe need it.
"""


MakesUpdates = Callable[[Batches], Generator[Update, None, None]]
"""Makes updates on the next batches, and yields each."""


def synchronous_updates(
    training: Training, part: StageSteps, *, after: Callable[[], object] = lambda: None
) -> Generator[None, None, None]:
    """Make synchronous updates by the training loop; call `after` and yield after each."""
    state = training.state
    step_log = training.step_log
    step_log.resume_clock()
    with closing(training.pipeline.training(part.steps, clean=part.clean)) as batches:
        for make_updates in pieces_of(training, part):
            for update in make_updates(batches):
                log_update(part.stage, update, state, step_log)
                after()
                yield
                if not step_log.is_training:  # it was flushed, for something other than updates
                    step_log.resume_clock()


def pieces_of(training: Training, part: StageSteps) -> Iterator[MakesUpdates]:
    """Yield what makes the updates of each piece of a stage, on the stage's batches.

    A schedule of the batch has pieces, each with its own global batch and accumulation.
    """
    state = training.state
    make_step = step_for(
        training.graph,
        training.backend.device,
        note=partial(training.log.note_once, part.stage),
    )
    for steps, global_batch, accumulation in training.plan.within(part.steps):
        made = make_step(
            state.model,
            state.updater.optimizer,
            training.criterion,
            state.updater.reducer,
            training.spans,
            scaler=state.scaler,
            global_batch=global_batch,
            skip_nonfinite=training.skip_nonfinite,
            clip_norm=training.clip_norm,
            measure_norm=training.step_log.monitors.measure_norm,
            follow=state.move_average,
        )
        step: Step = made
        if training.replay is not None:
            step = training.replay.checked(made, stage=part.stage, steps=steps, clean=part.clean)
        yield partial(
            train,
            step,
            schedule=state.updater.schedule,
            steps=steps,
            accumulation=accumulation,
            seed=step_seeds(training.seed, training.backend.rank),
        )


def log_update(stage: StageName, update: Update, state: TrainState, step_log: StepLog) -> None:
    """Count an update that was made, and log it; raises as StepLog.flush."""
    seconds = step_log.lap()
    step_log.read_own()  # of the update before, which is counted before this one
    images = step_log.plan.batch_at(update.step)
    state.count(update.step, images=images, seconds=seconds)
    step_log.add(stage, update, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Training):
    """The objects of one run on one worker. Attributes are never rebound."""

    updates: Updates
    """Makes the updates of a stage: `synchronous_updates`, or those of an extension."""

    judge: Judge
    polish: Polish
    """The stages after the schedule."""

    began: float = field(default_factory=time.time)
    """Start of this worker's construction, in seconds since 1970."""

    proven: str | None = None
    """Which kernels and graphs are used, and what their trials showed; None on a CPU."""

    remarks: tuple[str, ...] = ()
    """What was chosen for this machine, such as the device batch, and why, for the log."""

    ignored: tuple[str, ...] = ()
    """Descriptions of the files of the data that are not used."""

    @property
    def evaluator(self) -> Evaluator:
        """Measures the current model."""
        return self.judge.evaluator

    @property
    def saver(self) -> Saver:
        """Writes checkpoints."""
        return self.judge.saver

    def begin(self) -> None:
        """Emit the start of the run, or of a resumed part of it."""
        self.log.emit(
            Start(
                time=now(),
                resume_step=self.state.progress.step,
                recipe=self.saver.recipe.name,
                plan=self.plan,
                layers=self.step_log.monitors.layers,
                weights_sha256=self.state.weights_sha256,
            )
        )

    def evaluate_and_save(self, part: StageSteps, *, since: int) -> None:
        """Evaluate, compare and save as is due after the updates of a stage since step `since`."""
        saver = self.saver
        done = self.state.progress.step
        points = self.plan.evaluate_after  # in rising order, up to 100,000 of them
        passed = bisect_right(points, since) < bisect_right(points, done)
        evaluates = passed and done < part.steps.stop  # the stage's end has its own
        saves = evaluates or saver.is_due(since=since)  # compares weights too
        if saver.comparison_is_due(since=since) and not saves:
            saver.compare()
        if evaluates:
            self.step_log.flush()
            self.state.progress.note(self.judge.evaluate(part.stage))
        if saves:
            self.step_log.flush()
            saver.save()
