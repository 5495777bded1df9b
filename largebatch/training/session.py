"""A run on one worker: what its stages use. `stages` has what happens with it, in order."""

import time
from bisect import bisect_right
from contextlib import closing
from dataclasses import dataclass, field

from largebatch.recipe.polish import Polish
from largebatch.tracking.events import Start, now
from largebatch.training.judging import Evaluator, Judge
from largebatch.training.saving import Saver
from largebatch.training.state import TrainState
from largebatch.training.step_log import RunLog
from largebatch.training.updates import Part, Training, Updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The objects of one run on one worker. Attributes are never rebound."""

    training: Training
    updates: Updates
    """Makes the updates of a stage: `synchronous_updates`, or those of an extension."""

    judge: Judge
    polish: Polish
    """The stages after the schedule."""

    began: float = field(default_factory=time.time)
    """Start of this worker's construction, in seconds since 1970."""

    @property
    def state(self) -> TrainState:
        """What changes while the run trains."""
        return self.training.state

    @property
    def evaluator(self) -> Evaluator:
        """Measures the current model."""
        return self.judge.evaluator

    @property
    def saver(self) -> Saver:
        """Writes checkpoints."""
        return self.judge.saver

    @property
    def log(self) -> RunLog:
        """Takes the events of the run."""
        return self.training.log

    def begin(self) -> None:
        """Emit the start of the run, or of a resumed part of it."""
        self.log.emit(
            Start(
                time=now(),
                resume_step=self.state.progress.step,
                recipe=self.saver.recipe.name,
                plan=self.training.plan,
                layers=self.training.step_log.monitors.layers,
                weights_sha256=self.state.weights_sha256,
            )
        )

    def make_updates(self, part: Part) -> None:
        """Make these updates of a stage; evaluate, compare and save between them."""
        training, saver = self.training, self.saver
        points = training.plan.evaluate_after  # in rising order, up to 100,000 of them
        done = part.steps.start
        with closing(self.updates(training, part)) as updates:
            for _ in updates:
                before, done = done, training.state.progress.step
                passed = bisect_right(points, before) < bisect_right(points, done)
                evaluates = passed and done < part.steps.stop  # the stage's end has its own
                saves = evaluates or saver.is_due(since=before)  # compares weights too
                if saver.comparison_is_due(since=before) and not saves:
                    saver.compare()
                if evaluates:
                    training.step_log.flush()
                    training.state.progress.note(self.judge.evaluate(part.stage))
                if saves:
                    training.step_log.flush()
                    saver.save()
                if training.requests.stopped or done >= part.end:
                    break
        training.step_log.flush()
