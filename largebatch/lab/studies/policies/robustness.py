"""Charts of the robustness and the confidence of policies.

Robustness is how much of top-1 is left at multiples of the rate found. Confidence is the
probability that a network gives to its right answers (LRBench, arXiv:1908.06477).
"""

import math
from collections.abc import Callable, Sequence

from largebatch.lab.studies.metrics import Interval
from largebatch.lab.studies.policies.standings import Standing, describe_interval
from largebatch.lab.studies.queue.results import Result
from largebatch.report.interactive_charts import Chart, Columns, Curve, Series, by_column


def scales_chart(drawn: Sequence[tuple[Series, Standing]]) -> Chart:
    """Return top-1 over multiples of the rate found."""
    known = [(look, one.robustness.by_scale) for look, one in drawn if one.robustness is not None]
    curves = [
        Curve(
            series=look,
            data=by_column([
                {"scale": scale, "top1": 100 * found.mean, **found.scaled(100).ends,
                 "text": describe_interval(found)}
                for scale, found in means.items()
            ]),
            hover=[("rate", "@scale{0.[00]} times"), ("top-1", "@text")],
        )
        for look, means in known
    ]  # fmt: skip
    return Chart(
        name="scales", x="scale", y="top1", height=360, log="x",
        x_title="Times the rate found", y_title="Top-1, %", curves=curves,
        ticks=sorted({scale for _, means in known for scale in means}),
        caption="Top-1 on the validation images at multiples of the rate found, over the seeds "
        "that were run at all of them.",
    )  # fmt: skip


def confidence_chart(drawn: Sequence[tuple[Series, Standing]]) -> Chart | None:
    """Return the confidence of right answers against top-1; None if it was not measured."""
    curves = []
    for look, one in drawn:
        mean = one.found.mean(lambda run: run.average_confidence)
        if mean is None or one.top1 is None:
            continue
        seeds = [
            {"top1": 100 * run.top1, "confidence": 100 * run.average_confidence, "fill": 0.0,
             "size": 5}
            for run in one.found.seeds if math.isfinite(run.average_confidence)
        ]  # fmt: skip
        curves.append(Curve(series=look, data=by_column(seeds), line=False))
        curves.append(Curve(series=look, data=_confidence(one, mean), line=False, hover=_HOVER))
    if not curves:
        return None
    return Chart(
        name="confidence", x="top1", y="confidence", height=360,
        x_title="Top-1, %", y_title="Average confidence (AC), %", curves=curves,
        caption="The mean probability that each policy gives to its right answers (large), its "
        "seeds (small) and the interval of 95 % (line), against its accuracy.",
    )  # fmt: skip


_HOVER = [("top-1", "@text"), ("AC", "@ac"), ("CD", "@cd"), ("CDAC", "@cdac")]


def _confidence(one: Standing, mean: Interval) -> Columns:
    assert one.top1 is not None

    def text(value: Callable[[Result], float]) -> str:
        found = one.found.mean(value)
        return "" if found is None else found.scaled(100).text(".2f")

    row = {
        "top1": 100 * one.top1.mean, "confidence": 100 * mean.mean, **mean.scaled(100).ends,
        "size": 11, "text": describe_interval(one.top1), "ac": mean.scaled(100).text(".2f", " %"),
        "cd": text(lambda run: run.confidence_deviation),
        "cdac": text(lambda run: run.class_confidence_deviation),
    }  # fmt: skip
    return by_column([row])
