"""The stages of a run: train, clean, ema, swa, affine, statistics; all but train optional."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from largebatch.errors import CheckpointError, DivergedError
from largebatch.polish.statistics import QUANTILES
from largebatch.polish.statistics import Drift as PolishDrift
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.polish import Statistics
from largebatch.tracking.events import Drift, StageName
from largebatch.training.averages import EMA, SWA
from largebatch.training.checkpoint import Checkpoint
from largebatch.training.judging import begin_stage, end_stage
from largebatch.training.process import collected_by_hand, fastest_convolutions
from largebatch.training.saving import return_to_checkpoint, save
from largebatch.training.trainer import Trainer
from largebatch.training.updates import make_updates


class Stage(NamedTuple):
    """A stage: where it ends, and what it does."""

    name: StageName
    end: Callable[[Plan], int]
    """Number of updates of the plan before its end; it begins at the end of the previous stage."""

    run: Callable[[Trainer, range, int], None]
    """Makes these updates of the plan, up to a total number of updates made."""


def run_stages(trainer: Trainer, *, until: int) -> bool:
    """Run the stages that remain; return True if the run is complete.

    Stops early, and saves, after `until` updates in all, or when any worker is asked to stop.
    """
    with collected_by_hand(), fastest_convolutions(trainer.plan):
        return _run_stages(trainer, until=until)


def _run_stages(trainer: Trainer, *, until: int) -> bool:
    state, begin = trainer.state, 0
    ended = {result.name for result in state.stages}
    for stage in STAGES:
        end = stage.end(trainer.plan)
        if stage.name not in ended:
            stage.run(trainer, range(begin, end), until)
            if state.progress.step < end:
                save(trainer)
                return False
        begin = end
    return True


def require_resumable(checkpoint: Checkpoint, plan: Plan, folder: Path) -> None:
    """Raise CheckpointError if a stage has ended and updates before its end are missing.

    `largebatch polish` leaves such a checkpoint for a run that had not ended. The missing updates
    would start from polished statistics, and would be recorded under the names of later stages.
    """
    ends = {stage.name: stage.end(plan) for stage in STAGES}
    step = checkpoint.progress.step
    if any(step < ends[result.name] for result in checkpoint.stages):
        raise CheckpointError(
            f"{folder}: holds a run that was polished after {step:,} of {plan.updates:,} updates, "
            "which training cannot go on from; resume the run that was polished, in its own "
            "folder, or start a new run with another --out"
        )


def _ema(trainer: Trainer, _: range, __: int) -> None:
    """Copy the EMA into the model, if there is one."""
    if isinstance(trainer.state.average, EMA):
        begin_stage(trainer)
        trainer.state.store_average()
        end_stage(trainer, "ema", num_steps=0)


def _swa(trainer: Trainer, _: range, __: int) -> None:
    """Copy the mean of the weights into the model, if there is one."""
    average = trainer.state.average
    if not isinstance(average, SWA):
        return
    if not average.num_models:
        text = "SWA skipped: all updates that it would have averaged were rolled back"
        trainer.note("swa", text, kind="stage")
        trainer.state.average = None
        return
    begin_stage(trainer)
    trainer.state.store_average()
    end_stage(trainer, "swa", num_steps=0, note=_measure_if_judged(trainer, "swa"))


def _measure_if_judged(trainer: Trainer, name: Literal["swa"]) -> str | None:
    """Measure the statistics of a mean of weights before it is judged; return a remark on them."""
    polish = trainer.recipe.polish
    if polish is None or polish.statistics is None or polish.keep == "always":
        return None
    return _measure(trainer, name, polish.statistics)


def _affine(trainer: Trainer, steps: range, until: int) -> None:
    state = trainer.state
    if steps and state.progress.step == steps.start and not _is_over(trainer, steps, until):
        state.use(trainer.build_affine())  # later, it was restored
    _train_stage("affine", trainer, steps, until)


def _statistics(trainer: Trainer, _: range, __: int) -> None:
    """Run the statistics pass, unless the last stage that was kept has measured them."""
    polish, last = trainer.recipe.polish, trainer.state.last_kept
    judged = polish is not None and polish.keep == "better"
    if not (judged and last is not None and last.name == "swa"):
        polish_statistics(trainer)


def polish_statistics(trainer: Trainer) -> None:
    """Run the statistics pass, if the recipe has one, and emit the drift of the statistics."""
    section = trainer.recipe.polish.statistics if trainer.recipe.polish else None
    if section is not None:
        begin_stage(trainer)
        note = _measure(trainer, "statistics", section)
        end_stage(trainer, "statistics", num_steps=0, note=note)


def _measure(trainer: Trainer, name: StageName, section: Statistics) -> str | None:
    drift = trainer.measure_statistics(section.samples, sequential=section.sequential)
    trainer.emit(
        Drift(
            stage=name,
            step=trainer.state.progress.step,
            samples=section.samples,
            passes=drift.passes,
            settling=drift.settling,
            settled=drift.settled,
            quantiles=QUANTILES,
            layers=tuple(drift),
        )
    )
    return describe_unsettled(drift)


def _is_over(trainer: Trainer, steps: range, until: int) -> bool:
    """Return True if none of these updates remains to be made now."""
    progress = trainer.state.progress
    end = min(steps.stop, until + progress.discarded)
    return progress.step >= end or trainer.step_log.stopped


def _train_stage(name: StageName, trainer: Trainer, steps: range, until: int) -> None:
    state = trainer.state
    unjudged = bool(steps) and state.progress.step == steps.stop  # ended before its evaluation
    if _is_over(trainer, steps, until) and not unjudged:
        return
    begin_stage(trainer)
    diverged = None
    try:
        _make_updates_with_retries(trainer, name, steps, until)
    except DivergedError as error:
        if not state.snapshot:  # nothing to roll back to
            raise
        diverged = str(error)
    made = state.progress.step - steps.start
    if diverged is not None:
        state.progress.discard_until(steps.stop)
    if state.progress.step == steps.stop:
        if steps.stop == trainer.plan.steps:  # the schedule has ended
            trainer.store_average()
        end_stage(trainer, name, num_steps=made, note=diverged, failed=diverged is not None)


def _make_updates_with_retries(trainer: Trainer, name: StageName, steps: range, until: int) -> None:
    """Make the updates of a stage; with nonfinite.action: roll_back, again after they diverged."""
    state, nonfinite = trainer.state, trainer.recipe.nonfinite
    failed: set[int] = set()
    while True:
        try:
            make_updates(trainer, name, range(state.progress.step, steps.stop), until=until)
        except DivergedError as error:
            at = state.progress.step
            again = nonfinite.action == "roll_back" and len(failed) < nonfinite.most
            if not again or at in failed or not return_to_checkpoint(trainer, after=str(error)):
                raise
            failed.add(at)
            begin_stage(trainer)  # a checkpoint of the stage's start holds no snapshot
        else:
            return


STAGES = (
    Stage("train", lambda plan: plan.train_steps, partial(_train_stage, "train")),
    Stage("clean", lambda plan: plan.steps, partial(_train_stage, "clean")),
    Stage("ema", lambda plan: plan.steps, _ema),
    Stage("swa", lambda plan: plan.steps, _swa),
    Stage("affine", lambda plan: plan.updates, _affine),
    Stage("statistics", lambda plan: plan.updates, _statistics),
)


def describe_unsettled(drift: PolishDrift) -> str | None:
    """Describe statistics that have not settled; None if they have."""
    if drift.settled:
        return None
    return (
        f"the statistics have not settled in {drift.passes} passes: the last one moved them by "
        f"{drift.settling:.2g} standard deviations or ln(variance)"
    )
