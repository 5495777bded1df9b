"""Servers: how fast each layout of the weights is, on real workers and simulated.

Every layout makes the same update of equal mini-batches (hardsync). Only where the weights are
differs, and so who sends what to whom (Jaeger et al., DIDL 2018). More workers are simulated, from
the bytes of messages and the same times of gradients: workers of a real start take turns on the
cores of this machine.

A worker pushes its gradient to all servers, and pulls the weights from all; what goes to the server
on its own host crosses no link. In a ring each of lambda workers sends 2 M (lambda - 1) / lambda of
the M bytes of a model (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). Servers hold whole
tensors: if one tensor is most of the model, so is the part of its server.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from largebatch.lab.protocols.cluster import Cluster, Link, compute_times, expectation
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.server import server_bytes
from largebatch.lab.protocols.simulator import simulate
from largebatch.lab.studies.hosts import (
    HostsCell,
    HostsRow,
    Start,
    recipe_on_hosts,
    speed_columns,
    starts_of,
)
from largebatch.lab.studies.metrics import interval_line, ratio
from largebatch.lab.studies.namespaces import payload_bandwidth
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import ALONE, Study, naming, recipe_of
from largebatch.models import param_groups
from largebatch.models.of_recipe import model_without_memory
from largebatch.recipe.protocols import Centralised
from largebatch.report.pages import (
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

UPDATES, REPEATS = 20, 5
"""Updates of a simulation, and simulations of each point with other times of gradients."""

_NOTE = (
    "Every layout makes the same update of the same mini-batches; only where the weights are "
    "differs. Hosts are network namespaces of one machine with a shaped link each. Means over "
    "starts with Student's interval of 95 %."
)
_TABLE = (
    "Speed-up is against one worker alone, and efficiency is that over the workers: servers on "
    "their own hosts are not counted. Late gradients took longer than their set time: with many of "
    "them the machine was too busy to judge by it."
)
_SIMULATED = (
    "Simulated from the bytes of messages, the times of gradients, and what an update of one "
    "worker alone takes besides its gradient; messages share links at fair rates. Servers update "
    "in no time."
)


@dataclass(frozen=True, kw_only=True)
class ServersCell(HostsCell):
    """One recipe with one layout on a number of workers."""

    layout: str
    """Name of the layout in the study."""

    @property
    def servers(self) -> int | None:
        """Number of servers with hosts of their own; 0 beside the workers, None without servers."""
        return None if self.recipe.protocol is None else self.recipe.protocol.dedicated


def cells_of(study: Study, folder: Path) -> list[ServersCell]:
    """Return the cells of a study whose file is in `folder`, each checked.

    Raises RecipeError naming the cell that cannot be started.
    """
    return [cell for name in study.recipes for cell in _cells(study, folder, name)]


def _cells(
    study: Study, folder: Path, name: str, numbers: Sequence[int] | None = None
) -> list[ServersCell]:
    """Return one worker alone, and every layout on these numbers of workers or on its own."""
    entry, servers = study.recipes[name], study.servers
    on_hosts = entry.on_hosts
    assert on_hosts is not None
    assert servers is not None
    with naming(name):
        base = recipe_of(entry, folder)
    points = [(ALONE, "torch", 1)] + [
        (layout, where, workers)
        for layout, where in servers.layouts.items()
        for workers in numbers or on_hosts.workers
        if workers > 1
    ]
    cells = []
    for layout, where, workers in points:
        protocol = None
        if where != "torch":
            holders = where.model_dump() if isinstance(where, Centralised) else where
            protocol = {"kind": "hardsync", "learners": workers, "servers": holders}
        with naming(f"{name}/{layout}-{workers}"):
            recipe = recipe_on_hosts(
                base, on_hosts, workers=workers, samples=on_hosts.mini_batch, protocol=protocol
            )  # fmt: skip
        hosts = workers + (recipe.protocol.dedicated if recipe.protocol else 0)
        cells.append(
            ServersCell(
                configuration=name,
                variant=f"{layout}-{workers}",
                recipe=recipe,
                seeds=study.seeds,
                workers=workers,
                samples=on_hosts.mini_batch,
                on_hosts=on_hosts,
                layout=layout,
                workers_per_host=(1,) * hosts,
                megabits=servers.megabits,
            )
        )
    return cells


@dataclass(frozen=True)
class ServersRow(HostsRow):
    """A cell with its starts."""

    cell: ServersCell


def rows_of(cells: Sequence[ServersCell], records: Records) -> list[ServersRow]:
    """Return the cells that have records, given by cell and run."""
    starts = {cell.name: starts_of(cell, records) for cell in cells}
    return [
        ServersRow(
            cell, starts[cell.name], starts.get(f"{cell.configuration}/{ALONE}-1", {}), cell.samples
        )
        for cell in cells
        if starts[cell.name]
    ]


def simulations(study: Study, folder: Path, measured: Sequence[ServersRow]) -> list[ServersRow]:
    """Return the simulated rows of a study whose file is in `folder`.

    A ring's workers wait for the slowest gradient, and then for the bytes of a ring on each link.
    An update also takes what that of one worker alone takes besides its gradient, if `measured`
    has it.
    """
    rows = []
    assert study.servers is not None
    for name in study.recipes if study.servers.simulated else ():
        cells = _cells(study, folder, name, study.servers.simulated)
        recipe = cells[0].recipe
        model = model_without_memory(recipe.model, classes=recipe.data.classes)
        groups = param_groups(model, weight_decay=0.0)
        weights = [weight.detach() for group in groups for weight in group["params"]]
        overhead = 0.0
        for row in measured:
            compute = row.cell.on_hosts.compute
            if row.cell.name == cells[0].name and compute is not None:
                gradient = compute.overhead + compute.sample * row.cell.samples
                overhead = max(0.0, row.seconds.mean - gradient * expectation(compute.factor))
        alone: dict[int, Start] = {}
        for cell in cells:
            protocol = cell.recipe.protocol
            shares = server_bytes(weights, protocol.num_servers if protocol else 1)
            own = _simulate(cell, shares, overhead)
            alone = alone or own  # one worker comes first
            rows.append(ServersRow(cell, own, alone, cell.samples))
    return rows


def _simulate(cell: ServersCell, shares: Sequence[int], overhead: float) -> dict[int, Start]:
    """Return the simulations of a cell by their seeds; `shares` are bytes on each server."""
    compute = cell.on_hosts.compute
    assert compute is not None
    bandwidth = payload_bandwidth(cell.megabits)
    gradient = compute.overhead + compute.sample * cell.samples + overhead
    cluster = Cluster(
        learners=cell.workers,
        compute=compute.factor,
        slow=dict.fromkeys(range(cell.workers), gradient),
        link=Link(bandwidth=bandwidth),
        shares=tuple(map(float, shares)),
        sharing="fair",
    )
    found = {}
    for seed in range(1, REPEATS + 1):
        if cell.servers is None:
            draws = [
                compute_times(compute.factor, seed=seed, learner=n, factor=gradient)
                for n in range(cell.workers)
            ]
            sent = 2 * sum(shares) * (cell.workers - 1) / cell.workers / bandwidth
            every = islice(zip(*draws, strict=True), UPDATES)
            seconds = [max(each) + sent for each in every]
        else:
            rule, servers = Rule.hardsync(cell.workers), cell.servers or None
            ends = simulate(rule, cluster, servers=servers, updates=UPDATES, seed=seed).ends
            seconds = np.diff(ends, prepend=0.0).tolist()
        found[seed] = Start(seconds=seconds)
    return found


def findings(rows: Sequence[ServersRow], how: str) -> Iterator[str]:
    """Yield how servers beside the workers compare with a central one, and what does not pay."""
    for row in rows:
        for other in rows:
            case = row.cell.configuration, row.cell.workers
            pair = other.cell.servers == 0 and row.cell.servers == 1
            times = ratio(other.throughputs, row.throughputs)
            if pair and times and case == (other.cell.configuration, other.cell.workers):
                yield (
                    f"{case[0]} on {case[1]} workers, {how}: {other.cell.layout} is "
                    f"{times.with_ends('.2f', ' times')} as fast as {row.cell.layout}."
                )
    slow = [
        f"{row.cell.name} ({row.speed_up.mean:.2f})"
        for row in rows
        if row.cell.workers > 1 and row.speed_up and round(row.speed_up.mean, 2) < 1
    ]
    if slow:
        yield f"SLOWER THAN ONE WORKER, {how}: {', '.join(slow)}."


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    rows = rows_of(cells_of(study, folder), records)
    return draw(study.name, rows, simulations(study, folder, rows))


def draw(name: str, rows: Sequence[ServersRow], simulated: Sequence[ServersRow]) -> Page:
    """Return the page of measured and of simulated rows."""
    both = [*rows, *simulated]
    layouts = dict.fromkeys(row.cell.layout for row in both)
    looks = {layout: series(place, layout) for place, layout in enumerate(layouts)}
    recipes = list(dict.fromkeys(row.cell.configuration for row in both))
    charts = []
    for recipe in recipes:
        lines = []
        for some, is_simulated in ((simulated, True), (rows, False)):
            own = [row for row in some if row.cell.configuration == recipe and row.speed_up]
            for layout in layouts:
                line = [row for row in own if row.cell.layout in {layout, ALONE}]
                line.sort(key=lambda row: row.cell.workers)
                means = [row.speed_up for row in line if row.speed_up]
                x = [row.cell.workers for row in line]
                if is_simulated:
                    y = [mean.mean for mean in means]
                    lines.append(Line(series=looks[layout], x=x, y=y, points=False))
                else:
                    lines.append(interval_line(looks[layout], x, means, line=not simulated))
        panel = Panel(lines=lines, x="Workers", y="Speed-up", from_zero=True)
        caption = "Points are measured, lines simulated." if simulated else ""
        charts.append(
            line_chart(f"speed-up-{recipe}", panel, title=f"Speed-up: {recipe}", caption=caption)
        )
    tables = [("Layouts", "cells", rows, _TABLE), ("Simulated", "simulated", simulated, _SIMULATED)]
    return Page(
        title=name,
        subtitle=", ".join(recipes),
        findings=[*findings(rows, "measured"), *findings(simulated, "simulated")],
        note=_NOTE,
        legend=("Layouts", list(looks.values())),
        sections=[
            *(
                Section(title=title, parts=[_table(key, some, looks)], notes=[note])
                for title, key, some, note in tables
                if some
            ),
            Section(title="Speed-up", parts=charts),
        ],
        source="the records of a study",
    )


def _table(name: str, rows: Sequence[ServersRow], looks: Mapping[str, Series]) -> Table:
    column = columns_over(rows)
    columns = [
        column("Cell", lambda row: row.cell.name, None),
        column("Hosts", lambda row: len(row.cell.workers_per_host), "d"),
        *speed_columns(rows),
    ]
    return Table(name=name, columns=columns, series=[looks[row.cell.layout] for row in rows])
