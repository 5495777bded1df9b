"""Servers: how fast each layout of the weights is, measured and simulated, and what it sends.

Every layout makes the same update of equal mini-batches (hardsync). Only where the weights are
differs, and so who sends what to whom (Jaeger et al., DIDL 2018). More workers, other links and
other mini-batches are simulated, from the bytes of messages and the same times of gradients:
workers of a real start take turns on the cores of this machine.

Bytes of an update over the link of each host, in each direction, with lambda workers on a host each
and a model of M bytes, of which the k-th server has M_k:

    central server k, on its own host     lambda M_k
    worker of central servers             M
    worker with server k beside it        M - M_k + (lambda - 1) M_k
    worker of a ring                      2 M (lambda - 1) / lambda

A worker pushes its gradient to all servers, and pulls the weights from all; what goes to the server
on its own host crosses no link. (Ring: Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002.)
Servers hold whole tensors: if one tensor is most of the model, so is the part of its server.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

import numpy as np

from largebatch.distributed.environment import BackendName
from largebatch.lab.protocols.server import UpdateRule
from largebatch.lab.protocols.simulator import (
    SimulatedCluster,
    SimulatedLink,
    compute_times,
    expectation,
    simulate,
)
from largebatch.lab.studies.doubts import StudyFinding
from largebatch.lab.studies.hosts import (
    HostsCell,
    HostsRow,
    StartResult,
    chart_of,
    doubts_about_rows,
    hosts_cell,
    server_bytes,
    slower_than_alone,
    starts_of,
    table_of,
)
from largebatch.lab.studies.namespaces import payload_bandwidth
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import ALONE, Study
from largebatch.lab.studies.words import shapes_of
from largebatch.models import param_groups
from largebatch.recipe.protocols import Centralised
from largebatch.report.pages import Page, PageSection, columns_over, series
from largebatch.report.seeds import ratio

UPDATES = 20
"""Updates of a simulation."""

REPEATS = 5
"""Simulations of each point, with other times of gradients."""

NEAR = 0.05
"""How far counters may be from the formulas, as a fraction of these."""

LEVEL = 1.1
"""Ratio of speeds up to which two layouts count as equally fast."""

Sweep = Literal["workers", "megabits", "samples"]
"""What differs between the points of a simulation."""

SWEEPS: Mapping[Sweep, tuple[str, str]] = {
    "workers": ("Workers", "workers"),
    "megabits": ("Link, Mbit/s", "Mbit/s"),
    "samples": ("Samples each", "samples each"),
}
"""Titles of the sweeps' axes, and units of their values."""

Paper = Literal["faster", "no difference"]

_NOTE = (
    "Every layout makes the same update of the same mini-batches; only where the weights are "
    "differs. Hosts are network namespaces with a shaped link each. Means over starts with "
    "Student's interval of 95 %."
)
_TABLE = (
    "Efficiency is the speed-up against one worker over the workers, without servers on their own "
    "hosts. Links carry payload in both directions together, by the counters of their interfaces "
    "without 66 bytes of headers in each packet; the busiest link is that of the formulas. With "
    "many late gradients the machine was too busy to judge."
)
_SIMULATED = (
    "Simulated from the bytes of the formulas, times of gradients, and what an update of one worker"
    " alone takes besides its gradient, if undisturbed starts show it. Messages share links at fair"
    " rates. Servers update in no time. Links and mini-batches differ at the largest number of "
    "workers that is started."
)


def cells_of(study: Study, folder: Path, numbers: Sequence[int] | None = None) -> list[HostsCell]:
    """Return the cells of a study whose file is in `folder`, each checked.

    They are one worker alone, and every layout on these `numbers` of workers; None: those of the
    study. Layouts on Horovod are left out where it is not installed. Raises RecipeError naming the
    cell that cannot be started.
    """
    cells = []
    for name, entry in study.recipes.items():
        assert entry.on_hosts is not None
        cells += _cells(study, folder, name, numbers or entry.on_hosts.workers)
    return cells


