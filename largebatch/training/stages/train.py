"""The stage `train`: updates on augmented images; `run_updates` is of all stages with updates."""

from largebatch.errors import DivergedError
from largebatch.tracking.events import StageName
from largebatch.training.session import Session
from largebatch.training.updates import Part


def run(session: Session, steps: range, until: int) -> None:
    """Make the updates on augmented images."""
    run_updates("train", session, steps, until, clean=False)


def run_updates(
    name: StageName, session: Session, steps: range, until: int, *, clean: bool = True
) -> None:
    """Make the updates of a stage, and end it after the last one; a divergence may undo it.

    With nonfinite.action: roll_back, updates that diverged are made again from a checkpoint, unless
    they diverge in the same step.
    """
    state, judge = session.state, session.judge
    unjudged = bool(steps) and state.progress.step == steps.stop  # ended before its evaluation
    if session.is_over(steps, until) and not unjudged:
        return
    judge.begin()
    failed: set[int] = set()
    diverged: str | None = None
    while True:
        left = range(state.progress.step, steps.stop)
        end = min(steps.stop, until + state.progress.discarded)
        try:
            session.make_updates(Part(name, left, end, clean))
            break
        except DivergedError as error:
            at, diverged = state.progress.step, str(error)
            again = len(failed) < session.rollbacks and at not in failed
            if not (again and session.saver.return_to_checkpoint(after=diverged)):
                if not state.snapshot:  # nothing to roll back to
                    raise
                break
            diverged = None
            failed.add(at)
            session.begin()
            judge.begin()  # a checkpoint of the stage's start holds no snapshot
    made = state.progress.step - steps.start
    if diverged is not None:
        state.progress.discard_until(steps.stop)
    if state.progress.step == steps.stop:
        if steps.stop == session.training.plan.steps:  # the schedule has ended
            session.evaluator.store_average()
        judge.end(name, num_steps=made, note=diverged, failed=diverged is not None)
