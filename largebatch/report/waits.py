"""Was the run input bound? What updates waited for: images, sums of gradients; the rest computed.

Worker 0's times. Where another worker waits for its images, worker 0 waits for its gradients.
"""

from typing import TYPE_CHECKING

import numpy as np

from largebatch.report.run import Run
from largebatch.report.style import HIGH, LOW, MUTED, RULE, name_axes, name_line

if TYPE_CHECKING:
    from largebatch.report.style import Canvas

_BINS = 100
"""More do not show apart in a chart."""


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
    reduction *= run.plan.workers > 1  # else nothing is sent, and the call itself is computing
    edges = [*table[starts, 0], table[-1, 0] + 1]
    parts = [100 * data / whole, 100 * reduction / whole]
    parts.append(100 - parts[0] - parts[1])
    axes.stackplot(
        edges, *([*part, part[-1]] for part in parts), colors=[HIGH, LOW, RULE], step="post", lw=0
    )  # fmt: skip
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 100)
    axes.locator_params(axis="x", integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    title = name_axes(axes, y="Time, %", x="Step")
    title = name_line(axes, run.task.samples, HIGH, after=title)
    if run.plan.workers > 1:
        title = name_line(axes, "gradients", LOW, after=title)
    name_line(axes, "computing", MUTED, after=title)
