"""The page of a study of settings: findings, costs, patterns along keys, transfer matrices.

Words and layout stand in page.html. A recipe has one colour in all charts, and a button that
hides it. The transfer matrices are tables of HTML: their numbers are to be read, the colour only
leads to the largest losses.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.report.interactive import (
    Series,
    add_hover,
    add_line,
    add_points,
    make_interactive_page,
    new_chart,
    new_source,
    only_at,
    series,
)
from largebatch.report.table import MISSING, Column, new_table
from largebatch.storage import write_html
from largebatch.studies.metrics import ENOUGH_SEEDS, Interval
from largebatch.studies.queue.results import Result
from largebatch.studies.queue.study import Metric
from largebatch.studies.queue.usage import Usage
from largebatch.studies.settings.settings import MEASURES, Findings, Measure, Measured, describe
from largebatch.studies.settings.transfer import Transfer

if TYPE_CHECKING:
    from largebatch.report.interactive import Chart, Model, Source
    from largebatch.report.table import Table

_DRAWN: tuple[Metric, ...] = ("top1", "train_seconds")
"""What is drawn along every key."""

_STRONGEST = 50
"""Percent of the colour in the cell of the largest loss: the number on it stays readable."""

_MEGABYTE = 1e-6


def write_settings_page(findings: Findings, path: Path) -> Path:
    """Write the page of a study; return its path.

    Raises LargebatchError where it cannot be written, MissingPackageError without Bokeh.
    """
    return write_html(path, make_page(findings))


def make_page(findings: Findings) -> str:
    """Return the HTML of the page. Raises MissingPackageError without Bokeh."""
    looks = [series(place, name) for place, name in enumerate(findings.recipes)]
    models: dict[str, Model] = {"settings": _table(findings, looks)}
    axes = {f"key_{place}": key for place, key in enumerate(findings.keys)}
    for name in _DRAWN:
        models |= {f"{name}_{at}": _draw(findings, looks, key, name) for at, key in axes.items()}
    several = len(findings.recipes) > 1 and len(findings.settings) > 1
    metrics = findings.metrics if several else ()
    tags = {f"metric {name}": MEASURES[name].title for name in metrics}
    return make_interactive_page(
        Path(__file__).with_name("page.html"),
        models,
        hidden=[*list(tags)[1:], *map(only_at, list(axes)[1:])],
        title=findings.study,
        subtitle=", ".join(findings.recipes),
        sentences=list(describe(findings)),
        good=findings.has_enough_seeds and not findings.waiting,
        legend_of=looks,
        axes=axes,
        shown_with={at: only_at(at) for at in axes},
        metrics=tags,
        matrices={f"metric {name}": _matrix(findings, name) for name in metrics},
        measures={f"metric {name}": MEASURES[name] for name in metrics},
    )


def _table(findings: Findings, looks: Sequence[Series]) -> "Table":
    """Return a row for each cell."""
    cells = findings.cells

    def column(title: str, value: Callable[[Measured], object], form: str | None) -> Column:
        return Column(title, [value(one) for one in cells], form)

    def mean(
        title: str, value: Callable[[Result], float | None], form: str, *, factor: float = 1.0
    ) -> Column:
        def of(one: Measured) -> float | None:
            found = one.mean(value)
            return None if found is None else factor * found.mean

        return column(title, of, form)

    def used(title: str, name: str, form: str, *, factor: float = 1.0) -> Column:
        def value(run: Result) -> float | None:
            usage: Usage | None = run.usage if run.diverged is None else None
            return None if usage is None else float(getattr(usage, name))

        return mean(title, value, form, factor=factor)

    return new_table(
        [
            column("Setting", lambda one: one.found.setting, None),
            mean("Top-1, %", lambda run: run.top1, "0.00", factor=100),
            column("±", lambda one: _reach(one.mean_of("top1"), 100), "0.00"),
            used("Training, s", "train_seconds", "0,0.0"),
            column("± s", lambda one: _reach(one.mean_of("train_seconds"), 1), "0,0.0"),
            column("Recipe", lambda one: one.found.configuration, None),
            mean("Images/s", lambda run: run.images_per_second, "0,0"),
            used("Evaluation, s", "evaluation_seconds", "0,0.00"),
            used("Processor, s", "cpu_seconds", "0,0.0"),
            used("Cores used", "cores", "0.00"),
            used("Peak memory, MB", "peak_memory_bytes", "0,0", factor=_MEGABYTE),
            used("Read, MB", "read_bytes", "0,0.0", factor=_MEGABYTE),
            used("Written, MB", "written_bytes", "0,0.0", factor=_MEGABYTE),
            used("GPU, %", "gpu_percent", "0"),
            used("GPU memory, MB", "gpu_memory_bytes", "0,0", factor=_MEGABYTE),
            *(_setting_column(findings, key) for key in findings.keys),
            mean("Top-5, %", lambda run: run.top5, "0.00", factor=100),
            mean("Cores of others", lambda run: run.other_cores, "0.0"),
            column("Seeds", lambda one: len(one.found.seeds), "0"),
            column("Diverged", lambda one: one.diverged, "0"),
            column("Status", lambda one: None if one.found.finished else "unfinished", None),
        ],
        colours=[looks[one.configuration].colour for one in cells],
        tags=[(f"series {one.configuration}",) for one in cells],
    )


def _reach(found: Interval | None, factor: float) -> float | None:
    """Return half the width of an interval; None of too few seeds."""
    if found is None or found.number < ENOUGH_SEEDS:
        return None
    return factor * (found.high - found.mean)


def _setting_column(findings: Findings, key: str) -> Column:
    """Return what the cells have at a key in which settings differ."""
    values, title = _along(findings, findings.cells, key), key.rpartition(".")[2]
    return Column(title, values, "0.[00000000]" if key in findings.numeric_keys else None)


def _draw(findings: Findings, looks: Sequence[Series], key: str, metric: Metric) -> "Chart":
    """Draw a metric of every cell along a key: of numbers in proportion, of words side by side."""
    measure, words = MEASURES[metric], _words(findings, key)
    chart = new_chart(
        x=key, y=f"{measure.title}, {measure.unit}", height=360, log="" if words else "x",
        from_zero=measure.is_cost, categories=words,
    )  # fmt: skip
    marks = []
    for place, look in enumerate(looks):
        cells = [one for one in findings.of(place) if one.mean_of(metric) is not None]
        for line in _lines(findings, cells, key):
            add_line(chart, look, _source(findings, line, key, metric), "key", "value")
        for one in cells:
            ends = _ends(findings, one, key, metric)
            if ends is not None:
                add_line(chart, look, ends, "key", "value")
        source = _source(findings, cells, key, metric)
        marks.append(add_points(chart, look, source, "key", "value"))
    chart.y_range.update(renderers=marks)
    add_hover(chart, marks, [("setting", "@setting"), (measure.title.lower(), "@text")])
    return chart


def _words(findings: Findings, key: str) -> list[str]:
    """Return what the cells have at a key that is no number, each once; none of a number."""
    if key in findings.numeric_keys:
        return []
    cells = list(findings.cells)
    if all(type(one.at(key)) in {int, float} for one in cells):  # with a 0, which has no logarithm
        cells.sort(key=lambda one: float(one.at(key)))
    return list(dict.fromkeys(_word(one, key) for one in cells))


def _word(one: Measured, key: str) -> str:
    value = one.at(key)
    return MISSING if value is None else str(value)


def _lines(findings: Findings, cells: Sequence[Measured], key: str) -> Iterator[list[Measured]]:
    """Yield the cells that differ in a key alone, in its order: two or more each."""
    words = _words(findings, key)
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for one in cells:
        rest = tuple(repr(one.at(other)) for other in findings.all_keys if other != key)
        groups.setdefault(rest, []).append(one)
    for group in groups.values():
        if len({one.at(key) for one in group}) > 1:
            yield sorted(
                group, key=lambda one: words.index(_word(one, key)) if words else one.at(key)
            )


def _along(findings: Findings, cells: Sequence[Measured], key: str) -> list[Any]:
    """Return where the cells are along a key."""
    return [one.at(key) if key in findings.numeric_keys else _word(one, key) for one in cells]


def _source(findings: Findings, cells: Sequence[Measured], key: str, metric: Metric) -> "Source":
    measure = MEASURES[metric]
    means = [one.mean_of(metric) for one in cells]
    return new_source({
        "key": _along(findings, cells, key),
        "setting": [one.found.setting for one in cells],
        "value": [math.nan if mean is None else measure.factor * mean.mean for mean in means],
        "text": [_describe(mean, measure) for mean in means],
    })  # fmt: skip


def _ends(findings: Findings, one: Measured, key: str, metric: Metric) -> "Source | None":
    """Return the ends of an interval; None of too few seeds."""
    mean, factor = one.mean_of(metric), MEASURES[metric].factor
    if mean is None or mean.number < ENOUGH_SEEDS:
        return None
    along = _along(findings, [one, one], key)
    return new_source({"key": along, "value": [factor * mean.low, factor * mean.high]})


def _describe(mean: Interval | None, measure: Measure) -> str:
    if mean is None:
        return MISSING
    reach = (
        "" if mean.number < ENOUGH_SEEDS else f" ± {measure.factor * (mean.high - mean.mean):,.2f}"
    )
    return f"{measure.show(mean.mean)}{reach}"


def _matrix(findings: Findings, metric: Metric) -> list[dict[str, Any]]:
    """Return the rows of a transfer matrix as the template shows them."""
    measure, matrix = MEASURES[metric], findings.matrix(metric)
    largest = max((1 - one.share for row in matrix for one in row), default=0.0)
    return [
        {
            "recipe": row[0].best_of,
            "setting": row[0].setting or MISSING,
            "cells": [_cell(one, measure, largest=largest) for one in row],
        }
        for row in matrix
    ]


def _cell(one: Transfer, measure: Measure, *, largest: float) -> dict[str, Any]:
    """Return what a cell shows: the value, the gap to the own best, and how strong its colour."""
    own = one.best_of == one.used_on
    strength = 0.0 if one.value is None or not largest else (1 - one.share) / largest
    return {
        "value": MISSING if one.value is None else measure.show(one.value.mean),
        "gap": "" if own else describe_gap(one.gap, measure),
        "own": own,
        "strength": round(_STRONGEST * strength),
    }


def describe_gap(gap: Interval | None, measure: Measure) -> str:
    """Return a gap as a cell of a transfer matrix shows it: points, or times as much.

    >>> describe_gap(Interval(-0.0231, -0.034, -0.0122, 3), MEASURES["top1"])
    '−2.31 (−3.40 to −1.22)'
    >>> describe_gap(Interval(1.5, 1.2, 1.875, 3), MEASURES["cpu_seconds"])
    '× 1.50 (1.20 to 1.88)'
    """
    if gap is None:
        return "not measured with every seed"

    def show(value: float) -> str:
        if measure.is_cost:
            return f"{value:.2f}"
        return f"{measure.factor * value:+.2f}".replace("-", "−")

    mean = f"{'× ' * measure.is_cost}{show(gap.mean)}"
    return mean if gap.number == 1 else f"{mean} ({show(gap.low)} to {show(gap.high)})"
