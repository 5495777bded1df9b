"""The stage `statistics`: BatchNorm's means and variances are measured exactly."""

from largebatch.recipe.polish import Statistics
from largebatch.training.judging import Judge
from largebatch.training.session import Session


def run(session: Session, _: range, __: int) -> None:
    """Run the statistics pass, unless the last stage that was kept has measured them."""
    last, judge = session.state.last_kept, session.judge
    is_measured = judge.decides and last is not None and last.name == "swa"
    if session.polish.statistics is not None and not is_measured:
        polish_statistics(judge, session.polish.statistics)


def polish_statistics(judge: Judge, section: Statistics) -> None:
    """Run the statistics pass as a stage."""
    judge.begin()
    judge.measure_statistics("statistics", section)
    judge.end("statistics")
