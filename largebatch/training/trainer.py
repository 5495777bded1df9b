"""What a run is made of on one worker, and what every stage of it ends with.

A stage ends with an evaluation. Where the recipe says `keep: better`, training images that were
held out decide whether what it did is kept, or the state before it comes back.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from torch import Tensor

from largebatch.data.batches import CleanSamples, Pipeline
from largebatch.distributed.agreement import require_same_bits
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, printable
from largebatch.models.batchnorm import Spans
from largebatch.models.wrappers import uncompiled
from largebatch.optim.schedule_free import at_average, is_averaging, store_average
from largebatch.polish.statistics import Drift, polish
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.optimizers import ScheduleFree
from largebatch.recipe.recipe import Recipe
from largebatch.schedules.plateau import Reading
from largebatch.tracking.environment import versions
from largebatch.tracking.events import (
    Accuracy,
    Decision,
    Evaluation,
    Event,
    GeneralizationGap,
    Note,
    StageName,
    StageResult,
    Start,
    Tracker,
    now,
)
from largebatch.tracking.identity import read_ids
from largebatch.training.checkpoint import (
    Checkpoint,
    Writer,
    copy_state,
    newest_checkpoint,
    parse_checkpoint,
    set_aside_damaged,
)
from largebatch.training.evaluation import Answers, Metrics, evaluate
from largebatch.training.loss import Criterion
from largebatch.training.mistakes import find_mistakes
from largebatch.training.profiling import Profiler
from largebatch.training.protocols.exchange import Exchange
from largebatch.training.state import TrainState, Updater
from largebatch.training.step_log import StepLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The objects of one run on one worker. Of these only `state` changes by training.

    Where learners of a protocol are lost, `backend` and `pipeline` leave them out of all shares.
    """

    recipe: Recipe
    plan: Plan
    backend: Backend
    pipeline: Pipeline
    criterion: Criterion
    spans: Spans
    state: TrainState
    build_affine: Callable[[], Updater]
    """Freezes what the affine stage leaves alone and returns what updates the rest."""

    build_replica: Callable[[], Updater]
    """Returns what updates a replica of the swap stage, which this worker trains alone."""

    trackers: list[Tracker]
    """Those that follow the run; none on workers other than the first."""

    emit: Callable[[Event], None]
    """Hands an event to the trackers."""

    step_log: StepLog
    checkpoints: Path
    writer: Writer
    """Writes to `checkpoints`."""

    exchange: Exchange | None = None
    """With a protocol: learners and parameter servers."""

    profiler: Profiler | None = None
    """Profiles some updates, on worker 0 alone."""

    began: float = field(default_factory=time.time)
    """When this worker began to build them, in seconds since 1970."""

    def restore(self, checkpoint: Checkpoint, *, source: str = "the checkpoint") -> None:
        """Go on where a checkpoint stopped.

        Raises CheckpointError, which begins with `source`, where it is not one of this run, or its
        labels have another meaning.
        """
        there = checkpoint.origin.get("data")
        self.pipeline.require_same_labels(there if isinstance(there, dict) else {}, source=source)
        if checkpoint.progress.step > self.plan.steps:
            self.state.use(self.build_affine())
        try:
            self.state.load_state_dict(checkpoint.state)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{source}: does not fit this run: {type(error).__name__}: {reason[:500]}"
            ) from None

    def begin(self) -> None:
        """Emit the start of the run, or of what is computed again."""
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

    def return_to_checkpoint(self, *, after: str) -> bool:
        """Restore the newest checkpoint of this stage on every worker; return whether there is one.

        `after` is the reason in words.
        """
        self.finish_saving()
        found = newest_checkpoint(self.checkpoints) if self.backend.rank == 0 else None
        content = broadcast_bytes(found.content if found else None, self.backend)
        checkpoint = parse_checkpoint(content, source=str(self.checkpoints)) if content else None
        if checkpoint is not None and self.backend.rank == 0:
            set_aside_damaged(self.checkpoints, step=checkpoint.progress.step)
        if checkpoint is None or len(checkpoint.stages) != len(self.state.stages):
            return False
        self.note(self.stage, f"rolled back to step {checkpoint.progress.step}: {after}")
        self.restore(checkpoint)
        self.begin()
        return True

    def measure(self, each: Callable[[Tensor, Tensor], object] = lambda *_: None) -> Metrics:
        """Evaluate the model as it is on the validation data; `each` is as in evaluate.

        Where the optimizer averages weights, that is their average, with statistics of its own.
        """
        with self._measurable():
            return evaluate(
                self.state.model,
                self.pipeline.validation(),
                self.backend,
                expected=self.recipe.data.val_labels,
                each=each,
            )

    def measure_training(self) -> Metrics:
        """Evaluate the model as it is on all images trained on, without augmentation."""
        samples = CleanSamples(self.pipeline, self.recipe.train_samples)
        expected = samples.samples * self.recipe.data.sample().num_labels
        with self._measurable():
            return evaluate(self.state.model, samples, self.backend, expected=expected)

    def measure_test(self) -> Metrics:
        """Evaluate the model as it is on the test data; DataError where there is none."""
        with self._measurable():
            return evaluate(self.state.model, self.pipeline.test(), self.backend)

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
        """Let the model become the average of its weights, where the optimizer keeps one."""
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
        """Measure the model as it is and emit the event; `each` is as in evaluate."""
        begun = time.perf_counter()
        gc.collect()  # here, because it never does so by itself: see process.py
        metrics = self.measure(each)
        progress = self.state.progress
        step = progress.step
        if stage in {"train", "clean"}:  # whose updates follow the schedule
            progress.readings.append(Reading(step, metrics.loss, metrics.top1))
        self.emit(
            Evaluation(
                stage=stage,
                step=step,
                epoch=self.plan.epoch(step),
                seconds=time.perf_counter() - begun,
                **{name: value for name, value in asdict(metrics).items() if name != "by_class"},
                **self.recipe.task.recorded(metrics),
            )
        )
        return metrics

    def _evaluate_at_the_end(self, stage: StageName) -> Metrics:
        """Do the same and emit what was wrong, image by image."""
        classes, step = self.pipeline.classes, self.state.progress.step
        if classes:
            answers = Answers()
            metrics = self.evaluate(stage, answers.add)
            pipeline = self.pipeline
            everyone = pipeline.evaluated_samples
            found = answers.gather(pipeline.validation_samples, everyone, self.backend)
            mistakes = find_mistakes(found, stage=stage, step=step, classes=classes)
            confidences = metrics.by_class.average_confidence[: len(classes)]
            self.emit(replace(mistakes, confidences=confidences))
        else:
            metrics = self.evaluate(stage)
        if "generalization_gap" in self.recipe.monitor:
            self._emit_gap(stage, metrics)
        return metrics

    def _emit_gap(self, stage: StageName, validation: Metrics) -> None:
        begun = time.perf_counter()
        found = self.measure_training()
        self.emit(
            GeneralizationGap(
                stage=stage,
                step=self.state.progress.step,
                samples=found.samples,
                top1=found.top1,
                loss=found.loss,
                gap=validation.loss - found.loss,
                seconds=time.perf_counter() - begun,
            )
        )

    def note(self, stage: StageName, text: str) -> None:
        """Emit a note in words."""
        self.emit(Note(stage=stage, step=self.state.progress.step, text=text))

    def save_is_due(self) -> bool:
        """Return whether a checkpoint is to be written between two evaluations."""
        return self._is_due(self.recipe.execution.checkpoints.every_steps) or self.step_log.save_due

    def comparison_is_due(self) -> bool:
        """Return whether the workers' weights are to be compared."""
        return self._is_due(self.recipe.execution.compare_every)

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.state.progress.step % every == 0

    def save(self) -> None:
        """Begin to write a checkpoint of the state as it is, which every worker has alike.

        Raises CheckpointError on worker 0, which writes, where the one before could not be written
        and the recipe stops for that; DesynchronizedError as `compare_weights`.
        """
        if self.recipe.execution.compare_every is not None:
            self.compare_weights()
        self.save_own()

    def save_own(self, still: Callable[[], bool] = lambda: True) -> None:
        """Do the same without a comparison, when other workers may be gone.

        Nothing is written unless `still` is true of the state when it is copied.
        """
        self.step_log.note_saved()
        if self.backend.rank == 0:
            checkpoint = Checkpoint.of(
                self.recipe,
                copy_state(self.state.state_dict()),
                plan=asdict(self.plan),
                data=self.pipeline.splits,
                classes=list(map(printable, self.pipeline.classes)),
                versions=versions(),
                trackers=read_ids(self.checkpoints.parent),
            )
            if still():
                with self.backend.busy():
                    self._on_disk(lambda: self.writer.write(checkpoint))

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is on the disk; raises as `save` does."""
        with self.backend.busy():
            self._on_disk(self.writer.wait)

    def _on_disk(self, write: Callable[[], None]) -> None:
        try:
            write()
        except CheckpointError as error:
            if self.recipe.execution.checkpoints.on_error == "stop":
                raise
            self.note(self.stage, str(error))
            write()

    def compare_weights(self) -> None:
        """Raise DesynchronizedError on every worker unless all have the same weights."""
        tensors = self.state.model.state_dict().values()
        when = f"step {self.state.progress.step}"
        backend, workers = self.backend, self.pipeline.workers
        require_same_bits(tensors, backend, backend.device, when=when, workers=workers)

    @property
    def stage(self) -> StageName:
        """The stage under way, by the updates that lie behind."""
        step = self.state.progress.step
        if self.state.replicas is not None:
            return "swap"
        if step > self.plan.steps:
            return "affine"
        return "clean" if step > self.plan.train_steps else "train"

    def begin_stage(self) -> None:
        """Take a snapshot where the stage that begins, or goes on, may be rolled back."""
        if self._decides and self.state.stages:  # the first stage is never rolled back
            self.state.take_snapshot()

    def end_stage(
        self, name: StageName, *, num_steps: int, note: str | None = None, failed: bool = False
    ) -> None:
        """Evaluate, keep the stage or roll it back, note what it changed, and save.

        `note` is a remark on the stage; one that `failed` is rolled back whatever
        it did.
        """
        state = self.state
        if note is not None:
            self.note(name, note)
        metrics = self._evaluate_at_the_end(name)
        last = state.last_kept
        held_out, kept = self._decide(name, last, failed=failed)
        if kept:
            state.progress.note(metrics, self.recipe.task.metric)
        else:
            state.roll_back()
        state.end_stage(
            StageResult(
                name=name,
                steps=num_steps,
                seconds=state.seconds - sum(stage.seconds for stage in state.stages),
                top1=metrics.top1,
                top5=metrics.top5,
                loss=metrics.loss,
                before=Accuracy(top1=last.top1, top5=last.top5, loss=last.loss) if last else None,
                held_out=held_out,
                kept=kept,
                note=note,
                **self.recipe.task.recorded(metrics),
            )
        )
        self.save()

    @property
    def _decides(self) -> bool:
        """Whether stages are rolled back that do not help."""
        polish = self.recipe.polish
        return polish is not None and polish.keep == "better"

    def _decide(
        self, name: StageName, last: StageResult | None, *, failed: bool
    ) -> tuple[float | None, bool]:
        """Return top-1 on the images held out, None without them, and whether to keep the stage.

        A model whose loss is no number is not kept, though some labels may be met by chance. Every
        worker decides alike: counts are exact, and one all-reduce gives all of them the same.
        """
        if not self._decides:
            return None, True
        samples = len(self.pipeline.held_out_samples)
        batches = self.pipeline.held_out()
        found = evaluate(self.state.model, batches, self.backend, expected=samples)
        if last is None:
            return found.top1, True
        assert last.held_out is not None
        usable = not failed and math.isfinite(found.loss)
        kept = usable and found.top1 > last.held_out
        self.emit(
            Decision(
                stage=name,
                step=self.state.progress.step,
                samples=samples,
                before=last.held_out,
                after=found.top1,
                kept=kept,
            )
        )
        return found.top1, kept
