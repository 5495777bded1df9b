"""The page of a study of policies or of settings, whose runs are those of `largebatch train`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from largebatch.lab.studies.metrics import ENOUGH_SEEDS, trade_off
from largebatch.lab.studies.policies import Ranked, costs, rank, schedule
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.settings import (
    CPU,
    MEASURES,
    MEMORY,
    TOP1,
    TRAINING,
    findings,
    matrix,
    used,
)
from largebatch.lab.studies.study import Study
from largebatch.lab.studies.trained import CellResults, Result, cells_of, results_of
from largebatch.report.pages import (
    Column,
    Page,
    Part,
    Section,
    Series,
    Table,
    columns_over,
    series,
)

__all__ = ["cells_of", "make_page"]

_NOTE = (
    "Means over seeds with Student's interval of 95 %; two variants compare by pairs of the same "
    "seeds. A run that diverged has the accuracy of chance, and its costs do not count."
)
_POLICIES = (
    "A cost is that of updates and evaluations up to the first evaluation at the target, of the "
    "seeds that reached it. Held-out images chose peak_lr."
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


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    found = [results_of(cell, records.get(cell.name, {})) for cell in cells_of(study, folder)]
    return draw(study.name, [one for one in found if one.trials or one.seeds], study.targets)


def draw(name: str, cells: Sequence[CellResults], targets: Sequence[float] = ()) -> Page:
    """Return the page of the cells; `targets` are fractions."""
    variants = list(dict.fromkeys(cell.cell.variant for cell in cells))
    looks = {variant: series(place, variant) for place, variant in enumerate(variants)}
    recipes: dict[str, list[CellResults]] = {}
    for cell in cells:
        recipes.setdefault(cell.cell.configuration, []).append(cell)
    is_of_settings = any(cell.cell.own_process for cell in cells)
    title, one, note = "Policies", "Policy", _POLICIES
    if is_of_settings:
        title, one, note = "Settings", "Setting", _SETTINGS
    rows, sentences, sections = list[Ranked](), list[str](), list[Section]()
    for recipe, some in recipes.items():
        cost, value, parts = "Training time, s", _mean(TRAINING.of), list[Part]()
        if is_of_settings:
            rows += [Ranked(results=cell, scores={}) for cell in some]
        else:
            rankings = [rank(some), *(rank(some, target=target) for target in targets)]
            rows += rankings[0].ranked
            sentences += [f"{recipe}: {each.finding}." for each in rankings]
            highest = max(rankings, key=lambda each: each.target or 0.0)
            cost = f"Updates to {100 * (highest.target or 0.0):g} %"
            value = partial(_spent, target=highest.target or math.inf, name="step")
            parts.append(schedule(highest.ranked[0].results))
        points = [
            (looks[cell.cell.variant], spent, cell.top1.scaled(100))
            for cell in some
            if (spent := value(cell)) is not None and cell.top1
        ]
        if points:
            parts.insert(0, trade_off(f"cost-{recipe}", cost, points))
        sections.append(Section(title=recipe, parts=parts))
    if is_of_settings:
        sentences += findings(cells)
    if is_of_settings and len(recipes) > 1 and len(variants) > 1:
        tables = [matrix(cells, measure) for measure in MEASURES]
        sections.append(
            Section(title="Does the best setting transfer?", parts=tables, notes=[_TRANSFER])
        )
    table = _table(rows, targets, looks, title=one)
    return Page(
        title=name,
        subtitle=", ".join(recipes),
        findings=sentences,
        is_sound=all(cell.finished and len(cell.seeds) >= ENOUGH_SEEDS for cell in cells),
        note=_NOTE,
        legend=(title, list(looks.values())),
        sections=[Section(title=title, parts=[table], notes=[note]), *sections],
        source="the records of a study",
    )


def _mean(value: Callable[[Result], float | None]) -> Callable[[CellResults], float | None]:
    return lambda cell: (it := cell.mean(value)) and it.mean


def _spent(cell: CellResults, *, target: float, name: str) -> float | None:
    """Return the mean steps or seconds of the seeds that reached a target; None without one."""
    known = [getattr(one, name) for one in costs(cell, target)]
    return fmean(known) if known else None


def _table(
    rows: Sequence[Ranked], targets: Sequence[float], looks: Mapping[str, Series], *, title: str
) -> Table:
    cells = [row.results for row in rows]
    column = columns_over(cells)

    def mean(title: str, value: Callable[[Result], float | None], form: str) -> Column:
        return column(title, _mean(value), form)

    def reach(title: str, value: Callable[[Result], float]) -> Column:
        return column(title, lambda cell: (it := cell.mean(value)) and it.reach, ",.2f")

    def of_target(target: float) -> Iterator[Column]:
        of = f"{100 * target:g} %"
        yield column(f"Updates to {of}", partial(_spent, target=target, name="step"), ",.0f")
        yield column(f"Seconds to {of}", partial(_spent, target=target, name="seconds"), ",.1f")
        reached = [f"{len(costs(cell, target))} of {len(cell.seeds)}" for cell in cells]
        yield Column(f"reached {of}", reached)

    resources = [
        mean("Training, s", TRAINING.of, ",.1f"),
        reach("± s", TRAINING.of),
        mean("Images/s", lambda run: run.images_per_second, ",.0f"),
        mean("Processor, s", CPU.of, ",.1f"),
        mean("Cores used", used("cores"), ".2f"),
        mean("Peak memory, MB", MEMORY.of, ",.0f"),
        mean("GPU, %", used("gpu_percent"), ".0f"),
        mean("GPU memory, MB", used("gpu_memory_bytes", 1e-6), ",.0f"),
    ]
    below = [row.against and row.against.scaled(100).with_ends(".2f") for row in rows]
    columns = [
        column(title, lambda cell: cell.cell.variant, None),
        column("Recipe", lambda cell: cell.cell.configuration, None),
        mean("Top-1, %", TOP1.of, ".2f"),
        reach("±", TOP1.of),
        Column("Points below the best", below),
        *(resources if title == "Setting" else ()),
        column("peak_lr", lambda cell: cell.rate, ",.8g"),
        column("Seeds", lambda cell: len(cell.seeds), "d"),
        column("Diverged", lambda cell: cell.diverged, "d"),
    ]
    printed = {one.title for one in columns} - {"GPU, %", "GPU memory, MB"}
    columns += [one for target in targets for one in of_target(target)]
    columns.append(mean("Loss: validation − training", lambda run: run.loss_difference, ".4f"))
    shown = [looks[cell.cell.variant] for cell in cells]
    return Table(name="variants", columns=columns, series=shown, printed=printed)