def _cells(study: Study, folder: Path, name: str, numbers: Sequence[int]) -> list[HostsCell]:
    """Return one worker alone, and every layout of a recipe on these numbers of workers."""
    assert study.servers is not None
    entry = study.recipes[name].on_hosts
    assert entry is not None
    cells = [
        hosts_cell(
            study, folder, name, f"{ALONE}-1", workers=1, samples=entry.mini_batch, look=ALONE
        )
    ]
    for layout, where in study.servers.layouts.items():
        if where == "horovod" and find_spec("horovod") is None:
            continue
        for workers in numbers:
            if workers == 1:
                continue
            backend: BackendName = "torch"
            protocol = None
            if isinstance(where, Centralised):
                protocol = {"learners": workers, "servers": where.model_dump()}
            elif where == "decentralised":
                protocol = {"learners": workers, "servers": where}
            else:
                backend = where
            cell = hosts_cell(
                study, folder, name, f"{layout}-{workers}", workers=workers,
                samples=entry.mini_batch, look=layout, backend=backend,
                protocol=protocol and {"kind": "hardsync", **protocol},
            )  # fmt: skip
            cells.append(cell)
    return cells


def servers_of(cell: HostsCell) -> int | None:
    """Return the number of servers with their own hosts; 0 beside workers, None without servers."""
    return None if cell.recipe.protocol is None else cell.recipe.protocol.dedicated


def rows_of(
    cells: Sequence[HostsCell], starts: Mapping[str, Mapping[int, StartResult]]
) -> list[HostsRow]:
    """Return the cells that have starts, given by the names of cells and by seed."""
    rows = [HostsRow(cell=cell, starts=starts[cell.name]) for cell in cells]
    alone = {row.cell.configuration: row for row in rows if row.cell.look == ALONE}
    return [replace(row, alone=alone[row.cell.configuration]) for row in rows if row.starts]


def link_bytes(cell: HostsCell, shares: Sequence[int]) -> list[float]:
    """Return the bytes of an update over the link of each host, in each direction.

    `shares` are the bytes on each server; without servers the bytes of all weights.
    """
    workers = cell.workers
    whole = sum(shares)
    dedicated = servers_of(cell)
    if dedicated is None:
        # A ring all-reduce sends 2 (n - 1) / n of the bytes over each link.
        return [2 * whole * (workers - 1) / workers] * workers
    if dedicated:
        # A worker pulls all weights and pushes a whole gradient; a server has one share for each
        # worker.
        return [float(whole)] * workers + [float(workers * share) for share in shares]
    # A worker reaches its own share without the link, and serves the others.
    return [float(whole - share + (workers - 1) * share) for share in shares]


class Links:
    """The bytes of an update over the links of a row: by the formulas, and by the counters."""

    def __init__(self, row: HostsRow) -> None:
        starts = list(row.starts.values())
        self.model_bytes = sum(starts[0].shares)
        self.formula = link_bytes(row.cell, starts[0].shares)
        """In each direction, by host."""

        records = [start.record for start in starts if start.record is not None]
        received = zip(*(record.received for record in records), strict=True)
        sent = zip(*(record.sent for record in records), strict=True)
        self.received = [fmean(of_starts) for of_starts in received]
        self.sent = [fmean(of_starts) for of_starts in sent]

    @property
    def busiest(self) -> tuple[float, float]:
        """Bytes in both directions by the counters and by the formula; NaN without a link."""
        if not self.sent or not max(self.formula):
            return math.nan, math.nan
        host = max(range(len(self.formula)), key=lambda host: self.formula[host])
        return self.received[host] + self.sent[host], 2 * self.formula[host]

    @property
    def deviation(self) -> tuple[float, float] | None:
        """The largest |counter / formula - 1| of all links and directions, and its bytes.

        None without links.
        """
        deviations = []
        for direction in (self.received, self.sent):
            for counted, expected in zip(direction, self.formula, strict=bool(direction)):
                if expected:
                    off = abs(counted - expected)
                    deviations.append((off / expected, off))
        return max(deviations, default=None)


