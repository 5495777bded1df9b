"""The stage `swa`: the mean of the weights at a regular interval becomes the model.

If stages are judged, the statistics of the mean are measured before it is.
"""

from largebatch.training.averages import SWA
from largebatch.training.session import Session


def run(session: Session, _: range, __: int) -> None:
    """Copy the mean of the weights into the model, if there is one."""
    average, state = session.state.average, session.state
    if not isinstance(average, SWA):
        return
    if not average.num_models:
        text = "SWA skipped: all updates that it would have averaged were rolled back"
        session.log.note("swa", text, kind="stage")
        state.average = None
        return
    session.judge.begin()
    state.store_average()
    section = session.polish.statistics
    if session.judge.decides and section is not None:
        session.judge.measure_statistics("swa", section)
    session.judge.end("swa")
