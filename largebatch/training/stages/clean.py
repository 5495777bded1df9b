"""The stage `clean`: the last updates of the schedule, on clean images."""

from largebatch.training.session import Session
from largebatch.training.stages.train import run_updates


def run(session: Session, steps: range, until: int) -> None:
    """Make the updates on clean images, at the schedule's learning rate."""
    run_updates("clean", session, steps, until)
