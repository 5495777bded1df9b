"""The stage `ema`: the exponential moving average of the weights becomes the model."""

from largebatch.training.averages import EMA
from largebatch.training.session import Session


def run(session: Session, _: range, __: int) -> None:
    """Copy the EMA into the model, if there is one."""
    if isinstance(session.state.average, EMA):
        session.judge.begin()
        session.state.store_average()
        session.judge.end("ema")
