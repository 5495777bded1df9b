"""The stages of a run: train, clean, ema, swa, swap, affine, statistics; all but train optional.

A stage drives the training loop and does between two updates what the loop does not know of: log,
evaluate, save, and stop when asked.
"""

from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from largebatch.errors import CheckpointError, DivergedError
from largebatch.polish.statistics import QUANTILES
from largebatch.polish.statistics import Drift as PolishDrift
from largebatch.recipe.arithmetic.plan import Plan, replica_plan
from largebatch.recipe.sections import Statistics
from largebatch.tracking.events import Drift, StageName
from largebatch.training.averages import EMA, SWA
from largebatch.training.checkpoint import Checkpoint
from largebatch.training.loop import Update, step_seeds, train
from largebatch.training.process import collected_by_hand, fastest_convolutions
from largebatch.training.protocols import stage as by_protocol
from largebatch.training.swap import train_replicas
from largebatch.training.trainer import Trainer


class Stage(NamedTuple):
    """One stage: where it ends, and how it is gone through."""

    name: StageName
    end: Callable[[Plan], int]
    """How many updates of the plan lie behind when it ends; it begins where the last one ends."""

    run: Callable[[Trainer, range, int], None]
    """Makes these updates of the plan, or those before a number of updates made in all."""


def run_stages(trainer: Trainer, *, until: int) -> bool:
    """Go through the stages that remain; return whether the run is complete.

    Stops early when `until` updates have been made in all, or when any worker is asked to; what was
    done is saved.
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
            stopped = stage.name == "swap" and state.replicas is not None
            if stopped or state.progress.step < end:
                trainer.save()
                return False
        begin = end
    return True


def require_resumable(checkpoint: Checkpoint, plan: Plan, folder: Path) -> None:
    """Raise CheckpointError where a stage has ended and updates before its end are missing.

    `largebatch polish` leaves that of a run that had not ended: the updates that are missing would
    be made by a network whose statistics no training gave it, under the names of later stages.
    """
    ends = {stage.name: stage.end(plan) for stage in STAGES}
    step = checkpoint.progress.step
    if any(step < ends[result.name] for result in checkpoint.stages):
        raise CheckpointError(
            f"{folder}: holds a run that was polished after {step:,} of {plan.updates:,} updates, "
            "which training cannot go on from; resume the run that was polished, in its own "
            "folder, or begin anew with another --out"
        )


def _ema(trainer: Trainer, _: range, __: int) -> None:
    """Let the EMA become the model, if there is one."""
    if isinstance(trainer.state.average, EMA):
        trainer.begin_stage()
        trainer.state.store_average()
        trainer.end_stage("ema", num_steps=0)


def _swa(trainer: Trainer, _: range, __: int) -> None:
    """Let the mean of the weights become the model, if there is one."""
    average = trainer.state.average
    if not isinstance(average, SWA):
        return
    if not average.num_models:
        trainer.note("swa", "there is no mean: the updates that it was to be of were rolled back")
        trainer.state.average = None
        return
    trainer.begin_stage()
    trainer.state.store_average()
    trainer.end_stage("swa", num_steps=0, note=_measure_if_judged(trainer, "swa"))


def _swap(trainer: Trainer, _: range, __: int) -> None:
    """Let the mean of replicas that are trained alone become the model, if the recipe has some."""
    polish, state = trainer.recipe.polish, trainer.state
    if polish is None or polish.swap is None:
        return
    section = polish.swap
    trainer.begin_stage()
    diverged = unsettled = None
    try:
        trained = train_replicas(trainer, section)
    except DivergedError as error:
        if not state.snapshot:  # nothing to roll back to
            raise
        diverged = str(error)
    else:
        if trained is None:  # asked to stop
            return
        trained.store()
        unsettled = _measure_if_judged(trainer, "swap")
    state.replicas = None
    steps = replica_plan(trainer.recipe, trainer.plan).steps
    note = f"{section.replicas} replicas, {steps:,} updates of {section.batch:,} samples each"
    note = diverged or "; ".join(filter(None, [note, unsettled]))
    trainer.end_stage("swap", num_steps=0, note=note, failed=diverged is not None)


def _measure_if_judged(trainer: Trainer, name: Literal["swa", "swap"]) -> str | None:
    """Give a mean of weights its own statistics, where it is judged; return a remark on them."""
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
    """Do the statistics pass, unless those of the mean that was kept last have been measured."""
    polish, last = trainer.recipe.polish, trainer.state.last_kept
    judged = polish is not None and polish.keep == "better"
    if not (judged and last is not None and last.name in {"swa", "swap"}):
        polish_statistics(trainer)


def polish_statistics(trainer: Trainer) -> None:
    """Do the statistics pass, if the recipe has one, and emit what it changed."""
    section = trainer.recipe.polish.statistics if trainer.recipe.polish else None
    if section is not None:
        trainer.begin_stage()
        note = _measure(trainer, "statistics", section)
        trainer.end_stage("statistics", num_steps=0, note=note)


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
    """Tell whether none of these updates remains to be made now."""
    progress = trainer.state.progress
    end = min(steps.stop, until + progress.discarded)
    return progress.step >= end or trainer.step_log.stopped


def _train_stage(name: StageName, trainer: Trainer, steps: range, until: int) -> None:
    state = trainer.state
    unjudged = bool(steps) and state.progress.step == steps.stop  # ended before its evaluation
    if _is_over(trainer, steps, until) and not unjudged:
        return
    trainer.begin_stage()
    diverged = None
    try:
        _make_updates_again(trainer, name, steps, until)
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
        trainer.end_stage(name, num_steps=made, note=diverged, failed=diverged is not None)


def _make_updates_again(trainer: Trainer, name: StageName, steps: range, until: int) -> None:
    """Make the updates of a stage; where the recipe says so, again after a number went bad."""
    state, nonfinite = trainer.state, trainer.recipe.nonfinite
    failed: set[int] = set()
    while True:
        try:
            make_updates(trainer, name, range(state.progress.step, steps.stop), until=until)
        except DivergedError as error:
            at = state.progress.step
            again = nonfinite.action == "roll_back" and len(failed) < nonfinite.most
            if not again or at in failed or not trainer.return_to_checkpoint(after=str(error)):
                raise
            failed.add(at)
        else:
            return


STAGES = (
    Stage("train", lambda plan: plan.train_steps, partial(_train_stage, "train")),
    Stage("clean", lambda plan: plan.steps, partial(_train_stage, "clean")),
    Stage("ema", lambda plan: plan.steps, _ema),
    Stage("swa", lambda plan: plan.steps, _swa),
    Stage("swap", lambda plan: plan.steps, _swap),
    Stage("affine", lambda plan: plan.updates, _affine),
    Stage("statistics", lambda plan: plan.updates, _statistics),
)


def make_updates(trainer: Trainer, name: StageName, steps: range, *, until: int) -> None:
    """Make these updates of a stage, or those before `until`; evaluate and save on the way."""
    if trainer.exchange is not None:
        by_protocol.make_updates(trainer, name, steps, until=until)
        return
    plan, step_log, state = trainer.plan, trainer.step_log, trainer.state
    end = min(steps.stop, until + state.progress.discarded)
    batches = trainer.pipeline.training(steps, clean=name != "train")
    train_piece = partial(
        train,
        state.model,
        state.updater.optimizer,
        batches,
        state.updater.schedule,
        trainer.criterion,
        state.updater.reducer,
        trainer.spans,
        state.scaler,
        seed=step_seeds(trainer.recipe.seed, trainer.backend.rank),
        skip_nonfinite=trainer.recipe.nonfinite.action == "skip" and not state.scaler.is_enabled(),
        measure_norm=step_log.measure_norm,
    )
    updates = train_pieces(plan, steps, train_piece)
    if trainer.profiler is not None:
        updates = trainer.profiler.follow(updates, stage=name, made=steps.start)
    step_log.resume_clock()
    with closing(batches), closing(updates):
        for update in updates:
            step_log.add(name, update)  # one under way when the one before diverged is not made
            if trainer.comparison_is_due():
                trainer.compare_weights()
            done = state.progress.step
            evaluates = done < steps.stop and done in plan.evaluate_after
            if evaluates:
                step_log.flush()
                state.progress.note(trainer.evaluate(name), trainer.recipe.task.metric)
            if evaluates or trainer.save_is_due():
                step_log.flush()
                trainer.save()
                step_log.resume_clock()
            if step_log.stopped or done == end:
                break
    step_log.flush()


def train_pieces(
    plan: Plan, steps: range, train_piece: Callable[..., Generator[Update, None, None]]
) -> Generator[Update, None, None]:
    """Make the updates piece by piece of a batch schedule; `train_piece` is `train` less sizes."""
    for part, global_batch, accumulation in plan.within(steps):
        yield from train_piece(steps=part, accumulation=accumulation, global_batch=global_batch)


def describe_unsettled(drift: PolishDrift) -> str | None:
    """Say that statistics never came to rest; None if they did."""
    if drift.settled:
        return None
    return (
        f"the statistics have not settled in {drift.passes} passes: the last one moved them by "
        f"{drift.settling:.2g} standard deviations or ln(variance)"
    )
