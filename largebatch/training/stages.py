"""The stages of a run: train, clean, ema, swa, affine, statistics; all but train optional.

To add one, write a function `(session, steps, until)` and add a row to STAGES. Stages of other
packages run before the last one.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.backends import cudnn

from largebatch.errors import CheckpointError, DivergedError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.polish import Polish, Statistics
from largebatch.recipe.polish import Stage as StageSection
from largebatch.tracking.events import StageName
from largebatch.training.averages import EMA, SWA
from largebatch.training.checkpoint import Checkpoint
from largebatch.training.judging import Judge
from largebatch.training.session import Session, StageSteps
from largebatch.training.state import TrainState


def run_updates(
    name: StageName,
    session: Session,
    steps: range,
    until: int,
    *,
    clean: bool = True,
    begin: Callable[[TrainState], None] | None = None,
) -> None:
    """Make the updates of a stage, after calling `begin`, and end it after the last one.

    A stage with a snapshot ends if it diverges, and is then rolled back.
    """
    state = session.state
    judge = session.judge
    # `until` counts updates that were made; the plan also counts those of a stage that diverged.
    end = min(steps.stop, until + state.progress.discarded)
    over = state.progress.step >= end or session.requests.stopped
    unjudged = bool(steps) and state.progress.step == steps.stop  # ended before its evaluation
    if over and not unjudged:
        return
    if begin is not None and state.progress.step == steps.start:  # later, it was restored
        begin(state)
    # After `begin`, which changes what is trained; before the updates, which may be rolled back.
    judge.begin()
    diverged: str | None = None
    try:
        done = state.progress.step
        part = StageSteps(name, range(done, steps.stop), end, clean)
        with closing(session.updates(session, part)) as updates:
            for _ in updates:
                session.evaluate_and_save(part, since=done)
                done = state.progress.step
                if session.requests.stopped or done >= end:
                    break
        session.step_log.flush()
    except DivergedError as error:
        if not state.snapshot:  # nothing to roll back to
            raise
        diverged = str(error)
    num_steps = state.progress.step - steps.start
    if diverged is not None:
        state.progress.discard_until(steps.stop)
    if state.progress.step == steps.stop:
        if steps.stop == session.plan.steps:  # the schedule has ended
            session.evaluator.store_average()
        judge.end(name, num_steps=num_steps, note=diverged, failed=diverged is not None)


def run_average(
    name: StageName, kind: type[EMA | SWA], session: Session, _: range, __: int
) -> None:
    """Copy the average of this kind into the model, if there is one.

    The statistics of an SWA are measured before it is judged.
    """
    state = session.state
    judge = session.judge
    if not isinstance(state.average, kind):
        return
    if not state.average.num_models:
        text = f"{name.upper()} skipped: no update that it would have averaged was made and kept"
        session.log.note(name, text, kind="stage")
        state.average = None
        return
    judge.begin()
    state.average.store()
    state.average = None
    section = session.polish.statistics
    if kind is SWA and judge.decides and section is not None:
        judge.measure_statistics(name, section)
    judge.end(name)


def run_statistics(session: Session, _: range, __: int) -> None:
    """Run the statistics pass, unless the last stage that was kept has measured them."""
    last = session.state.last_kept
    judge = session.judge
    is_measured = judge.decides and last is not None and last.name == "swa"
    if session.polish.statistics is not None and not is_measured:
        polish_statistics(judge, session.polish.statistics)


def polish_statistics(judge: Judge, section: Statistics) -> None:
    """Run the statistics pass as a stage."""
    judge.begin()
    judge.measure_statistics("statistics", section)
    judge.end("statistics")


class StageDefinition(NamedTuple):
    """A stage: where it ends, and what it does."""

    name: StageName
    end: Callable[[Plan], int]
    """Number of updates of the plan before its end; it begins at the end of the previous stage."""

    run: Callable[[Session, range, int], None]
    """Makes these updates of the plan, up to a total number of updates made."""


STAGES = (
    StageDefinition(
        "train", lambda plan: plan.train_steps, partial(run_updates, "train", clean=False)
    ),
    StageDefinition("clean", lambda plan: plan.steps, partial(run_updates, "clean")),
    StageDefinition("ema", lambda plan: plan.steps, partial(run_average, "ema", EMA)),
    StageDefinition("swa", lambda plan: plan.steps, partial(run_average, "swa", SWA)),
    StageDefinition(
        "affine",
        lambda plan: plan.updates,
        partial(run_updates, "affine", begin=TrainState.begin_affine),
    ),
    StageDefinition("statistics", lambda plan: plan.updates, run_statistics),
)


def stages_of(polish: Polish) -> list[StageDefinition]:
    """Return the stages that a run may have, in order."""
    # The last one measures the statistics of the weights as they are left, so it stays the last.
    *ours, statistics = STAGES
    others = [
        StageDefinition(it.kind, lambda plan: plan.updates, partial(_run_other, it))
        for it in polish.others
    ]
    return [*ours, *others, statistics]


def _run_other(section: StageSection, session: Session, _: range, __: int) -> None:
    """Run a stage of another package, and keep it or roll it back."""
    session.judge.begin()
    section.build(session)
    session.judge.end(section.kind)


def run_stages(session: Session, *, until: int) -> bool:
    """Run the stages that remain; return True if the run is complete.

    Stops early, and saves, after `until` updates in all, or when any worker is asked to stop.
    """
    state = session.state
    begin = 0
    ended = {result.name for result in state.stages}
    with collected_by_hand(), convolutions(session.plan, repeat=session.replay is not None):
        for stage in stages_of(session.polish):
            # Where a stage ends is in the plan, so a resumed run enters the one that was left.
            end = stage.end(session.plan)
            if stage.name not in ended:
                stage.run(session, range(begin, end), until)
                if state.progress.step < end:
                    session.saver.save()
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
    # Stages of other packages come after all updates.
    if any(step < ends.get(result.name, plan.updates) for result in checkpoint.stages):
        raise CheckpointError(
            f"{folder}: holds a run that was polished after {step:,} of {plan.updates:,} updates; "
            "resume the run that was polished, in its own folder, or start a new run"
        )


_FROZEN_BY_PYTHON = 1000 if sys.version_info[:2] == (3, 12) else 0
"""Maximum number of objects that Python itself freezes as it starts."""


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Run the garbage collector only at calls of gc.collect(), over objects created inside.

    Else it would stop every worker at a different update. Earlier objects are frozen, so that a
    call takes milliseconds. Afterwards everything is as before.
    """
    enabled = gc.isenabled()
    freezes = gc.get_freeze_count() <= _FROZEN_BY_PYTHON
    gc.disable()
    if freezes:  # else unfreeze() would free what somebody else froze
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def convolutions(plan: Plan, *, repeat: bool) -> Iterator[None]:
    """Use the convolutions of cuDNN or MIOpen that are fastest in a trial, for images of one size.

    The choice may differ between starts and workers, and the last bits with it. With `repeat`
    deterministic ones are used, which are the same on equal devices. Nothing is changed if PyTorch
    is set to be deterministic.
    """
    deterministic = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    before = cudnn.benchmark, cudnn.deterministic
    if repeat and not deterministic:
        cudnn.benchmark = False
        cudnn.deterministic = True
    elif not deterministic and not plan.sizes:
        cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
