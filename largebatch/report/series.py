"""From as many numbers as a run has steps to as many as a picture can show."""

import math
from dataclasses import dataclass

import numpy as np

from largebatch.report.records import FloatArray

POINTS = 500
"""More do not fit side by side in a picture."""


@dataclass(frozen=True, slots=True)
class Thinned:
    """A series in at most POINTS bins of neighbouring steps."""

    step: FloatArray
    low: FloatArray
    high: FloatArray
    trend: FloatArray
    """Running median over a twenty-fifth of the bins; NaN where a bin has no finite number."""


def thin(step: FloatArray, values: FloatArray) -> Thinned:
    """Keep the extremes of every bin, so that no spike is lost; pass over what is not finite.

    >>> thin(np.arange(3.0), np.array([1.0, math.nan, 2.0])).trend
    array([ 1., nan,  2.])
    """
    values = np.where(np.isfinite(values), values, math.nan)
    starts = np.linspace(0, len(values), min(len(values), POINTS), endpoint=False).astype(int)
    middle = np.array([median(part) for part in np.split(values, starts[1:])])
    reach = len(middle) // 50
    trend = [median(middle[max(0, i - reach) : i + reach + 1]) for i in range(len(middle))]
    return Thinned(
        step=step[starts],
        low=np.fmin.reduceat(values, starts),
        high=np.fmax.reduceat(values, starts),
        trend=np.where(np.isnan(middle), math.nan, trend),
    )


def median(values: FloatArray) -> float:
    """Return the median of the finite values; NaN if there is none.

    >>> median(np.array([3.0, math.inf, 1.0]))
    2.0
    """
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def ceiling(values: FloatArray) -> float:
    """Return where an axis from 0 may end: the first value, which warms up, and rare peaks aside.

    >>> ceiling(np.array([1e6, 10.0, 10.0, 10.0]))
    12.5
    """
    settled = values[1:] if len(values) > 1 else values
    finite = settled[np.isfinite(settled)]
    return float(np.quantile(finite, 0.99)) * 1.25 if finite.size else 1.0
