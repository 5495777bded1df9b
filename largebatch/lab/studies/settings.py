"""A study of settings: what each costs, whether the best one transfers, and correlations.

After GTDLBench (arXiv:1810.12210), which carries the settings that are best for one data set over
to others, and looks at processor and memory use along with hyper-parameters.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from largebatch.errors import shorten
from largebatch.formatting import MISSING, plural
from largebatch.lab.studies.lines import interval_line
from largebatch.lab.studies.metrics import (
    CONFIDENCE,
    ENOUGH_SEEDS,
    Interval,
    difference,
    interval,
    ratio,
)
from largebatch.lab.studies.study import Metric
from largebatch.lab.studies.trained import CellResults, Result, value_at
from largebatch.optional import require_scipy
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import differences
from largebatch.report.pages import (
    Chart,
    Column,
    Line,
    Page,
    Panel,
    Section,
    Series,
    Table,
    columns_over,
    line_chart,
    series,
)

ENOUGH_SETTINGS = 5
"""With fewer no correlation is shown: its interval would hold nearly everything."""

_NAMED = 4
"""Names and pairs that a sentence has at most."""

_OUTSIDE = ("workers", "threads", "backend")
"""What a setting may change besides the recipe."""

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two settings compare by pairs of the same "
    "seeds. Of many settings the best one is best by luck, too. The accuracy of a run that "
    "diverged is that of chance, and its costs do not count."
)
_TABLE = (
    "Training is the time of the updates, evaluation that of all validation images. Processor "
    "time, cores, memory and bytes are those of all workers, from their set-up to the last update. "
    "Memory that workers share is counted in each of them; what comes from the system's cache is "
    "not read from a disk. Cores of others are those that other programs of the machine used."
)
_TRANSFER = (
    "Below each value is its distance from the own best setting of the recipe of the column, over "
    "pairs of seeds, with the interval of 95 % of all settings together: in points, or as a ratio "
    "of costs. The stronger the colour, the more is lost."
)
_CORRELATIONS = (
    "Spearman's rank correlations of means over seeds, over the settings of a recipe that did not "
    "diverge, with the interval of 95 % (Bonett and Wright 2000), each by itself. Settings are "
    "chosen and not drawn, so a correlation is no cause."
)


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric: its name and its unit."""

    title: str
    unit: str
    factor: float
    """Factor from recorded values to the unit."""

    digits: int
    best: str
    """What the best setting is called: `the highest top-1`."""

    is_cost: bool = True


MEASURES: dict[Metric, Measure] = {
    "top1": Measure("Top-1", "%", 100, 2, "the highest top-1", is_cost=False),
    "top5": Measure("Top-5", "%", 100, 2, "the highest top-5", is_cost=False),
    "train_seconds": Measure("Training time", "s", 1, 1, "the shortest training"),
    "evaluation_seconds": Measure("Evaluation time", "s", 1, 2, "the shortest evaluations"),
    "cpu_seconds": Measure("Processor time", "s", 1, 1, "the least processor time"),
    "peak_memory_bytes": Measure("Peak memory", "MB", 1e-6, 0, "the least memory"),
    "read_bytes": Measure("Read from disk", "MB", 1e-6, 1, "the fewest bytes read"),
}

_DRAWN: tuple[Metric, ...] = ("top1", "train_seconds")

CORRELATED: dict[str, Callable[[Result], float]] = {
    "Top-1": lambda run: run.top1,
    "Images/s": lambda run: math.nan if run.diverged else run.images_per_second or math.nan,
    "Training time": lambda run: run.used("train_seconds"),
    "Processor time": lambda run: run.used("cpu_seconds"),
    "Cores used": lambda run: run.used("cores"),
    "Peak memory": lambda run: run.used("peak_memory_bytes"),
    "Read from disk": lambda run: run.used("read_bytes"),
}


def value_of(run: Result, metric: Metric) -> float:
    """Return a metric of a run; NaN if it was not measured, or for a cost if it diverged."""
    return float(getattr(run, metric)) if metric in {"top1", "top5"} else run.used(metric)


