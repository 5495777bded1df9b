"""Scaling: what more workers bring in one host and on hosts, weak and strong.

Dell EMC compare GPUs in one server with servers (C4140, 2019): images a second against an ideal of
as many times one GPU. Here workers are in one host, or each on its own host behind a link. In weak
scaling each has the same mini-batch, in strong scaling all share the batch that the most workers
have together; so the two meet there, in one cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

from largebatch.lab.studies.hosts import (
    HostsCell,
    HostsRow,
    recipe_on_hosts,
    speed_columns,
    starts_of,
)
from largebatch.lab.studies.metrics import interval_line
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import Study, naming, recipe_of
from largebatch.report.pages import (
    Line,
    Page,
    Panel,
    Section,
    Table,
    columns_over,
    line_chart,
    series,
)

Place = Literal["one-host", "hosts"]
PLACES: tuple[Place, ...] = get_args(Place)
Kind = Literal["weak", "strong"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NOTE = (
    "Workers in one host, or each on its own host, which is a network namespace of one machine "
    "with a shaped link. Gradients take a time that is set and slept. Means over starts with "
    "Student's interval of 95 %."
)
_TABLE = (
    "The ideal is one worker times the number of workers; in weak scaling each has the same "
    "mini-batch, in strong scaling all share one batch. Late gradients took longer than their set "
    "time."
)


@dataclass(frozen=True, kw_only=True)
class ScalingCell(HostsCell):
    """A number of workers with a number of samples each, in one host or on hosts."""

    place: Place
    most: int
    """The most workers of the study."""

    def samples_of(self, kind: Kind, workers: int) -> int:
        """Return the samples of each worker in weak or strong scaling."""
        mini_batch = self.on_hosts.mini_batch
        return mini_batch if kind == "weak" else mini_batch * self.most // workers


def cells_of(study: Study, folder: Path) -> list[ScalingCell]:
    """Return the cells of a study whose file is in `folder`, each checked and each once.

    Raises RecipeError naming the cell that cannot be started.
    """
    assert study.scaling is not None
    cells: dict[str, ScalingCell] = {}
    most = max(study.scaling.workers)
    for name, entry in study.recipes.items():
        on_hosts = entry.on_hosts
        assert on_hosts is not None
        with naming(name):
            base = recipe_of(entry, folder)
        weak = on_hosts.mini_batch
        points = [(workers, weak) for workers in (1, *study.scaling.workers)]
        points += [(workers, weak * most // workers) for workers in (1, *study.scaling.workers)]
        for workers, samples in points:
            with naming(f"{name}/{workers}x{samples}"):
                recipe = recipe_on_hosts(base, on_hosts, workers=workers, samples=samples)
            for place in PLACES[:1] if workers == 1 else PLACES:
                cell = ScalingCell(
                    configuration=name, variant=f"{workers}x{samples}-{place}", recipe=recipe,
                    seeds=study.seeds, workers=workers, samples=samples,
                    workers_per_host=(workers,) if place == "one-host" else (1,) * workers,
                    megabits=study.scaling.megabits, on_hosts=on_hosts, place=place, most=most,
                )  # fmt: skip
                cells[cell.name] = cell
    return list(cells.values())


@dataclass(frozen=True)
class ScalingRow(HostsRow):
    """A cell as a case of weak or of strong scaling."""

    cell: ScalingCell
    kind: Kind

    @property
    def ideal(self) -> float | None:
        """Samples per second of one worker times the number of workers; None without one."""
        return self.cell.workers * fmean(self.throughputs_alone.values()) if self.alone else None


def rows_of(cells: Sequence[ScalingCell], records: Records) -> list[ScalingRow]:
    """Return the cells that have records, weak scaling first, by recipe and workers."""
    starts = {cell.name: starts_of(cell, records) for cell in cells}
    rows = []
    for kind in KINDS:
        for cell in sorted(cells, key=lambda cell: (cell.configuration, cell.workers)):
            if cell.samples == cell.samples_of(kind, cell.workers) and starts[cell.name]:
                one = cell.samples_of(kind, 1)
                alone = starts.get(f"{cell.configuration}/1x{one}-one-host", {})
                rows.append(ScalingRow(cell, starts[cell.name], alone, one, kind))
    return rows


def findings(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """Yield how hosts compare with one host."""
    places = {
        (row.kind, row.cell.configuration, row.cell.workers, row.cell.place): row.efficiency
        for row in rows
    }
    for (kind, recipe, workers, place), efficiency in places.items():
        inside = places.get((kind, recipe, workers, "one-host"))
        if place == "hosts" and inside and efficiency:
            yield (
                f"{recipe}, {kind}, {workers} workers: {inside.mean:.0f}% of the ideal in one "
                f"host, {efficiency.mean:.0f}% on hosts."
            )


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    rows = rows_of(cells_of(study, folder), records)
    looks = {place: series(number, place) for number, place in enumerate((*PLACES, "ideal"))}
    recipes = list(dict.fromkeys(row.cell.configuration for row in rows))
    charts = []
    for kind in KINDS:
        for recipe in recipes:
            own = [
                row for row in rows
                if (row.kind, row.cell.configuration) == (kind, recipe) and row.alone
            ]  # fmt: skip
            x, y = [row.cell.workers for row in own], [row.ideal or 0.0 for row in own]
            lines = [Line(series=looks["ideal"], x=x, y=y, points=False)]
            for place in PLACES:
                some = [row for row in own if row.cell.place == place]
                x, means = [row.cell.workers for row in some], [row.throughput for row in some]
                lines.append(interval_line(looks[place], x, means))
            panel = Panel(lines=lines, x="Workers", y="Samples/s", from_zero=True)
            charts.append(line_chart(f"{kind}-{recipe}", panel, title=f"{kind}, {recipe}"))
    column = columns_over(rows)
    columns = [
        column("Cell", lambda row: row.cell.name, None),
        column("Scaling", lambda row: row.kind, None),
        column("Ideal samples/s", lambda row: row.ideal, ",.1f"),
        *speed_columns(rows),
    ]
    shown = [looks[row.cell.place] for row in rows]
    return Page(
        title=study.name,
        subtitle=", ".join(recipes),
        findings=list(findings(rows)),
        note=_NOTE,
        legend=("Places", list(looks.values())),
        sections=[
            Section(
                title="Against the ideal",
                parts=[Table(name="cells", columns=columns, series=shown), *charts],
                notes=[_TABLE],
            )
        ],
        source="the records of a study",
    )
