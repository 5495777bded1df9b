"""Was the run input bound? What updates waited for: images, sums of gradients; the rest computed.

Worker 0's times. Where another worker waits for its images, worker 0 waits for its gradients.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from largebatch.report.figures import name_axes, name_line
from largebatch.report.run import Run
from largebatch.report.style import HIGH, LOW, MUTED, RULE

if TYPE_CHECKING:
    from largebatch.report.style import Canvas

INPUT_BOUND = 0.1
"""The share of the time from which on faster images are worth the trouble."""

_BINS = 100
"""More do not show apart in a chart."""


class Shares(NamedTuple):
    """Parts of the time of updates: these two, and computing the rest."""

    data: float
    reduction: float


def shares(run: Run) -> Shares:
    """Return them over all updates that were timed but the first, which warms up, if it has others.

    The run has such updates.
    """
    steps = run.timed[1:] or run.timed
    whole = sum(step.step_seconds for step in steps)
    return Shares(
        sum(step.data_seconds for step in steps) / whole,
        sum(step.reduction_seconds for step in steps) / whole,
    )


def describe_waits(run: Run) -> str:
    """Return in one sentence whether the run was input bound."""
    data, reduction = shares(run)
    parts = f"{_percent(data)} of the time waiting for images"
    if run.plan.workers > 1:
        parts += f" and {_percent(reduction)} waiting for the sums of gradients"
    if data < INPUT_BOUND:
        return f"Not input bound: updates spent {parts}."
    return (
        f"Input bound: updates spent {parts}; images that come at once would make training "
        f"{1 / max(1 - data, 0.01):.2g} times as fast (see execution.cache and "
        "execution.decoder, or give each worker more cores)."
    )


def draw_waits(figure: "Canvas", run: Run) -> None:
    """Draw the shares by step, one above the other up to all of the time."""
    axes = figure.subplots()
    steps = run.timed
    table = np.array(
        [
            (step.step, step.data_seconds, step.reduction_seconds, step.step_seconds)
            for step in steps
        ]
    )
    starts = np.linspace(0, len(table), min(len(table), _BINS), endpoint=False).astype(int)
    _, data, reduction, whole = np.add.reduceat(table, starts).T
    edges = [*table[starts, 0], table[-1, 0] + 1]
    parts = [100 * data / whole, 100 * reduction / whole]
    parts.append(100 - parts[0] - parts[1])
    drawn = axes.stackplot(
        edges, *([*part, part[-1]] for part in parts), colors=[HIGH, LOW, RULE], step="post", lw=0
    )  # fmt: skip
    drawn[1].set_visible(run.plan.workers > 1)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 100)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = name_axes(axes, y="Time, %", x="Step")
    title = name_line(axes, "images", HIGH, after=title)
    if run.plan.workers > 1:
        title = name_line(axes, "gradients", LOW, after=title)
    name_line(axes, "computing", MUTED, after=title)


def _percent(part: float) -> str:
    """Return a share in percent.

    >>> [_percent(part) for part in (0.0004, 0.034, 0.417)]
    ['less than 0.1 %', '3.4 %', '42 %']
    """
    if part < 0.001:
        return "less than 0.1 %"
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.1f} %"