@dataclass(frozen=True)
class Findings:
    """The cells of a study with at least one run, by recipe and in the order of settings."""

    cells: Sequence[CellResults]

    @cached_property
    def recipes(self) -> tuple[str, ...]:
        """Names of the recipes."""
        return tuple(dict.fromkeys(one.configuration for one in self.cells))

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings."""
        return tuple(dict.fromkeys(one.variant for one in self.cells))

    def of(self, recipe: str) -> list[CellResults]:
        """Return the cells of a recipe."""
        return [one for one in self.cells if one.configuration == recipe]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys in which settings differ, of the recipe and outside, without sections and lists."""
        keys: dict[str, None] = {}
        for recipe in self.recipes:
            first, *others = self.of(recipe)
            for one in others:
                found = differences(_tree(first), _tree(one))
                keys |= dict.fromkeys(key for key, _, _ in found)
            for key in _OUTSIDE:
                if any(at(one, key) != at(first, key) for one in others):
                    keys[key] = None
        whole = {key for key in keys for one in self.cells if isinstance(at(one, key), dict | list)}
        return tuple(key for key in keys if key not in whole)

    @cached_property
    def numeric_keys(self) -> tuple[str, ...]:
        """Keys with numbers above 0 in all cells."""
        return tuple(key for key in self.keys if all(_is_positive(at(c, key)) for c in self.cells))

    def values(self, recipe: str, metric: Metric) -> dict[str, dict[int, float]]:
        """Return a metric of a recipe by setting and seed, of the seeds that all settings have run.

        Else a setting of an unfinished study that has more seeds would win by that alone.
        """
        cells = self.of(recipe)
        common = set.intersection(*({run.seed for run in cell.seeds} for cell in cells))
        return {
            cell.variant: {
                run.seed: value
                for run in cell.seeds
                if run.seed in common and math.isfinite(value := value_of(run, metric))
            }
            for cell in cells
        }

    def matrix(self, metric: Metric) -> "list[list[Transfer]]":
        """Return the transfer matrix of a metric."""
        values = {recipe: self.values(recipe, metric) for recipe in self.recipes}
        return transfer_matrix(values, higher=not MEASURES[metric].is_cost)


def _tree(cell: CellResults) -> dict[str, Any]:
    return cell.recipe.model_dump(mode="json")


def at(cell: CellResults, key: str) -> Any:  # noqa: ANN401 -- any value of a recipe
    """Return the value of a cell at a dotted key of its recipe, or outside of it."""
    return getattr(cell.cell, key) if key in _OUTSIDE else value_at(_tree(cell), key)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


class Transfer(NamedTuple):
    """A recipe with the best setting of a recipe, which may be itself."""

    best_of: str
    used_on: str
    setting: str | None
    """The best one of `best_of`; None if none has a value for every seed."""

    value: Interval | None
    """Value of `used_on` with this setting."""

    own: Interval | None
    """Value of `used_on` with its own best setting."""

    gap: Interval | None
    """`value` minus `own` by seed, or the ratio of costs. None if seeds are missing, and for a
    cost of 0. Its interval holds for the own best one against all other settings together, for it
    was chosen among them."""

    @property
    def share(self) -> float:
        """Fraction of its own best that `used_on` keeps: at most 1 for means of the same seeds."""
        if self.value is None or self.own is None:
            return 0.0
        low, high = sorted((abs(self.value.mean), abs(self.own.mean)))
        return low / high if high else 1.0


def best_setting(settings: Mapping[str, Mapping[int, float]], *, higher: bool) -> str | None:
    """Return the setting with the best mean, of those with a value for every seed; None without.

    >>> best_setting({"a": {1: 0.9, 2: 0.7}, "b": {1: 0.8, 2: 0.9}, "c": {1: 1.0}}, higher=True)
    'b'
    """
    seeds = {seed for found in settings.values() for seed in found}
    means = {
        name: interval(found.values()).mean
        for name, found in settings.items()
        if found and found.keys() == seeds
    }
    if not means:
        return None
    return (max if higher else min)(means, key=lambda name: means[name])


def transfer_matrix(
    values: Mapping[str, Mapping[str, Mapping[int, float]]], *, higher: bool
) -> list[list[Transfer]]:
    """Return a row for each recipe whose best setting is used, a column for each it is used on.

    `values` are by recipe, setting and seed. `higher`: the best value is the highest, as of an
    accuracy; else the lowest, as of a cost.
    """
    best = {recipe: best_setting(settings, higher=higher) for recipe, settings in values.items()}

    def transfer(best_of: str, used_on: str) -> Transfer:
        settings = values[used_on]
        value, own = (settings.get(best[name] or "", {}) for name in (best_of, used_on))
        return Transfer(
            best_of=best_of,
            used_on=used_on,
            setting=best[best_of],
            value=interval(value.values()) if value else None,
            own=interval(own.values()) if own else None,
            gap=gap(value, own, higher=higher, together=max(1, len(settings) - 1)),
        )

    return [[transfer(best_of, used_on) for used_on in values] for best_of in values]


