"""Scaling: what more workers bring in one host and on hosts, weak and strong.

Dell EMC compare GPUs in one server with servers (C4140, 2019): images a second against an ideal of
as many times one GPU. Here workers are in one host, or each on its own host behind a link. In weak
scaling each has the same mini-batch, in strong scaling all share the batch that the most workers
have together; so the two meet there, in one cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from largebatch.lab.studies.doubts import Finding
from largebatch.lab.studies.hosts import (
    IDEAL,
    HostsCell,
    HostsRow,
    chart_of,
    doubts_about_rows,
    hosts_cell,
    slower_than_alone,
    starts_of,
    table_of,
)
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import Study
from largebatch.report.pages import Page, Section, series

INSIDE, HOSTS = "one-host", "hosts"

_NOTE = (
    "Workers in one host, or each on its own host, which is a network namespace with a shaped "
    "link. Means over starts with Student's interval of 95 %."
)
_TABLE = (
    "The ideal, an efficiency of 100 %, is one worker times the number of workers; in weak scaling "
    "each has the same mini-batch, in strong scaling all share one batch. Late gradients took "
    "longer than their set time."
)


def _points(study: Study) -> Iterator[tuple[str, str, int, int, str]]:
    """Yield kind, recipe, workers, samples of each and place; a worker alone before the others."""
    assert study.scaling is not None
    for kind in ("weak", "strong"):
        for name, entry in sorted(study.recipes.items()):
            assert entry.on_hosts is not None
            for workers in sorted({1, *study.scaling.workers}):
                samples = entry.on_hosts.mini_batch
                if kind == "strong":
                    samples = samples * max(study.scaling.workers) // workers
                for place in (INSIDE,) if workers == 1 else (INSIDE, HOSTS):
                    yield kind, name, workers, samples, place


def cells_of(study: Study, folder: Path) -> list[HostsCell]:
    """Return the cells of a study whose file is in `folder`, each checked and each once.

    Raises RecipeError naming the cell that cannot be started.
    """
    cells: dict[str, HostsCell] = {}
    for _, name, workers, samples, place in _points(study):
        cell = hosts_cell(
            study, folder, name, f"{workers}x{samples}-{place}", workers=workers, samples=samples,
            look=place, one_host=place == INSIDE,
        )  # fmt: skip
        cells[cell.name] = cell
    return list(cells.values())


def rows_of(study: Study, folder: Path, records: Records) -> list[HostsRow]:
    """Return the cells that have records, weak scaling first, by recipe and workers."""
    cells = {cell.name: cell for cell in cells_of(study, folder)}
    rows, alone = [], None
    for kind, name, workers, samples, place in _points(study):
        cell = cells[f"{name}/{workers}x{samples}-{place}"]
        row = HostsRow(cell=cell, starts=starts_of(cell, records), scaling=kind)
        alone = row if workers == 1 else alone
        rows.append(replace(row, alone=alone))
    return [row for row in rows if row.starts]


def findings(rows: Sequence[HostsRow]) -> Iterator[Finding]:
    """Yield how hosts compare with one host."""
    places = {
        (row.scaling, row.cell.configuration, row.cell.workers, row.cell.look): row for row in rows
    }
    for (kind, recipe, workers, place), row in places.items():
        inside = places.get((kind, recipe, workers, INSIDE))
        if place != HOSTS or inside is None:
            continue
        doubts = doubts_about_rows([inside, row], rows)
        text = ""
        if inside.efficiency is None or row.efficiency is None:
            doubts.append("no start of one worker alone of the same seed")
        else:
            text = (
                f"{inside.efficiency.with_ends('.0f', '%')} of the ideal in one host, "
                f"{row.efficiency.with_ends('.0f', '%')} on hosts"
            )
        yield Finding(about=f"{recipe}, {kind}, {workers} workers", text=text, doubts=doubts)
    yield from slower_than_alone(rows, "measured")


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    rows = rows_of(study, folder, records)
    looks = {place: series(number, place) for number, place in enumerate((INSIDE, HOSTS, IDEAL))}
    groups: dict[tuple[str | None, str], list[HostsRow]] = {}
    for row in rows:
        groups.setdefault((row.scaling, row.cell.configuration), []).append(row)
    charts = [chart_of(f"{kind}, {recipe}", own, looks) for (kind, recipe), own in groups.items()]
    table = table_of("cells", rows, looks)
    found = list(findings(rows))
    return Page(
        title=study.name,
        subtitle=", ".join(study.recipes),
        findings=list(map(str, found)),
        is_sound=not any(finding.doubts for finding in found),
        note=_NOTE,
        legend=("Places", list(looks.values())),
        sections=[Section(title="Against the ideal", parts=[table, *charts], notes=[_TABLE])],
        source="the records of a study",
    )
