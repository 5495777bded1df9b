"""Scaling: what more workers bring in one host and on hosts, weak and strong.

Dell EMC compare GPUs in one server with servers (C4140, 2019): images a second against an ideal of
as many times one GPU. Here workers are in one host, or each on its own host behind a link. In weak
scaling each has the same mini-batch, in strong scaling all share the batch that the most workers
have together; so the two meet there, in one cell.

Dell EMC saw that a change of the learning rate "is not reflected immediately" in every processor of
several servers (section 7.4.2). So the rate that every worker applies in every update is recorded
and compared, bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from largebatch.lab.planner.prediction import Load, step_seconds
from largebatch.lab.planner.prediction import Machine as Planned
from largebatch.lab.protocols.simulator import expectation
from largebatch.lab.studies.doubts import StudyFinding
from largebatch.lab.studies.hosts import (
    IDEAL,
    HostsCell,
    HostsRow,
    StartRecord,
    chart_of,
    doubts_about_rows,
    hosts_cell,
    slower_than_alone,
    starts_of,
    table_of,
)
from largebatch.lab.studies.namespaces import payload_bandwidth
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import Inside, Study
from largebatch.report.pages import Page, PageSection, columns_over, series

INSIDE, HOSTS = "one-host", "hosts"

_NOTE = (
    "Workers in one host, or each on its own host, which is a network namespace with a shaped "
    "link. Means over starts with Student's interval of 95 %."
)
_TABLE = (
    "The ideal, an efficiency of 100 %, is one worker times the number of workers; in weak scaling "
    "each has the same mini-batch, in strong scaling all share one batch. Late gradients took "
    "longer than their set time. Learning rates are those that each worker's optimizer applied, "
    "compared bit for bit. The planner's time is that of workers with a core each."
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
                    # Strong scaling: all share the batch that the most workers have in weak
                    # scaling, so both kinds have the same cells there.
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
    rows = []
    alone = None
    for kind, name, workers, samples, place in _points(study):
        cell = cells[f"{name}/{workers}x{samples}-{place}"]
        row = HostsRow(cell=cell, starts=starts_of(cell, records), scaling=kind)
        alone = row if workers == 1 else alone
        rows.append(replace(row, alone=alone))
    return [row for row in rows if row.starts]


def planned_seconds(row: HostsRow, inside: Inside | None) -> float | None:
    """Return the planner's seconds of an update; None for one worker, and without its figures.

    What the update of one worker alone takes besides its gradient is added. Gradients are set times
    that are slept before backward, so backward hides no exchange.
    """
    cell = row.cell
    compute = cell.on_hosts.compute
    if inside is None or compute is None or row.alone is None or cell.workers == 1:
        return None
    factor = expectation(compute.factor)
    alone = row.alone
    gradient = factor * (compute.overhead + compute.sample * alone.cell.samples)
    machine = Planned(
        seconds_per_image=compute.sample * factor,
        launch=compute.overhead * factor,
        update=max(0.0, alone.seconds.mean - gradient),
        link=inside.gigabytes_per_second * 1e9,
        network=payload_bandwidth(cell.megabits),
        workers_per_node=max(cell.workers_per_host),
        latency=inside.seconds,
    )
    load = Load(
        workers=cell.workers,
        device_batch=cell.samples,
        gradient_bytes=float(sum(next(iter(row.starts.values())).shares)),
        overlap=False,
    )
    return sum(step_seconds(machine, load).values())


def unequal_rates(start: StartRecord) -> str:
    """Return where the learning rates of workers first differ; empty if they are equal.

    Updates are counted from 0. A rate that arrives late on one worker is one that differs.
    """
    if not start.rates:
        return ""
    first, *others = start.rates
    for worker, rates in enumerate(others, start=1):
        if len(rates) != len(first):
            return f"worker {worker} made {len(rates)} updates, and worker 0 {len(first)}"
        for update, (own, other) in enumerate(zip(first, rates, strict=True)):
            if own != other:
                shown = [", ".join(map(_shown_rate, bits.split())) for bits in (own, other)]
                return f"in update {update} worker 0 has {shown[0]} and worker {worker} {shown[1]}"
    return ""


def _shown_rate(bits: str) -> str:
    return f"{float.fromhex(bits)!r} ({bits})"


def rate_finding(rows: Sequence[HostsRow]) -> StudyFinding | None:
    """Return where learning rates differ between workers, or in how many updates they are equal.

    None without a start of several workers. A difference is a fault however often it occurs, and so
    has no doubt.
    """
    several = {row.cell.name: row for row in rows if row.cell.workers > 1}
    records = {
        f"{name} seed {record.seed}": record
        for name, row in several.items()
        for record in start_records(row)
        if len(record.rates) > 1
    }
    if not records:
        return None
    about = "Learning rates of the workers"
    differences = []
    for name, record in records.items():
        unequal = unequal_rates(record)
        if unequal:
            differences.append(f"{name}: {unequal}")
    if differences:
        return StudyFinding(about=about, text=f"THEY DIFFER: {'; '.join(differences)}")
    updates = sum(len(record.rates[0]) for record in records.values())
    changes = sum(len(set(record.rates[0])) > 1 for record in records.values())
    return StudyFinding(
        about=about,
        text=f"equal, bit for bit, in each of {updates:,} updates of {len(records)} starts of "
        f"several workers; they change in {changes} of these starts",
        doubts=doubts_about_rows(list(several.values()), rows, of_time=False),
    )


def start_records(row: HostsRow) -> list[StartRecord]:
    """Return the records of the starts of a row."""
    return [start.record for start in row.starts.values() if start.record is not None]


def findings(rows: Sequence[HostsRow], inside: Inside | None = None) -> Iterator[StudyFinding]:
    """Yield how hosts compare with one host, the workers' rates, and how far the planner is off."""
    places = {
        (row.scaling, row.cell.configuration, row.cell.workers, row.cell.look): row for row in rows
    }
    for (kind, recipe, workers, place), row in places.items():
        in_one_host = places.get((kind, recipe, workers, INSIDE))
        if place != HOSTS or in_one_host is None:
            continue
        doubts = doubts_about_rows([in_one_host, row], rows)
        text = ""
        if in_one_host.efficiency is None or row.efficiency is None:
            doubts.append("no start of one worker alone of the same seed")
        else:
            text = (
                f"{in_one_host.efficiency.with_ends('.0f', '%')} of the ideal in one host, "
                f"{row.efficiency.with_ends('.0f', '%')} on hosts"
            )
        yield StudyFinding(about=f"{recipe}, {kind}, {workers} workers", text=text, doubts=doubts)
    yield from slower_than_alone(rows, "measured")
    rates = rate_finding(rows)
    if rates is not None:
        yield rates
    planned = {
        row.cell.name: seconds / row.seconds.mean
        for row in rows
        if (seconds := planned_seconds(row, inside)) is not None
    }
    if planned:
        yield StudyFinding(
            about="The planner's time of an update",
            text=f"{min(planned.values()):.2f} to {max(planned.values()):.2f} times the measured "
            f"one over {len(planned)} cells of several workers",
            doubts=doubts_about_rows([row for row in rows if row.cell.name in planned], rows),
        )


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    assert study.scaling is not None
    inside = study.scaling.inside
    rows = rows_of(study, folder, records)
    looks = {place: series(number, place) for number, place in enumerate((INSIDE, HOSTS, IDEAL))}
    groups: dict[tuple[str | None, str], list[HostsRow]] = {}
    for row in rows:
        groups.setdefault((row.scaling, row.cell.configuration), []).append(row)
    charts = [chart_of(f"{kind}, {recipe}", own, looks) for (kind, recipe), own in groups.items()]
    column = columns_over(rows)

    def rates(row: HostsRow) -> str | None:
        records = [record for record in start_records(row) if len(record.rates) > 1]
        if not records:
            return None
        return "differ" if any(map(unequal_rates, records)) else "equal"

    columns = [
        column("The planner, s", lambda row: planned_seconds(row, inside), ",.4f"),
        column("Learning rates", rates, None),
    ]
    table = table_of("cells", rows, looks, columns)
    conclusions = list(findings(rows, inside))
    equal = not any(unequal_rates(record) for row in rows for record in start_records(row))
    return Page(
        title=study.name,
        subtitle=", ".join(study.recipes),
        findings=list(map(str, conclusions)),
        is_sound=equal and not any(finding.doubts for finding in conclusions),
        note=_NOTE,
        legend=("Places", list(looks.values())),
        sections=[PageSection(title="Against the ideal", parts=[table, *charts], notes=[_TABLE])],
        source="the records of a study",
    )