def gap(
    value: Mapping[int, float], own: Mapping[int, float], *, higher: bool, together: int
) -> Interval | None:
    """Return a value minus the own best one by seed, or the ratio of costs.

    One of `together` gaps. None if seeds are missing, and for a cost of 0.
    """
    if not own or value.keys() != own.keys():
        return None
    if higher:
        return difference(value, own, together=together)
    if min(*value.values(), *own.values()) <= 0:
        return None
    return ratio(value, own, together=together).interval


def lost(matrix: Sequence[Sequence[Transfer]], *, higher: bool) -> list[Transfer]:
    """Return where the best setting of another recipe is worse than the own one, beyond the noise.

    A gap of one seed has no interval.
    """
    return [
        one
        for row in matrix
        for one in row
        if one.gap is not None
        and one.best_of != one.used_on
        and (one.gap.high < 0 if higher else one.gap.low > 1)
    ]


class Correlation(NamedTuple):
    """Spearman's correlation, its interval and the number of settings."""

    rho: float
    low: float
    high: float
    number: int

    @property
    def is_sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.low > 0 or self.high < 0


def correlation(one: Sequence[float], other: Sequence[float]) -> Correlation | None:
    """Return the correlation of pairs of finite numbers; None for few pairs or constant values.

    >>> found = correlation([1, 2, 3, 4, 5], [1, 4, 9, 16, 25])
    >>> found.rho, found.number
    (1.0, 5)
    """
    both = zip(one, other, strict=True)
    pairs = [pair for pair in both if all(map(math.isfinite, pair))]
    if len(pairs) < ENOUGH_SETTINGS or any(len(set(each)) < 2 for each in zip(*pairs, strict=True)):
        return None
    stats = require_scipy("scipy.stats")

    rho = round(float(stats.spearmanr(*zip(*pairs, strict=True)).statistic), 12)
    number = len(pairs)
    most = 1 - 12 / (number**3 - number)  # that of orders with one pair of neighbours exchanged
    bounded = max(-most, min(most, rho))
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    reach *= math.sqrt((1 + bounded**2 / 2) / (number - 3))
    low, high = (math.tanh(math.atanh(bounded) + end) for end in (-reach, reach))
    return Correlation(rho, min(low, rho), max(high, rho), number)


def correlations(findings: Findings, recipe: str) -> dict[tuple[str, str], Correlation]:
    """Return the correlations of a recipe: of each key and measure with each other measure."""
    cells = [one for one in findings.of(recipe) if not one.diverged]
    columns = {
        key.rpartition(".")[2]: [float(at(one, key)) for one in cells]
        for key in findings.numeric_keys
    }
    columns["device_batch"] = [
        float(make_plan(one.recipe, workers=one.cell.workers).device_batch) for one in cells
    ]
    for name, value in CORRELATED.items():
        means = [one.mean(value) for one in cells]
        columns[name] = [math.nan if mean is None else mean.mean for mean in means]
    found = {
        (one, other): correlation(columns[one], columns[other])
        for one in columns
        for other in CORRELATED
        if one != other
    }
    return {pair: each for pair, each in found.items() if each is not None}


def describe(findings: Findings, metrics: Sequence[Metric]) -> Iterator[str]:
    """Yield the findings: spread of accuracies, the fastest setting, losses by transfer."""
    for recipe in findings.recipes:
        ranked = sorted(
            ((top1.mean, one.variant) for one in findings.of(recipe) if (top1 := one.top1)),
        )
        (low, worst), (high, best) = ranked[0], ranked[-1]
        text = f"{recipe}: top-1 from {100 * low:.2f} % ({worst}) to {100 * high:.2f} % ({best})"
        times = findings.values(recipe, "train_seconds")
        fastest = best_setting(times, higher=False)
        if fastest is not None:
            seconds = interval(times[fastest].values()).text(",.1f", " s")
            level = shorten(as_fast(times, fastest), most=_NAMED)
            text += f"; the shortest training has {fastest}, {seconds}"
            text += f" (within its noise: {level})" * bool(level)
        yield f"{text}."
    for metric in metrics if len(findings.recipes) > 1 and len(findings.settings) > 1 else ():
        measure, matrix = MEASURES[metric], findings.matrix(metric)
        best_of = [f"{row[0].setting or MISSING} on {row[0].best_of}" for row in matrix]
        losses = [
            f"on {one.used_on} that of {one.best_of} is {describe_gap(one, measure)}"
            for one in lost(matrix, higher=not measure.is_cost)
        ]
        yield f"{measure.best.capitalize()}: {'; '.join([*best_of, *losses])}."
    yield from _describe_runs(findings)


