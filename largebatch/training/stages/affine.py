"""The stage `affine`: updates after the schedule, in which few weights move."""

from largebatch.training.session import Session
from largebatch.training.stages.train import run_updates


def run(session: Session, steps: range, until: int) -> None:
    """Make the updates of BatchNorm's scales and shifts and of the classifier, on clean images."""
    state = session.state
    begins = bool(steps) and state.progress.step == steps.start  # later, it was restored
    if begins and not session.is_over(steps, until):
        state.begin_affine()
    run_updates("affine", session, steps, until)