def simulations(
    study: Study, folder: Path, measured: Sequence[HostsRow]
) -> dict[Sweep, list[HostsRow]]:
    """Return the simulated rows of a study whose file is in `folder`, by what is swept.

    A ring's workers wait for the slowest gradient, and then for the bytes of a ring on each link.
    An update also takes what that of one worker alone takes besides its gradient, if `measured`
    has it without doubts.
    """
    assert study.servers is not None
    rows: dict[Sweep, list[HostsRow]] = {sweep: [] for sweep in get_args(Sweep)}
    section = study.servers.simulated
    if section is None:
        return rows
    for name, entry in study.recipes.items():
        assert entry.on_hosts is not None
        numbers = [workers for workers in section.workers if workers > 1]
        several = _cells(study, folder, name, numbers) if section.workers else []
        most = _cells(study, folder, name, [max(entry.on_hosts.workers)])
        recipe = most[0].recipe
        # In the order of the optimizer's groups, by which a run divides tensors over servers.
        groups = param_groups(shapes_of(recipe), weight_decay=0.0)
        sizes = [weight.nbytes for group in groups for weight in group["params"]]
        points: list[tuple[Sweep, list[HostsCell]]] = [("workers", several)]
        points += [
            ("megabits", [replace(cell, megabits=megabits) for cell in most])
            for megabits in section.megabits
        ]
        for factor in section.mini_batches:
            samples = max(1, round(factor * entry.on_hosts.mini_batch))
            points.append(("samples", [replace(cell, samples=samples) for cell in most]))
        overhead = _overhead(measured, name)
        for sweep, cells in points:
            rings = [cell for cell in cells if cell.backend != "horovod"]  # else there were two
            starts = {
                cell.name: _simulate(cell, server_bytes(sizes, cell.recipe.protocol), overhead)
                for cell in rings
            }
            rows[sweep] += rows_of(rings, starts)
    return rows


def _overhead(measured: Sequence[HostsRow], recipe: str) -> float:
    """Return what an update of one worker alone takes besides its gradient.

    It is 0 if that was not measured, or has doubts: a simulation has none and must not get any.
    """
    for row in measured:
        compute = row.cell.on_hosts.compute
        is_alone = row.cell.configuration == recipe and row.cell.look == ALONE
        if is_alone and compute is not None and not doubts_about_rows([row], measured):
            gradient = compute.overhead + compute.sample * row.cell.samples
            return max(0.0, row.seconds.mean - gradient * expectation(compute.factor))
    return 0.0


def _simulate(cell: HostsCell, shares: Sequence[int], overhead: float) -> dict[int, StartResult]:
    """Return the simulations of a cell by their seeds; `shares` are bytes on each server."""
    compute = cell.on_hosts.compute
    assert compute is not None
    bandwidth = payload_bandwidth(cell.megabits)
    gradient = compute.overhead + compute.sample * cell.samples + overhead
    cluster = SimulatedCluster(
        learners=cell.workers,
        compute=compute.factor,
        slow=dict.fromkeys(range(cell.workers), gradient),
        link=SimulatedLink(bandwidth=bandwidth),
        shares=tuple(map(float, shares)),
        sharing="fair",
    )
    starts = {}
    for seed in range(1, REPEATS + 1):
        servers = servers_of(cell)
        if servers is None:
            draws = [
                compute_times(compute.factor, seed=seed, learner=n, factor=gradient)
                for n in range(cell.workers)
            ]
            # Every update of a ring waits for the slowest gradient, and then sends.
            sent = link_bytes(cell, shares)[0] / bandwidth
            draws_of_updates = islice(zip(*draws, strict=True), UPDATES)
            seconds = [max(draws_of_update) + sent for draws_of_update in draws_of_updates]
        else:
            rule = UpdateRule.hardsync(cell.workers)
            ends = simulate(rule, cluster, servers=servers or None, updates=UPDATES, seed=seed).ends
            seconds = np.diff(ends, prepend=0.0).tolist()
        starts[seed] = StartResult(seconds=seconds, shares=shares)
    return starts


