"""Lines of means with their intervals, for the charts of every kind of study."""

from collections.abc import Sequence
from typing import Any

from largebatch.lab.studies.metrics import Interval
from largebatch.report.pages import Line, Series


def interval_line(
    look: Series, x: Sequence[Any], means: Sequence[Interval], *, line: bool = True
) -> Line:
    """Return a line with points at the means, each with its interval if it is known."""
    ends = [mean.ends for mean in means]
    return Line(
        series=look,
        x=x,
        y=[mean.mean for mean in means],
        low=[end["low"] for end in ends],
        high=[end["high"] for end in ends],
        line=line,
    )
