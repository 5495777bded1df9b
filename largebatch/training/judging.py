"""The end of a stage: its evaluation, and the decision to keep it or to roll it back.

With `polish.keep: better`, held-out training images decide: a stage that does not increase the
number of them classified correctly is rolled back.
"""

import math
import time

import numpy as np

from largebatch.tracking.events import (
    Accuracy,
    Decision,
    GeneralizationGap,
    Mistakes,
    StageName,
    StageResult,
)
from largebatch.training import saving
from largebatch.training.evaluation import Answer, Answers, Metrics
from largebatch.training.trainer import Trainer

WORST = 16
"""Number of images with the largest loss that are recorded."""


def begin_stage(trainer: Trainer) -> None:
    """Take a snapshot if the stage that starts or resumes may be rolled back."""
    if _decides(trainer) and trainer.state.stages:  # the first stage is never rolled back
        trainer.state.take_snapshot()


def end_stage(
    trainer: Trainer,
    name: StageName,
    *,
    num_steps: int,
    note: str | None = None,
    failed: bool = False,
) -> None:
    """Evaluate, keep the stage or roll it back, record it, and save.

    `note` is a remark on the stage; a stage that `failed` is rolled back whatever its accuracy.
    """
    state = trainer.state
    if note is not None:
        trainer.note(name, note, kind="stage")
    metrics = _evaluate(trainer, name)
    last = state.last_kept
    held_out, kept = _decide(trainer, name, last, failed=failed)
    if kept:
        state.progress.note(metrics)
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
        )
    )
    saving.save(trainer)


def _evaluate(trainer: Trainer, stage: StageName) -> Metrics:
    """Evaluate the model; emit the images it classifies wrongly and the generalization gap."""
    classes, step = trainer.pipeline.classes, trainer.state.progress.step
    if classes:
        answers = Answers()
        metrics = trainer.evaluate(stage, answers.add)
        pipeline = trainer.pipeline
        samples = pipeline.evaluated_samples
        gathered = answers.gather(pipeline.validation_samples, samples, trainer.backend)
        trainer.emit(find_mistakes(gathered, stage=stage, step=step, classes=classes))
    else:
        metrics = trainer.evaluate(stage)
    if "generalization_gap" in trainer.recipe.monitor:
        _emit_gap(trainer, stage, metrics)
    return metrics


def find_mistakes(
    found: Answer, *, stage: StageName, step: int, classes: tuple[str, ...]
) -> Mistakes:
    """Return the mistakes; a loss that is NaN counts as the largest."""
    wrong = np.flatnonzero(found.label != found.predicted)
    sizes = np.where(np.isnan(found.loss[wrong]), math.inf, found.loss[wrong])
    worst = wrong[np.argsort(-sizes, kind="stable")[:WORST]]
    return Mistakes(
        stage=stage,
        step=step,
        classes=classes,
        sizes=tuple(np.bincount(found.label, minlength=len(classes)).tolist()),
        samples=tuple(found.sample[wrong].tolist()),
        labels=tuple(found.label[wrong].tolist()),
        predicted=tuple(found.predicted[wrong].tolist()),
        worst=tuple(found.sample[worst].tolist()),
        losses=tuple(found.loss[worst].tolist()),
    )


def _emit_gap(trainer: Trainer, stage: StageName, validation: Metrics) -> None:
    start = time.perf_counter()
    training = trainer.measure_training()
    trainer.emit(
        GeneralizationGap(
            stage=stage,
            step=trainer.state.progress.step,
            samples=training.samples,
            top1=training.top1,
            loss=training.loss,
            gap=validation.loss - training.loss,
            seconds=time.perf_counter() - start,
        )
    )


def _decides(trainer: Trainer) -> bool:
    """Return True if stages that do not help are rolled back."""
    polish = trainer.recipe.polish
    return polish is not None and polish.keep == "better"


def _decide(
    trainer: Trainer, name: StageName, last: StageResult | None, *, failed: bool
) -> tuple[float | None, bool]:
    """Return top-1 on the held-out images (None without them) and True if the stage is kept.

    A model whose loss is not finite is not kept, even if some labels match by chance. All workers
    decide alike: counts are exact, and one all-reduce gives the same counts to all of them.
    """
    if not _decides(trainer):
        return None, True
    metrics = trainer.measure_held_out()
    if last is None:
        return metrics.top1, True
    assert last.held_out is not None
    usable = not failed and math.isfinite(metrics.loss)
    kept = usable and metrics.top1 > last.held_out
    trainer.emit(
        Decision(
            stage=name,
            step=trainer.state.progress.step,
            samples=len(trainer.pipeline.held_out_samples),
            before=last.held_out,
            after=metrics.top1,
            kept=kept,
        )
    )
    return metrics.top1, kept
