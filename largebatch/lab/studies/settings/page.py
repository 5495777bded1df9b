"""The page of a study of settings: findings, costs, transfer matrices, patterns along keys.

A recipe has one colour in all charts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from largebatch.formatting import MISSING
from largebatch.lab.studies.metrics import Interval
from largebatch.lab.studies.queue.results import Result
from largebatch.lab.studies.queue.study import Metric
from largebatch.lab.studies.settings import correlations
from largebatch.lab.studies.settings.settings import MEASURES, Findings, Measure, Measured, describe
from largebatch.lab.studies.settings.transfer import Transfer
from largebatch.report.interactive import Column, Filter, Page, Section, Table, columns_over
from largebatch.report.interactive_charts import Chart, Columns, Curve, Series, by_column, series

_MEGABYTE = 1e-6

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two settings compare by pairs of the same "
    "seeds. Of many settings the best one is best by luck, too. The accuracy of a run that "
    "diverged is that of chance, and its costs count for nothing."
)
_TABLE = (
    "Training is the time of the updates, evaluation that of all "
    "validation images, on the way and at the end. Processor time, cores, memory and bytes are "
    "those of all workers, from their set-up to the last update. Resident memory that workers "
    "share is counted in each of them; what comes from the system's cache is not read from a disk. "
    "Cores of others are those that other programs of the machine used meanwhile."
)
_PRINTED = (
    *("Setting", "Top-1, %", "±", "Training, s", "Recipe", "Images/s", "Evaluation, s"),
    *("Processor, s", "Cores used", "Peak memory, MB", "Read, MB", "Seeds", "Diverged"),
)
"""Columns of the table in a terminal."""

_TRANSFER = (
    "Below each value is its distance from what the recipe of the column has with its own best "
    "setting, over pairs of seeds with the interval of 95 %, that of all settings together: in "
    "points, or as how many times the cost. The diagonal has the own best. The stronger the "
    "colour, the more is lost."
)
_CAPTIONS: dict[Metric, str] = {
    "top1": "The mean accuracy of every setting with its interval of 95 %, which may leave the "
    "chart. Lines join settings of a recipe that differ in this key alone.",
    "train_seconds": "The time of the updates of a run.",
}
"""What is drawn along every key."""


def make_page(findings: Findings) -> Page:
    """Return the page of a study."""
    looks = [series(place, name) for place, name in enumerate(findings.recipes)]
    table = Section(title="Recipes with settings", parts=[_table(findings, looks)], notes=[_TABLE])
    return Page(
        title=findings.study,
        subtitle=", ".join(findings.recipes),
        findings=[*describe(findings), *correlations.describe(findings)],
        is_sound=findings.has_enough_seeds and not findings.waiting,
        note=_NOTE,
        legend=("Recipes", looks),
        sections=[
            table,
            *_transfer(findings),
            *_patterns(findings, looks),
            *correlations.sections(findings),
        ],
        source="a database of studies",
    )


def _transfer(findings: Findings) -> Iterator[Section]:
    """Yield the transfer matrices, if there are several recipes and settings."""
    if len(findings.recipes) > 1 and len(findings.settings) > 1 and findings.metrics:
        metrics = {f"metric {name}": MEASURES[name].title for name in findings.metrics}
        yield Section(
            title="Does the best setting transfer?",
            parts=[_matrix(findings, name) for name in findings.metrics],
            filters=[Filter("Best by", metrics)],
            notes=[_TRANSFER],
        )


def _patterns(findings: Findings, looks: Sequence[Series]) -> Iterator[Section]:
    """Yield the charts along the keys in which settings differ."""
    if findings.keys:
        keys = {f"key {place}": key for place, key in enumerate(findings.keys)}
        charts = [
            _chart(findings, looks, place, metric)
            for place in range(len(keys))
            for metric in _CAPTIONS
        ]
        yield Section(title="Patterns", parts=charts, filters=[Filter("Against", keys)])


def _table(findings: Findings, looks: Sequence[Series]) -> Table:
    """Return a row for each cell."""
    cells = findings.cells
    column = columns_over(cells)

    def mean(
        title: str, value: Callable[[Result], float | None], form: str, *, factor: float = 1.0
    ) -> Column:
        return column(title, lambda one: (it := one.found.mean(value)) and factor * it.mean, form)

    def reach(title: str, metric: Metric, form: str, *, factor: float = 1.0) -> Column:
        return column(
            title, lambda one: (it := one.mean_of(metric)) and it.scaled(factor).reach, form
        )

    def used(title: str, name: str, form: str, *, factor: float = 1.0) -> Column:
        return mean(title, lambda run: run.used(name), form, factor=factor)

    columns = [
        column("Setting", lambda one: one.found.setting, None),
        mean("Top-1, %", lambda run: run.top1, ".2f", factor=100),
        reach("±", "top1", ".2f", factor=100),
        used("Training, s", "train_seconds", ",.1f"),
        reach("± s", "train_seconds", ",.1f"),
        column("Recipe", lambda one: one.found.configuration, None),
        mean("Images/s", lambda run: run.images_per_second, ",.0f"),
        used("Evaluation, s", "evaluation_seconds", ",.2f"),
        used("Processor, s", "cpu_seconds", ",.1f"),
        used("Cores used", "cores", ".2f"),
        used("Peak memory, MB", "peak_memory_bytes", ",.0f", factor=_MEGABYTE),
        used("Read, MB", "read_bytes", ",.1f", factor=_MEGABYTE),
        used("Written, MB", "written_bytes", ",.1f", factor=_MEGABYTE),
        used("GPU, %", "gpu_percent", ".0f"),
        used("GPU memory, MB", "gpu_memory_bytes", ",.0f", factor=_MEGABYTE),
        *(_setting_column(findings, key) for key in findings.keys),
        mean("Top-5, %", lambda run: run.top5, ".2f", factor=100),
        mean("Cores of others", lambda run: run.other_cores, ".1f"),
        column("Seeds", lambda one: len(one.found.seeds), "d"),
        column("Diverged", lambda one: one.found.diverged, "d"),
        column("Status", lambda one: None if one.found.finished else "unfinished", None),
    ]
    return Table(
        name="settings",
        columns=columns,
        series=[looks[one.configuration] for one in cells],
        printed=_PRINTED,
    )


def _setting_column(findings: Findings, key: str) -> Column:
    """Return what the cells have at a key in which settings differ."""
    values, title = _along(findings, findings.cells, key), key.rpartition(".")[2]
    return Column(title, values, ",.8g" if key in findings.numeric_keys else None)


def _matrix(findings: Findings, metric: Metric) -> Table:
    """Return the transfer matrix of a metric."""
    measure, matrix = MEASURES[metric], findings.matrix(metric)
    largest = max((1 - one.share for row in matrix for one in row), default=0.0)
    settings = [row[0].setting or MISSING for row in matrix]
    first = Column("Best setting of", [row[0].best_of for row in matrix], details=settings)

    def column(name: str, cells: Sequence[Transfer]) -> Column:
        lost = [0.0 if one.value is None else 1 - one.share for one in cells]
        return Column(
            f"used on {name}",
            [one.value and measure.factor * one.value.mean for one in cells],
            f",.{measure.digits}f",
            unit=f" {measure.unit}",
            details=[_gap(one, measure) for one in cells],
            strengths=[one / largest if largest else 0.0 for one in lost],
        )

    others = [
        column(row[0].best_of, cells)
        for row, cells in zip(matrix, zip(*matrix, strict=True), strict=True)
    ]
    return Table(
        name=f"transfer_{metric}",
        columns=[first, *others],
        caption=f"{measure.title} of each recipe (column) with the setting that has {measure.best} "
        "for another one (row)",
        tags=(f"metric {metric}",),
    )


def _gap(one: Transfer, measure: Measure) -> str:
    return "its own best" if one.best_of == one.used_on else describe_gap(one.gap, measure)


def describe_gap(gap: Interval | None, measure: Measure) -> str:
    """Return a gap as a cell of a transfer matrix shows it: points, or times as much.

    >>> describe_gap(Interval(-0.0231, -0.034, -0.0122, 3), MEASURES["top1"])
    '−2.31 (−3.40 to −1.22)'
    >>> describe_gap(Interval(1.5, 1.2, 1.875, 3), MEASURES["cpu_seconds"])
    '× 1.50 (1.20 to 1.88)'
    """
    if gap is None:
        return "not measured with every seed"
    if measure.is_cost:
        return f"× {gap.with_ends('.2f')}"
    return gap.scaled(measure.factor).with_ends("+.2f").replace("-", "−")


def _chart(findings: Findings, looks: Sequence[Series], place: int, metric: Metric) -> Chart:
    """Return a metric of every cell along a key: numbers in proportion, words side by side."""
    measure, key = MEASURES[metric], findings.keys[place]
    words = _words(findings, key)
    hover = ("setting", "@setting"), (measure.title.lower(), "@text")
    curves = []
    for at, look in enumerate(looks):
        cells = findings.of(at)
        for line in _lines(findings, cells, key):
            data = _points(findings, line, key, metric)
            joined = {"key": data["key"], "value": data["value"]}
            curves.append(Curve(series=look, data=joined, points=False))
        data = _points(findings, cells, key, metric)
        curves.append(Curve(series=look, data=data, line=False, hover=hover))
    return Chart(
        name=f"{metric}_{place}", x="key", y="value", height=360, log="" if words else "x",
        x_title=key, y_title=f"{measure.title}, {measure.unit}", from_zero=measure.is_cost,
        categories=words, curves=curves, caption=_CAPTIONS[metric], tags=(f"key {place}",),
    )  # fmt: skip


def _points(findings: Findings, cells: Sequence[Measured], key: str, metric: Metric) -> Columns:
    """Return the means of cells; those without one are left out."""
    measure = MEASURES[metric]
    known = [(one, mean) for one in cells if (mean := one.mean_of(metric)) is not None]
    along = _along(findings, [one for one, _ in known], key)
    return by_column([
        {"key": at, "setting": one.found.setting, "value": measure.factor * mean.mean,
         **mean.scaled(measure.factor).ends, "text": measure.text(mean)}
        for at, (one, mean) in zip(along, known, strict=True)
    ])  # fmt: skip


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