def verdict(paper: Paper | None, low: float, high: float) -> str:
    """Return how a range of ratios fits the paper: servers beside workers over a central one.

    Jaeger et al. found servers beside the workers faster for their smaller model, and no
    significant difference for their larger one.

    >>> verdict("faster", 1.2, 1.5)
    "this confirms the paper's `faster`"
    >>> verdict("no difference", 0.95, 1.3)
    "this does not decide the paper's `no difference` (equal: up to 1.1 times)"
    """
    if paper is None:
        return "the paper does not have this model"
    if paper == "faster":
        judged = "confirms" if low > 1 else "refutes" if high < 1 else "does not decide"
        return f"this {judged} the paper's `faster`"
    equal = low >= 1 / LEVEL and high <= LEVEL
    judged = "confirms" if equal else "refutes" if low > 1 or high < 1 else "does not decide"
    return f"this {judged} the paper's `no difference` (equal: up to {LEVEL:g} times)"


def pairs_of(rows: Sequence[HostsRow]) -> Iterator[tuple[HostsRow, HostsRow]]:
    """Yield one central server and servers beside the workers, where all else is equal."""

    def point(row: HostsRow) -> tuple[object, ...]:
        return row.cell.configuration, row.cell.workers, row.cell.megabits, row.cell.samples

    central = {point(row): row for row in rows if servers_of(row.cell) == 1}
    for row in rows:
        other = central.get(point(row))
        if servers_of(row.cell) == 0 and other is not None:
            yield other, row


def findings(rows: Sequence[HostsRow]) -> Iterator[StudyFinding]:
    """Yield how measured layouts compare, what is slower than one worker, and the counters.

    The largest number of workers of a recipe judges the paper; smaller ones are only compared.
    """
    for central, beside in pairs_of(rows):
        cell = beside.cell
        doubts = doubts_about_rows([central, beside], rows)
        times = ratio(beside.throughputs, central.throughputs)
        text = ""
        if times is None:
            doubts.append("no two starts of one seed")
        else:
            shown = times.with_ends(".2f", " times")
            text = f"{cell.look} is {shown} as fast as {central.cell.look}"
            if cell.workers == max(cell.on_hosts.workers):
                text += f"; {verdict(cell.on_hosts.paper, times.low, times.high)}"
        yield StudyFinding(
            about=f"{cell.configuration} on {cell.workers} workers, measured, {cell.look} against "
            f"{central.cell.look}",
            text=text,
            doubts=doubts,
        )
    yield from slower_than_alone(rows, "measured")
    deviations = {row.cell.name: deviation for row in rows if (deviation := Links(row).deviation)}
    if deviations:
        worst = max(deviations, key=lambda name: deviations[name])
        share, off = deviations[worst]
        words = "within" if share <= NEAR else "NOT within"
        counted = [row for row in rows if row.cell.name in deviations]
        yield StudyFinding(
            about="The counters of all links",
            text=f"{words} {NEAR:.0%} of the formulas: at most {share:.1%} off, which is "
            f"{off:,.0f} bytes, on {worst}; the formulas have no requests and answers",
            doubts=doubts_about_rows(counted, rows, of_time=False),
        )


def simulated_findings(
    simulated: Mapping[Sweep, Sequence[HostsRow]], measured: Sequence[HostsRow]
) -> Iterator[StudyFinding]:
    """Yield how simulated layouts compare over each sweep, and how far simulations are off."""
    recipes = dict.fromkeys(row.cell.configuration for rows in simulated.values() for row in rows)
    for recipe in recipes:
        for sweep, (_, unit) in SWEEPS.items():
            rows = [row for row in simulated[sweep] if row.cell.configuration == recipe]
            times = {}
            for central, beside in pairs_of(rows):
                faster = ratio(beside.throughputs, central.throughputs)
                assert faster is not None  # both have the same seeds
                times[getattr(beside.cell, sweep)] = faster.mean
            if not times:
                continue
            low, high = min(times.values()), max(times.values())
            equal = [f"{at:,g}" for at, mean in times.items() if 1 / LEVEL <= mean <= LEVEL]
            text = (
                f"servers beside the workers are {low:.2f} to {high:.2f} times as fast as one "
                f"central server at {min(times):,g} to {max(times):,g} {unit}"
            )
            if equal:
                text += f", equally fast at {', '.join(equal)}"
            text += f"; {verdict(rows[0].cell.on_hosts.paper, low, high)}"
            yield StudyFinding(about=f"{recipe}, simulated", text=text)
        rows = [row for row in simulated["megabits"] if row.cell.configuration == recipe]
        pays = pays_from(rows)
        if pays:
            listed = ", ".join(f"{layout} {megabits:,g}" for layout, megabits in pays.items())
            text = f"faster than one worker from these Mbit/s on: {listed}"
            yield StudyFinding(about=f"{recipe}, simulated", text=text)
    yield from slower_than_alone(simulated["workers"], "simulated")
    seconds = {row.cell.name: row.seconds.mean for row in simulated["workers"]}
    started = [row for row in measured if row.cell.workers > 1 and row.cell.name in seconds]
    if started:
        ratios = [seconds[row.cell.name] / row.seconds.mean for row in started]
        yield StudyFinding(
            about="The simulated time of an update",
            text=f"{min(ratios):.2f} to {max(ratios):.2f} times the measured one over "
            f"{len(started)} cells of several workers",
            doubts=doubts_about_rows(started, measured),
        )