def as_fast(times: Mapping[str, Mapping[int, float]], fastest: str) -> list[str]:
    """Return the other settings whose times, by pairs of seeds, are not surely longer."""
    own = times[fastest]
    others = {
        name: found
        for name, found in times.items()
        if found.keys() == own.keys() and name != fastest
    }
    gaps = {
        name: gap(each, own, higher=False, together=len(others)) for name, each in others.items()
    }
    return [name for name, each in gaps.items() if each is None or each.low <= 1]


def describe_gap(one: Transfer, measure: Measure) -> str:
    """Return the gap of a transfer: a difference in points, or a ratio of costs."""
    if one.best_of == one.used_on:
        return "its own best"
    if one.gap is None:
        return "not measured with every seed"
    if measure.is_cost:
        return f"× {one.gap.with_ends('.2f')}"
    return one.gap.scaled(measure.factor).with_ends("+.2f").replace("-", "−")


def _describe_runs(findings: Findings) -> Iterator[str]:
    runs = [run for one in findings.cells for run in one.seeds]
    trials = [trial for one in findings.cells for trial in one.trials]
    yield f"{plural(len(runs), 'run')} with seeds on {shorten(list({run.host for run in runs}))}."
    if together := overlapping(runs, trials):
        yield (
            f"{plural(together, 'run')} overlapped with others on the same machine: their times "
            "are those of a shared machine."
        )
    others = [run.other_cores for run in runs if math.isfinite(run.other_cores)]
    if others and max(others) >= 0.1:
        yield (
            f"Other programs used {min(others):.1f} to {max(others):.1f} cores of the machine "
            "during the runs, which their times show."
        )
    waiting = [one.cell.name for one in findings.cells if not one.finished]
    if waiting:
        yield f"Not finished: {shorten(waiting, most=_NAMED)}."


def overlapping(runs: Sequence[Result], trials: Sequence[Result] = ()) -> int:
    """Return the number of runs during which another run or trial was on the same machine."""
    return sum(
        any(
            other is not one and other.host == one.host
            and other.begun < one.ended and one.begun < other.ended
            for other in (*runs, *trials)
        )
        for one in runs
    )  # fmt: skip


def make_page(name: str, cells: Sequence[CellResults], *, metrics: Sequence[Metric]) -> Page:
    """Return the page of the cells, which have at least one seed each."""
    findings = Findings(cells)
    looks = {recipe: series(place, recipe) for place, recipe in enumerate(findings.recipes)}
    matrices = [
        _matrix(findings, metric)
        for metric in metrics
        if len(findings.recipes) > 1 and len(findings.settings) > 1
    ]
    tables = [_correlations(recipe, correlations(findings, recipe)) for recipe in findings.recipes]
    seeds = min(len(one.seeds) for one in cells)
    return Page(
        title=name,
        subtitle=", ".join(findings.recipes),
        findings=list(describe(findings, metrics)),
        is_sound=seeds >= ENOUGH_SEEDS and all(one.finished for one in cells),
        note=_NOTE,
        legend=("Recipes", list(looks.values())),
        sections=[
            Section(title="Settings", parts=[_table(findings, looks)], notes=[_TABLE]),
            Section(title="Does the best setting transfer?", parts=matrices,
                    notes=[_TRANSFER] * bool(matrices)),
            Section(title="Patterns", parts=[_chart(findings, looks, key)
                                             for key in findings.keys]),
            Section(title="Correlations", parts=[one for one in tables if one.columns],
                    notes=[_CORRELATIONS] * any(one.columns for one in tables)),
        ],
        source="the records of a study",
    )  # fmt: skip


