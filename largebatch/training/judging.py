"""Evaluates the model of a run, and decides at the end of a stage to keep it or roll it back.

With `polish.keep: better`, a stage that does not increase the number of held-out training images
classified correctly is rolled back.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor

from largebatch.data.pipeline import Pipeline
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.models.wrappers import uncompiled
from largebatch.optim.schedule_free import at_average, is_averaging, store_average
from largebatch.polish.statistics import Drift as PolishDrift
from largebatch.polish.statistics import polish
from largebatch.recipe.polish import Statistics
from largebatch.tracking.events import (
    Accuracy,
    Decision,
    DriftEvent,
    EvaluationEvent,
    GeneralizationGap,
    Mistakes,
    StageName,
    StageResult,
)
from largebatch.training.checkpoint import Saver
from largebatch.training.evaluation import Answer, Answers, Metrics, evaluate
from largebatch.training.state import TrainState
from largebatch.training.step_log import RunLog

Each = Callable[[Tensor, Tensor], object]
"""Called with the scores and labels of every batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the current model of a run, on all workers.

    If the optimizer averages weights, their average is measured, with statistics of its own.
    """

    state: TrainState
    pipeline: Pipeline
    backend: Backend
    views: int
    """Views of each image whose logits are averaged."""

    graph: bool
    """True if passes over batches of one size may be replayed from a graph."""

    average_samples: int | None
    """Number of images that the statistics of an optimizer's average are measured on."""

    def validation(self, each: Each = lambda *_: None) -> Metrics:
        """Evaluate on the validation data."""
        expected = self.pipeline.plan.val_samples
        return self._evaluate(self.pipeline.validation(), expected=expected, each=each)

    def training(self) -> Metrics:
        """Evaluate on all training images, without augmentation."""
        expected = self.pipeline.plan.train_samples
        return self._evaluate(self.pipeline.statistics(expected), expected=expected)

    def held_out(self) -> Metrics:
        """Evaluate on the training samples that are held out."""
        expected = len(self.pipeline.held_out_samples)
        return self._evaluate(self.pipeline.held_out(), expected=expected)

    def statistics(self, samples: int) -> PolishDrift:
        """Polish the statistics of the model over the first samples of the training order."""
        images = self.pipeline.statistics(samples)
        return polish(self.state.model, images, self.backend, graph=self.graph)

    def store_average(self) -> None:
        """Copy the average of the weights into the model, if the optimizer has one."""
        optimizer = self.state.updater.optimizer
        if is_averaging(optimizer.param_groups):
            store_average(optimizer)
            self._measure_average()

    def _evaluate(
        self, batches: Iterable[Batch], *, expected: int, each: Each = lambda *_: None
    ) -> Metrics:
        model = self.state.model
        if self.views > 1:
            from largebatch.models.wrappers import MeanOfViews

            model = MeanOfViews(model, views=self.views)
        with self._measurable():
            return evaluate(
                model, batches, self.backend, expected=expected, each=each, graph=self.graph
            )

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

    def _measure_average(self) -> None:
        if self.average_samples is not None:
            self.statistics(self.average_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Evaluates the stages of a run, and keeps each of them or rolls it back."""

    evaluator: Evaluator
    saver: Saver
    log: RunLog
    decides: bool
    """True if stages that do not help are rolled back."""

    measures_gap: bool
    """True if the generalization gap is measured at the end of every stage."""

    weights_classes: bool = False
    """True if the training loss has weights of classes: then the mean of the accuracies of the
    classes is reported too."""

    def begin(self) -> None:
        """Take a snapshot if the stage that starts or resumes may be rolled back."""
        state = self.evaluator.state
        if self.decides and state.stages:  # the first stage is never rolled back
            state.take_snapshot()

    def evaluate(self, stage: StageName, each: Each = lambda *_: None) -> Metrics:
        """Evaluate the current model and emit the event."""
        start = time.perf_counter()
        gc.collect()  # here, because it never does so by itself: see collected_by_hand
        metrics = self.evaluator.validation(each)
        numbers = {**asdict(metrics), "balanced_top1": self._balanced(metrics)}
        step = self.evaluator.state.progress.step
        self.log.emit(
            EvaluationEvent(
                stage=stage,
                step=step,
                epoch=self.evaluator.pipeline.plan.epoch(step),
                seconds=time.perf_counter() - start,
                **numbers,
            )
        )
        return metrics

    def measure_statistics(self, stage: StageName, section: Statistics) -> None:
        """Measure the statistics and emit their drift."""
        drift = self.evaluator.statistics(section.samples)
        self.log.emit(
            DriftEvent(
                stage=stage,
                step=self.evaluator.state.progress.step,
                samples=section.samples,
                layers=tuple(drift),
            )
        )

    def end(
        self, name: StageName, *, num_steps: int = 0, note: str | None = None, failed: bool = False
    ) -> None:
        """Evaluate, keep the stage or roll it back, record it, and save.

        `note` is a remark on the stage; a stage that `failed` is rolled back whatever its accuracy.
        """
        state = self.evaluator.state
        if note is not None:
            self.log.note(name, note, kind="stage")
        metrics = self._evaluate_end(name)
        last = state.last_kept
        held_out, is_kept = self._decide(name, last, failed=failed)
        if is_kept:
            state.progress.note(metrics)
        else:
            state.roll_back()
        state.stages.append(
            StageResult(
                name=name,
                steps=num_steps,
                seconds=state.seconds - sum(stage.seconds for stage in state.stages),
                top1=metrics.top1,
                top5=metrics.top5,
                loss=metrics.loss,
                balanced_top1=self._balanced(metrics),
                before=_accuracy(last) if last else None,
                held_out=held_out,
                kept=is_kept,
                note=note,
            )
        )
        state.snapshot = {}  # not in the next checkpoint: the decision is made
        self.saver.save()

    def _balanced(self, metrics: Metrics) -> float | None:
        return metrics.balanced_top1 if self.weights_classes else None

    def _evaluate_end(self, stage: StageName) -> Metrics:
        """Evaluate the model; emit the images it classifies wrongly and the generalization gap."""
        pipeline = self.evaluator.pipeline
        step = self.evaluator.state.progress.step
        if pipeline.classes:
            answers = Answers()
            metrics = self.evaluate(stage, answers.add)
            answer = answers.gather(
                pipeline.validation_samples, pipeline.evaluated_samples, self.evaluator.backend
            )
            self.log.emit(find_mistakes(answer, stage=stage, step=step, classes=pipeline.classes))
        else:
            metrics = self.evaluate(stage)
        if self.measures_gap:
            start = time.perf_counter()
            training = self.evaluator.training()
            self.log.emit(
                GeneralizationGap(
                    stage=stage,
                    step=step,
                    samples=training.samples,
                    top1=training.top1,
                    loss=training.loss,
                    gap=metrics.loss - training.loss,
                    seconds=time.perf_counter() - start,
                )
            )
        return metrics

    def _decide(
        self, name: StageName, last: StageResult | None, *, failed: bool
    ) -> tuple[float | None, bool]:
        """Return top-1 on the held-out images (None without them) and True if the stage is kept.

        A model whose loss is not finite is not kept, even if some labels match by chance. The
        counts, and so the decision, are the same on all workers.
        """
        if not self.decides:
            return None, True
        metrics = self.evaluator.held_out()
        if last is None:
            return metrics.top1, True
        assert last.held_out is not None
        usable = not failed and math.isfinite(metrics.loss)
        # Strictly more: as many correct images do not pay for weights that moved.
        is_kept = usable and metrics.top1 > last.held_out
        self.log.emit(
            Decision(
                stage=name,
                step=self.evaluator.state.progress.step,
                samples=metrics.samples,
                before=last.held_out,
                after=metrics.top1,
                kept=is_kept,
            )
        )
        return metrics.top1, is_kept


def _accuracy(stage: StageResult) -> Accuracy:
    return Accuracy(
        top1=stage.top1, top5=stage.top5, loss=stage.loss, balanced_top1=stage.balanced_top1
    )


def find_mistakes(
    answer: Answer, *, stage: StageName, step: int, classes: tuple[str, ...]
) -> Mistakes:
    """Return the images that are classified wrongly, and the sizes of the classes."""
    wrong = np.flatnonzero(answer.label != answer.predicted)
    return Mistakes(
        stage=stage,
        step=step,
        classes=classes,
        sizes=tuple(np.bincount(answer.label, minlength=len(classes)).tolist()),
        samples=tuple(answer.sample[wrong].tolist()),
        labels=tuple(answer.label[wrong].tolist()),
        predicted=tuple(answer.predicted[wrong].tolist()),
    )