def pays_from(rows: Sequence[HostsRow]) -> dict[str, float]:
    """Return by layout the lowest rate of links from which on it is faster than one worker."""
    lowest: dict[str, float] = {}
    ended = set()
    # From fast links to slow ones, as long as the layout is faster.
    for row in sorted(rows, key=lambda row: row.cell.megabits, reverse=True):
        layout = row.cell.look
        if row.cell.workers == 1 or layout in ended or row.speed_up is None:
            continue
        if row.speed_up.low > 1:
            lowest[layout] = row.cell.megabits
        else:  # slower here, so a lower rate does not count even if it were faster
            ended.add(layout)
    return lowest


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    cells = cells_of(study, folder)
    rows = rows_of(cells, {cell.name: starts_of(cell, records) for cell in cells})
    return draw(study.name, rows, simulations(study, folder, rows))


def draw(
    name: str, rows: Sequence[HostsRow], simulated: Mapping[Sweep, Sequence[HostsRow]]
) -> Page:
    """Return the page of measured rows, and of simulated ones by what is swept."""
    all_rows = [*rows, *(row for swept in simulated.values() for row in swept)]
    layouts = dict.fromkeys(row.cell.look for row in all_rows)
    looks = {layout: series(place, layout) for place, layout in enumerate(layouts)}
    recipes = list(dict.fromkeys(row.cell.configuration for row in all_rows))
    sections = []
    if rows:
        column = columns_over([Links(row) for row in rows])

        def percent(links: Links) -> float | None:
            return None if links.deviation is None else 100 * links.deviation[0]

        columns = [
            column("Model, MB", lambda links: 1e-6 * links.model_bytes, ",.2f"),
            column("Busiest link, MB", lambda links: 1e-6 * links.busiest[0], ",.3f"),
            column("Formula, MB", lambda links: 1e-6 * links.busiest[1], ",.3f"),
            column("Largest deviation, %", percent, ".2f"),
        ]
        table = table_of("cells", rows, looks, columns)
        sections.append(PageSection(title="Layouts", parts=[table], notes=[_TABLE]))
    for recipe in recipes:
        charts = []
        for sweep, (axis, _) in SWEEPS.items():
            measured = rows if sweep == "workers" else []
            measured = [row for row in measured if row.cell.configuration == recipe]
            swept = [row for row in simulated[sweep] if row.cell.configuration == recipe]
            if measured or swept:
                charts.append(
                    chart_of(recipe, measured, looks, simulated=swept, by=sweep, axis=axis)
                )
        sections.append(PageSection(title=f"Speed-up: {recipe}", parts=charts))
    points = [row for swept in simulated.values() for row in swept]
    if points:
        table = table_of("simulated", points, looks)
        sections.append(PageSection(title="Simulated", parts=[table], notes=[_SIMULATED]))
    conclusions = [*findings(rows), *simulated_findings(simulated, rows)]
    deviations = [Links(row).deviation for row in rows]
    is_near = all(deviation is None or deviation[0] <= NEAR for deviation in deviations)
    return Page(
        title=name,
        subtitle=", ".join(recipes),
        findings=list(map(str, conclusions)),
        is_sound=is_near and not any(finding.doubts for finding in conclusions),
        note=_NOTE,
        legend=("Layouts", list(looks.values())),
        sections=sections,
        source="the records of a study",
    )