def _table(findings: Findings, looks: Mapping[str, Series]) -> Table:
    column = columns_over(findings.cells)

    def mean(
        title: str, value: Callable[[Result], float | None], form: str, factor: float = 1.0
    ) -> Column:
        return column(title, lambda one: (it := one.mean(value)) and factor * it.mean, form)

    def reach(title: str, metric: Metric, form: str, factor: float = 1.0) -> Column:
        def value(one: CellResults) -> float | None:
            found = one.mean(lambda run: value_of(run, metric))
            return found and found.scaled(factor).reach

        return column(title, value, form)

    def used(title: str, name: str, form: str, factor: float = 1.0) -> Column:
        return mean(title, lambda run: run.used(name), form, factor)

    columns = [
        column("Setting", lambda one: one.variant, None),
        mean("Top-1, %", lambda run: run.top1, ".2f", 100),
        reach("±", "top1", ".2f", 100),
        used("Training, s", "train_seconds", ",.1f"),
        reach("± s", "train_seconds", ",.1f"),
        column("Recipe", lambda one: one.configuration, None),
        mean("Images/s", lambda run: run.images_per_second, ",.0f"),
        used("Evaluation, s", "evaluation_seconds", ",.2f"),
        used("Processor, s", "cpu_seconds", ",.1f"),
        used("Cores used", "cores", ".2f"),
        used("Peak memory, MB", "peak_memory_bytes", ",.0f", 1e-6),
        used("Read, MB", "read_bytes", ",.1f", 1e-6),
        column("Seeds", lambda one: len(one.seeds), "d"),
        column("Diverged", lambda one: one.diverged, "d"),
        used("Written, MB", "written_bytes", ",.1f", 1e-6),
        used("GPU, %", "gpu_percent", ".0f"),
        used("GPU memory, MB", "gpu_memory_bytes", ",.0f", 1e-6),
        *(_key_column(findings, key) for key in findings.keys),
        mean("Top-5, %", lambda run: run.top5, ".2f", 100),
        mean("Cores of others", lambda run: run.other_cores, ".1f"),
        column("Status", lambda one: None if one.finished else "unfinished", None),
    ]
    printed = {one.title for one in columns[:14]}
    rows = [looks[one.configuration] for one in findings.cells]
    return Table(name="settings", columns=columns, series=rows, printed=printed)


def _key_column(findings: Findings, key: str) -> Column:
    is_number = key in findings.numeric_keys
    values = [at(one, key) if is_number else _word(one, key) for one in findings.cells]
    return Column(key.rpartition(".")[2], values, ",.8g" if is_number else None)


def _word(one: CellResults, key: str) -> str:
    value = at(one, key)
    return MISSING if value is None else str(value)


def _matrix(findings: Findings, metric: Metric) -> Table:
    measure, matrix = MEASURES[metric], findings.matrix(metric)
    largest = max((1 - one.share for row in matrix for one in row), default=0.0) or 1.0
    settings = [row[0].setting or MISSING for row in matrix]
    columns = [Column("Best setting of", [row[0].best_of for row in matrix], details=settings)]
    columns += [
        Column(
            f"used on {cells[0].used_on}",
            [one.value and measure.factor * one.value.mean for one in cells],
            f",.{measure.digits}f",
            unit=f" {measure.unit}",
            details=[describe_gap(one, measure) for one in cells],
            strengths=[0.0 if one.value is None else (1 - one.share) / largest for one in cells],
        )
        for cells in zip(*matrix, strict=True)
    ]
    caption = f"{measure.title} of each recipe with the setting that has {measure.best} for another"
    return Table(name=f"transfer-{metric}", columns=columns, caption=caption)


def _chart(findings: Findings, looks: Mapping[str, Series], key: str) -> Chart:
    """Return accuracy and training time of every cell along a key."""
    is_number = key in findings.numeric_keys

    def line(recipe: str, metric: Metric) -> Line:
        means = {
            at(cell, key) if is_number else _word(cell, key): mean.scaled(MEASURES[metric].factor)
            for cell in findings.of(recipe)
            if (mean := cell.mean(lambda run: value_of(run, metric))) is not None
        }
        return interval_line(looks[recipe], list(means), list(means.values()), line=False)

    panels = [
        Panel(
            lines=[line(recipe, metric) for recipe in findings.recipes],
            x=key,
            y=f"{MEASURES[metric].title}, {MEASURES[metric].unit}",
            log="x" if is_number else "",
            from_zero=MEASURES[metric].is_cost,
        )
        for metric in _DRAWN
    ]
    return line_chart(f"along-{key}", *panels)


def _correlations(recipe: str, found: Mapping[tuple[str, str], Correlation]) -> Table:
    rows = list(dict.fromkeys(one for one, _ in found))
    columns = [Column(recipe, rows)] if rows else []
    for other in dict.fromkeys(other for _, other in found):
        cells = [found.get((one, other)) for one in rows]
        columns.append(
            Column(
                other,
                [each and each.rho for each in cells],
                "+.2f",
                details=[f"{each.low:+.2f} to {each.high:+.2f}" if each else "" for each in cells],
                strengths=[abs(each.rho) if each and each.is_sure else 0.0 for each in cells],
            )
        )
    return Table(name=f"correlations-{recipe}", columns=columns)
