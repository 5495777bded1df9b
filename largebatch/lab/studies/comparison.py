"""Studies of policies and of settings, whose runs are those of `largebatch train`: their page.

Policies are ranked by accuracy and by the cost of an accuracy, within one recipe, where all else is
the same, and by seed. Differences within the noise of seeds are reported as such. A cost to a
target is the mean of the seeds that reached it; the cost of the others is only known to be higher
than what was run.

Of settings the page shows the transfer: whether the best one is best for other recipes, too. It is
that of GTDLBench (arXiv:1810.12210), which carries the settings that are best for one data set over
to others, and looks at processor and memory use along with hyper-parameters.
"""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from largebatch.formatting import MISSING
from largebatch.lab.studies import correlations
from largebatch.lab.studies.doubts import StudyFinding, doubts_about, in_no_order
from largebatch.lab.studies.metrics import Measurement, cost, interval_line, trade_off
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import RATE, Slot, Study
from largebatch.lab.studies.trained import CellResults, TrainedRecord, cells_of, results_of
from largebatch.recipe.writing import dump_yaml
from largebatch.report.pages import (
    Chart,
    Code,
    Column,
    Page,
    PagePart,
    PageSection,
    Panel,
    Series,
    Table,
    columns_over,
    line_chart,
    series,
)
from largebatch.report.seeds import ENOUGH_SEEDS, Interval, difference, interval, leads, ratio

