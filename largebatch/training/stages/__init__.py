"""The stages of a run: train, clean, ema, swa, affine, statistics; all but train optional.

One file a stage, with a function `run(session, steps, until)`. To add one, write such a file, and
add a row to STAGES and the name to `StageName`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from largebatch.errors import CheckpointError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.tracking.events import StageName
from largebatch.training.checkpoint import Checkpoint
from largebatch.training.process import collected_by_hand, fastest_convolutions
from largebatch.training.session import Session
from largebatch.training.stages import affine, clean, ema, statistics, swa, train


class Stage(NamedTuple):
    """A stage: where it ends, and what it does."""

    name: StageName
    end: Callable[[Plan], int]
    """Number of updates of the plan before its end; it begins at the end of the previous stage."""

    run: Callable[[Session, range, int], None]
    """Makes these updates of the plan, up to a total number of updates made."""


STAGES = (
    Stage("train", lambda plan: plan.train_steps, train.run),
    Stage("clean", lambda plan: plan.steps, clean.run),
    Stage("ema", lambda plan: plan.steps, ema.run),
    Stage("swa", lambda plan: plan.steps, swa.run),
    Stage("affine", lambda plan: plan.updates, affine.run),
    Stage("statistics", lambda plan: plan.updates, statistics.run),
)


def run_stages(session: Session, *, until: int) -> bool:
    """Run the stages that remain; return True if the run is complete.

    Stops early, and saves, after `until` updates in all, or when any worker is asked to stop.
    """
    state, begin = session.state, 0
    ended = {result.name for result in state.stages}
    with collected_by_hand(), fastest_convolutions(session.training.plan):
        for stage in STAGES:
            end = stage.end(session.training.plan)
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
    if any(step < ends[result.name] for result in checkpoint.stages):
        raise CheckpointError(
            f"{folder}: holds a run that was polished after {step:,} of {plan.updates:,} updates, "
            "which training cannot continue; resume the run that was polished, in its own folder, "
            "or start a new run with another --out"
        )
