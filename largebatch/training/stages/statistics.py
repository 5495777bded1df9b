"""The stage `statistics`: BatchNorm's means and variances are measured exactly."""

from largebatch.polish.statistics import QUANTILES
from largebatch.polish.statistics import Drift as PolishDrift
from largebatch.recipe.polish import Statistics
from largebatch.tracking.events import Drift, StageName
from largebatch.training.session import Session


def run(session: Session, _: range, __: int) -> None:
    """Run the statistics pass, unless the last stage that was kept has measured them."""
    last = session.state.last_kept
    is_measured = session.judge.decides and last is not None and last.name == "swa"
    if session.polish.statistics is not None and not is_measured:
        polish_statistics(session, session.polish.statistics)


def polish_statistics(session: Session, section: Statistics) -> None:
    """Run the statistics pass as a stage."""
    session.judge.begin()
    session.judge.end("statistics", note=measure(session, "statistics", section))


def measure(session: Session, stage: StageName, section: Statistics) -> str | None:
    """Measure the statistics and emit their drift; return a remark if they did not converge."""
    drift = session.evaluator.statistics(section.samples, sequential=section.sequential)
    session.log.emit(
        Drift(
            stage=stage,
            step=session.state.progress.step,
            samples=section.samples,
            passes=drift.passes,
            settling=drift.settling,
            settled=drift.settled,
            quantiles=QUANTILES,
            layers=tuple(drift),
        )
    )
    return describe_unsettled(drift)


def describe_unsettled(drift: PolishDrift) -> str | None:
    """Describe statistics that did not converge; None if they did."""
    if drift.settled:
        return None
    return (
        f"the statistics have not converged in {drift.passes} passes: the last one moved them by "
        f"{drift.settling:.2g} standard deviations or ln(variance)"
    )