__all__ = ["cells_of", "make_page"]

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two variants compare by pairs of the same "
    "seeds. A run that diverged has the accuracy of chance, and its costs do not count."
)
_POLICIES = (
    "A cost is that of updates and evaluations up to the first evaluation at the target, of the "
    "seeds that reached it. Held-out images chose peak_lr. AC is the average confidence of correct "
    "images, CD its deviation over these images, and CDAC that of the averages of the classes "
    "(LRBench, arXiv:1908.06477). The mean over multiples of the rate is over their logarithm."
)
_SETTINGS = (
    "Training is the time of the updates. The rest is of all workers, from their set-up to the last"
    " update; memory that they share is counted in each. Times need a quiet machine."
)
_TRANSFER = (
    "Below each value is its distance from the own best setting of the recipe of the column, over "
    "pairs of seeds, with the interval of 95 % of all settings together: in points, or as a ratio "
    "of costs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One policy, and how it compares with the first one."""

    results: CellResults
    scores: Mapping[int, float]
    """By seed, updates to the target, without seeds that did not reach it; else top-1."""

    against: Interval | None = None
    """Its cost over that of the first policy, or the accuracy of that one minus its own."""

    is_level: bool = False
    """True if it is within the noise of seeds of the first policy."""

    @property
    def policy(self) -> str:
        """Its name."""
        return self.results.cell.variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The policies of one recipe of a study, the best first; those without a score last."""

    target: float | None
    """The accuracy whose cost ranks them; None: they are ranked by accuracy."""

    robust: bool = False
    """True: by the accuracy at multiples of the rate found, else at this rate."""

    ranked: tuple[Ranked, ...]

    @property
    def doubts(self) -> list[str]:
        """What speaks against the best policy, or is missing."""
        first, *others = self.ranked
        cell = first.results
        runs = [ranked.results.runs for ranked in others]
        doubts = doubts_about([cell.runs], others=runs, study=(), of_time=False)
        scored = "has a seed" if self.target is None else f"reached {self.target:.2%}"
        if self.robust:
            scored = "has a seed with every multiple of the rate"
        if not first.scores:
            return [*doubts, f"no policy {scored}"]
        if not others:
            doubts.append("only one policy was measured")
        if len(first.scores) < min(ENOUGH_SEEDS, len(cell.seeds)):
            doubts.append(
                f"too few seeds to judge: {first.policy} {scored} {len(first.scores)} times"
            )
        if cell.edge:
            doubts.append(
                f"{first.policy}: peak_lr {cell.rate:g} is the {cell.edge} tried: a better one may "
                "be beyond"
            )
        level = [ranked.policy for ranked in others if ranked.is_level]
        return [*doubts, *in_no_order(first.policy, level)]

    @property
    def finding(self) -> StudyFinding:
        """The best policy with its rate."""
        first = self.ranked[0]
        by = "accuracy" if self.target is None else f"cost to {self.target:.2%}"
        if self.robust:
            by = "robustness to the rate"
        rate = "" if first.results.rate is None else f", peak_lr {first.results.rate:g}"
        return StudyFinding(
            about=f"{first.results.cell.configuration}, by {by}",
            text=f"{first.policy} is recommended{rate}",
            doubts=self.doubts,
        )


def rank(
    cells: Sequence[CellResults], *, target: float | None = None, robust: bool = False
) -> Ranking:
    """Rank the policies of one recipe by the cost of a target, a fraction, else by accuracy.

    `robust`: by the mean accuracy at multiples of the rate found (metrics.Robustness.areas).

    The order is by divergence, then by the number of seeds that reached the target, then by the
    mean. A policy without a score, or that alone diverged, is worse than the first; another is
    level with it unless the interval of their difference, over the seeds of both, excludes
    equality. These intervals hold jointly (Bonferroni).
    """

    def score(run: TrainedRecord) -> float | None:
        if target is None:
            return run.top1
        reached = reached_at(run, target)
        return None if reached is None else reached.step

    # A policy that reached the target with one lucky seed must not be first, so the share of seeds
    # counts before the mean.
    def order(ranked: Ranked) -> tuple[bool, bool, float, float]:
        known = ranked.scores.values()
        mean = fmean(known) if known else 0.0
        share = len(known) / len(ranked.results.seeds) if known else 0.0
        return not known, ranked.results.diverged > 0, -share, -mean if target is None else mean

    scored = []
    for cell in cells:
        if robust:
            known = cell.robustness.areas if cell.robustness else {}
        else:
            scores = {run.seed: score(run) for run in cell.seeds}
            known = {seed: value for seed, value in scores.items() if value is not None}
        scored.append(Ranked(results=cell, scores=known))
    first, *others = sorted(scored, key=order)
    by_policy = {ranked.policy: ranked.scores for ranked in others}
    over_others = leads(first.scores, by_policy, of_costs=target is not None)
    compared = []
    for ranked, lead in zip(others, over_others, strict=True):
        only_it_diverged = ranked.results.diverged > 0 and not first.results.diverged
        is_level = bool(ranked.scores) and not only_it_diverged and not lead.is_sure
        compared.append(replace(ranked, against=lead.gap, is_level=is_level))
    return Ranking(target=target, robust=robust, ranked=(first, *compared))


def reached_at(run: TrainedRecord, target: float) -> Measurement | None:
    """Return the cost of a run up to a top-1 accuracy (a fraction).

    None if the run did not reach it, or diverged and so did not keep it.
    """
    return None if run.diverged else cost(run.evaluations, target)


def costs(cell: CellResults, target: float) -> list[Measurement]:
    """Return the costs of the seeds that reached a target."""
    measurements = (reached_at(run, target) for run in cell.seeds)
    return [measurement for measurement in measurements if measurement is not None]


def schedule(best: CellResults) -> Code:
    """Return the schedule of a policy at its rate, as a section of a recipe."""
    values = best.seeds[0].values if best.seeds else {}
    recipe = best.cell.recipe_of(Slot(name="seed-1", seed=1), values)
    text = "schedule:\n" + textwrap.indent(dump_yaml(recipe.schedule), "  ")
    return Code(name=f"schedule of {best.cell.variant}", text=text)


class Measure(NamedTuple):
    """A metric that chooses the best setting of a recipe."""

    title: str
    unit: str
    form: str
    best: str
    """What the best setting is called: `the highest top-1`."""

    of: Callable[[TrainedRecord], float]
    """Its value of a run, in the unit; NaN where it was not measured."""

    higher: bool = False
    """True if the highest value is best."""

    of_time: bool = False
    """True if it needs a quiet machine, as times do, and resident memory, which others push out."""


def used(name: str, factor: float = 1.0) -> Callable[[TrainedRecord], float]:
    """Return the function of a run that is its usage of this name, times a factor.

    It is NaN where that was not measured, or the run diverged.
    """
    return lambda run: math.nan if run.diverged else factor * run.usage.get(name, math.nan)


TOP1 = Measure("Top-1", "%", ".2f", "the highest top-1", lambda run: 100 * run.top1, higher=True)
TRAINING = Measure(
    "Training time", "s", ",.1f", "the shortest training", used("train_seconds"), of_time=True
)
CPU = Measure(
    "Processor time", "s", ",.1f", "the least processor time", used("cpu_seconds"), of_time=True
)
MEMORY = Measure(
    "Peak memory", "MB", ",.0f", "the least memory", used("peak_memory_bytes", 1e-6), of_time=True
)
MEASURES = TOP1, TRAINING, CPU, MEMORY
READ = used("read_bytes", 1e-6)

CORRELATED: correlations.Results = {
    **{measure.title: measure.of for measure in MEASURES},
    "Images/s": lambda run: math.nan if run.diverged else run.images_per_second or math.nan,
    "Cores used": used("cores"),
    "Read from disk": READ,
}
"""Results whose correlations with settings are shown."""

TIMED = {TRAINING.title, CPU.title, MEMORY.title, "Images/s", "Cores used"}
"""Results that need a quiet machine."""


class SettingTransfer(NamedTuple):
    """A recipe with the best setting of a recipe, which may be itself."""

    best_of: str
    used_on: str
    setting: str | None
    """The best one of `best_of`; None if none has a value for every seed."""

    value: Interval | None
    """Value of `used_on` with this setting."""

    gap: Interval | None
    """`value` minus that of its own best setting by seed, or the ratio of costs. None if seeds are
    missing, and for a cost of 0. Its interval holds for the own best one against all other settings
    together, for it was chosen among them."""

    def describe(self, measure: Measure) -> str:
        """Return the gap: a difference in points, or a ratio of costs."""
        if self.best_of == self.used_on:
            return "its own best"
        if self.gap is None:
            return "not measured with every seed"
        if measure.higher:
            return self.gap.with_ends("+.2f").replace("-", "−")
        return f"× {self.gap.with_ends('.2f')}"


def best_setting(settings: Mapping[str, Mapping[int, float]], *, higher: bool) -> str | None:
    """Return the setting with the best mean, of those with a value for every seed; None without."""
    seeds = {seed for values in settings.values() for seed in values}
    means = {
        name: interval(values.values()).mean
        for name, values in settings.items()
        if values and values.keys() == seeds
    }
    return (max if higher else min)(means, key=lambda name: means[name], default=None)


def gap_between(
    values: Mapping[int, float], best: Mapping[int, float], *, higher: bool, together: int
) -> Interval | None:
    """Return how far values are from the best ones, by pairs of seeds.

    A difference of accuracies, a ratio of costs; one of `together` intervals. None if seeds are
    missing, and for a cost of 0, which has no ratio.
    """
    if not best or values.keys() != best.keys():
        return None
    return (difference if higher else ratio)(values, best, together=together)


def level_with(
    best: str, settings: Mapping[str, Mapping[int, float]], *, higher: bool
) -> list[str]:
    """Return the settings within the noise of seeds of the best one, all compared together.

    A setting that lacks seeds is one of them unless all its values are missing, as those of runs
    that diverged are.
    """
    others: dict[str, Mapping[int, float]] = {}
    for name, values in settings.items():
        if name != best:
            # A setting without some seeds has no fair interval, and so is not called worse.
            is_complete = values.keys() == settings[best].keys()
            others[name] = values if is_complete else {}
    compared = leads(settings[best], others, of_costs=not higher)
    return [lead.over for lead in compared if settings[lead.over] and not lead.is_sure]


def transfer_matrix(
    values: Mapping[str, Mapping[str, Mapping[int, float]]], *, higher: bool
) -> list[list[SettingTransfer]]:
    """Return a row for each recipe whose best setting is used, a column for each it is used on.

    `values` are by recipe, setting and seed. `higher`: the best value is the highest, as of an
    accuracy; else the lowest, as of a cost.
    """
    best = {recipe: best_setting(settings, higher=higher) for recipe, settings in values.items()}

    def transfer(best_of: str, used_on: str) -> SettingTransfer:
        settings = values[used_on]
        value, best_values = (settings.get(best[name] or "", {}) for name in (best_of, used_on))
        return SettingTransfer(
            best_of=best_of,
            used_on=used_on,
            setting=best[best_of],
            value=interval(value.values()) if value else None,
            gap=gap_between(value, best_values, higher=higher, together=max(1, len(settings) - 1)),
        )

    return [[transfer(best_of, used_on) for used_on in values] for best_of in values]


def lost(matrix: Sequence[Sequence[SettingTransfer]], *, higher: bool) -> list[SettingTransfer]:
    """Return where the best setting of another recipe is worse than the own one, beyond noise."""
    return [
        transfer
        for row in matrix
        for transfer in row
        if transfer.gap is not None
        and transfer.best_of != transfer.used_on
        and (transfer.gap.high < 0 if higher else transfer.gap.low > 1)
    ]


def compared_values(
    cells: Sequence[CellResults], measure: Measure
) -> dict[str, dict[str, dict[int, float]]]:
    """Return the values of a measure by recipe, setting and seed, where it was measured.

    Only seeds that all settings of a recipe have run: else a setting of an unfinished study that
    has more seeds would win by that alone.
    """
    values: dict[str, dict[str, dict[int, float]]] = {}
    for cell in cells:
        # Seeds that all settings have: the mean over more seeds has other luck.
        cells_of_recipe = [
            other for other in cells if other.cell.configuration == cell.cell.configuration
        ]
        common = set.intersection(*({run.seed for run in other.seeds} for other in cells_of_recipe))
        measured = {run.seed: measure.of(run) for run in cell.seeds if run.seed in common}
        values.setdefault(cell.cell.configuration, {})[cell.cell.variant] = {
            seed: value for seed, value in measured.items() if math.isfinite(value)
        }
    return values


def findings(cells: Sequence[CellResults]) -> Iterator[StudyFinding]:
    """Yield the best setting of each recipe by each measure, and what is lost by transfer."""
    runs_of_study = [run for cell in cells for run in (*cell.seeds, *cell.trials)]
    for measure in MEASURES:
        values = compared_values(cells, measure)
        noise = dict[str, str]()
        for recipe, settings in values.items():
            best = best_setting(settings, higher=measure.higher)
            runs_of_recipe = {
                cell.cell.variant: cell.runs for cell in cells if cell.cell.configuration == recipe
            }
            if best is None:
                if any(settings.values()):
                    yield StudyFinding(
                        about=f"{recipe}, {measure.best}", text="",
                        doubts=["no setting was measured with every seed"],
                    )  # fmt: skip
                continue
            others = [runs for name, runs in runs_of_recipe.items() if name != best]
            doubts = doubts_about(
                [runs_of_recipe[best]], others=others, study=runs_of_study, of_time=measure.of_time
            )
            if not others:
                doubts.append("only one setting was measured")
            level = level_with(best, settings, higher=measure.higher)
            for doubt in in_no_order(best, level):
                noise[recipe] = doubt
                doubts.append(doubt)
            value = interval(settings[best].values())
            yield StudyFinding(
                about=f"{recipe}, {measure.best}",
                text=f"{best}, {value.with_ends(measure.form, f' {measure.unit}')}",
                doubts=doubts,
            )
        for transfer in lost(transfer_matrix(values, higher=measure.higher), higher=measure.higher):
            compared = [
                cell.runs
                for cell in cells
                if cell.cell.configuration in {transfer.used_on, transfer.best_of}
            ]
            doubts = doubts_about(compared, study=runs_of_study, of_time=measure.of_time)
            if transfer.best_of in noise:
                doubts.append(f"{transfer.best_of}: {noise[transfer.best_of]}")
            yield StudyFinding(
                about=f"{transfer.used_on} with the setting that has {measure.best} on "
                f"{transfer.best_of}",
                text=f"{transfer.setting} is {transfer.describe(measure)} from its own best",
                doubts=doubts,
            )


def matrix(cells: Sequence[CellResults], measure: Measure) -> Table:
    """Return the table of a measure, for the best setting of a recipe on each other one."""
    rows = transfer_matrix(compared_values(cells, measure), higher=measure.higher)
    settings = [row[0].setting or MISSING for row in rows]
    columns = [Column("Best setting of", [row[0].best_of for row in rows], details=settings)]
    columns += [
        Column(
            f"used on {column[0].used_on}, {measure.unit}",
            [transfer.value and transfer.value.mean for transfer in column],
            measure.form,
            details=[transfer.describe(measure) for transfer in column],
        )
        for column in zip(*rows, strict=True)
    ]
    caption = f"{measure.title} of each recipe with the setting that has {measure.best} for another"
    return Table(
        name=f"transfer-{measure.title.lower().replace(' ', '-')}", columns=columns, caption=caption
    )


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    results = [results_of(cell, records.get(cell.name, {})) for cell in cells_of(study, folder)]
    return draw(study.name, [one for one in results if one.trials or one.seeds], study.targets)


def draw(name: str, cells: Sequence[CellResults], targets: Sequence[float] = ()) -> Page:
    """Return the page of the cells; `targets` are fractions."""
    variants = list(dict.fromkeys(cell.cell.variant for cell in cells))
    looks = {variant: series(place, variant) for place, variant in enumerate(variants)}
    recipes: dict[str, list[CellResults]] = {}
    for cell in cells:
        recipes.setdefault(cell.cell.configuration, []).append(cell)
    is_of_settings = any(cell.cell.own_process for cell in cells)
    ranked = list[Ranked]()
    conclusions = list[StudyFinding]()
    sections = list[PageSection]()
    for recipe, some in recipes.items():
        title = "Training time, s"
        parts = list[PagePart]()
        value: Callable[[CellResults], Interval | None] = partial(
            CellResults.mean, value=TRAINING.of
        )
        if not is_of_settings:
            rankings = [rank(some), *(rank(some, target=target) for target in targets)]
            if any(cell.scaled for cell in some):
                rankings.append(rank(some, robust=True))
                parts.append(_robustness(f"scales-{recipe}", some, looks))
            ranked += rankings[0].ranked
            conclusions += [ranking.finding for ranking in rankings]
            # The curve to the highest target is the one that matters in practice.
            highest = max(rankings, key=lambda ranking: ranking.target or 0.0)
            title = f"Updates to {100 * (highest.target or 0.0):g} %"
            value = partial(_costs, target=highest.target or math.inf, name="step")
            parts.append(schedule(highest.ranked[0].results))
        points = [
            (looks[cell.cell.variant], spent, cell.top1.scaled(100))
            for cell in some
            if (spent := value(cell)) is not None and cell.top1
        ]
        if points:
            parts.insert(0, trade_off(f"cost-{recipe}", title, points))
        sections.append(PageSection(title=recipe, parts=parts))
    # Settings run in processes of their own, in which time and memory are measured.
    if is_of_settings:
        title = "Settings"
        note = _SETTINGS
        conclusions = list(findings(cells))
        conclusions += correlations.findings(recipes, CORRELATED, timed=TIMED)
        sections.append(correlations.section_of(recipes, CORRELATED))
        table = _table_of_settings([cell for some in recipes.values() for cell in some], looks)
        if len(recipes) > 1 and len(variants) > 1:
            tables = [matrix(cells, measure) for measure in MEASURES]
            sections.append(
                PageSection(
                    title="Does the best setting transfer?", parts=tables, notes=[_TRANSFER]
                )
            )
    else:
        title = "Policies"
        note = _POLICIES
        table = _table_of_policies(ranked, targets, looks)
    return Page(
        title=name,
        subtitle=", ".join(recipes),
        findings=list(map(str, conclusions)),
        is_sound=not any(finding.doubts for finding in conclusions),
        note=_NOTE,
        legend=(title, list(looks.values())),
        sections=[PageSection(title=title, parts=[table], notes=[note]), *sections],
        source="the records of a study",
    )


def _robustness(name: str, cells: Sequence[CellResults], looks: Mapping[str, Series]) -> Chart:
    """Return the chart of the accuracy at multiples of the rate found."""
    lines = []
    for cell in cells:
        if cell.robustness is not None:
            by_scale = cell.robustness.by_scale
            means = [mean.scaled(100) for mean in by_scale.values()]
            lines.append(interval_line(looks[cell.cell.variant], list(by_scale), means))
    panel = Panel(lines=lines, x="Multiple of the rate found", y="Top-1, %", log="x")
    return line_chart(name, panel, title="Robustness to the rate")


def _mean(
    value: Callable[[TrainedRecord], float | None], part: Literal["mean", "reach"] = "mean"
) -> Callable[[CellResults], float | None]:
    """Return a function of a cell: the mean over its seeds, or half the width of its interval."""
    return lambda cell: getattr(cell.mean(value), part, None)


def _costs(cell: CellResults, *, target: float, name: str) -> Interval | None:
    """Return the steps or seconds of the seeds that reached a target; None without one."""
    known = [getattr(measurement, name) for measurement in costs(cell, target)]
    return interval(known) if known else None


def _spent(cell: CellResults, *, target: float, name: str) -> float | None:
    """Return the mean of `_costs`."""
    known = _costs(cell, target=target, name=name)
    return known and known.mean


def _table_of_policies(
    rows: Sequence[Ranked], targets: Sequence[float], looks: Mapping[str, Series]
) -> Table:
    cells = [row.results for row in rows]
    column = columns_over(cells)
    details = list[Column]()
    for target in targets:
        of = f"{100 * target:g} %"
        reach = partial(_spent, target=target)
        reached = [f"{len(costs(cell, target))} of {len(cell.seeds)}" for cell in cells]
        details += [
            column(f"Updates to {of}", partial(reach, name="step"), ",.0f"),
            column(f"Seconds to {of}", partial(reach, name="seconds"), ",.1f"),
            Column(f"reached {of}", reached),
        ]
    below = [row.against and row.against.scaled(100).with_ends(".2f") for row in rows]
    details += [
        column("AC", _mean(lambda run: run.average_confidence), ".4f"),
        column("CD", _mean(lambda run: run.confidence_deviation), ".4f"),
        column("CDAC", _mean(lambda run: run.class_confidence_deviation), ".4f"),
    ]
    scales = sorted(
        {scale for cell in cells if cell.robustness for scale in cell.robustness.by_scale}
    )
    for scale in scales:
        if scale != 1:
            details.append(column(f"Top-1 at {scale:g} x the rate, %", _at_scale(scale), ".2f"))
    details.append(column("Mean over the multiples, %", _over_scales, ".2f"))
    return _table(cells, looks, "Policy", [Column("Points below the best", below)], details)


def _at_scale(scale: float) -> Callable[[CellResults], float | None]:
    def value(cell: CellResults) -> float | None:
        robustness = cell.robustness
        return None if robustness is None else 100 * robustness.by_scale[scale].mean

    return value


def _over_scales(cell: CellResults) -> float | None:
    robustness = cell.robustness
    return None if robustness is None else 100 * fmean(robustness.areas.values())


def _table_of_settings(cells: Sequence[CellResults], looks: Mapping[str, Series]) -> Table:
    column = columns_over(cells)
    resources = [
        column("Training, s", _mean(TRAINING.of), ",.1f"),
        column("± s", _mean(TRAINING.of, "reach"), ",.2f"),
        column("Images/s", _mean(lambda run: run.images_per_second), ",.0f"),
        column("Processor, s", _mean(CPU.of), ",.1f"),
        column("Cores used", _mean(used("cores")), ".2f"),
        column("Peak memory, MB", _mean(MEMORY.of), ",.0f"),
    ]
    details = [
        column("GPU, %", _mean(used("gpu_percent")), ".0f"),
        column("GPU memory, MB", _mean(used("gpu_memory_bytes", 1e-6)), ",.0f"),
        column("Read from disk, MB", _mean(READ), ",.1f"),
    ]
    return _table(cells, looks, "Setting", resources, details)


def _table(
    cells: Sequence[CellResults],
    looks: Mapping[str, Series],
    variant: str,
    compared: Sequence[Column],
    details: Sequence[Column],
) -> Table:
    column = columns_over(cells)
    keys = dict.fromkeys(
        key for cell in cells for run in cell.seeds for key in run.values if key != RATE
    )
    printed = [
        column(variant, lambda cell: cell.cell.variant, None),
        column("Recipe", lambda cell: cell.cell.configuration, None),
        column("Top-1, %", _mean(TOP1.of), ".2f"),
        column("±", _mean(TOP1.of, "reach"), ",.2f"),
        *compared,
        column("peak_lr", lambda cell: cell.rate, ",.8g"),
        *(column(key, _found(key), ",.8g") for key in keys),
        column("Seeds", lambda cell: len(cell.seeds), "d"),
        column("Diverged", lambda cell: cell.diverged, "d"),
    ]
    loss = column("Loss: validation − training", _mean(lambda run: run.loss_difference), ".4f")
    top5 = column("Top-5, %", _mean(lambda run: 100 * run.top5), ".2f")
    return Table(
        name="variants",
        columns=[*printed, top5, *details, loss],
        series=[looks[cell.cell.variant] for cell in cells],
        printed={shown.title for shown in printed},
    )


def _found(key: str) -> Callable[[CellResults], float | None]:
    return lambda cell: cell.seeds[0].values.get(key) if cell.seeds else None
