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
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import numpy as np

from largebatch.lab.protocols.server import Rule, divide
from largebatch.lab.protocols.simulator import Cluster, Link, compute_times, expectation, simulate
from largebatch.lab.studies.doubts import Finding
from largebatch.lab.studies.hosts import (
    HostsCell,
    HostsRow,
    Start,
    chart_of,
    doubts_about_rows,
    hosts_cell,
    slower_than_alone,
    starts_of,
    table_of,
)
from largebatch.lab.studies.metrics import ratio
from largebatch.lab.studies.namespaces import payload_bandwidth
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import ALONE, Study
from largebatch.models import param_groups
from largebatch.models.of_recipe import model_without_memory
from largebatch.recipe.protocols import Centralised
from largebatch.report.pages import Page, Section, series

UPDATES, REPEATS = 20, 5
"""Updates of a simulation, and simulations of each point with other times of gradients."""

_NOTE = (
    "Every layout makes the same update of the same mini-batches; only where the weights are "
    "differs. Hosts are network namespaces with a shaped link each. Means over starts with "
    "Student's interval of 95 %."
)
_TABLE = (
    "Efficiency is the speed-up against one worker over the workers, without servers on their own "
    "hosts. With many late gradients the machine was too busy to judge."
)
_SIMULATED = (
    "Simulated from bytes, times of gradients, and what an update of one worker alone takes besides"
    " its gradient; messages share links at fair rates. Servers update in no time. Lines in charts."
)


def cells_of(study: Study, folder: Path, numbers: Sequence[int] | None = None) -> list[HostsCell]:
    """Return the cells of a study whose file is in `folder`, each checked.

    They are one worker alone, and every layout on these `numbers` of workers; None: those of the
    study. Raises RecipeError naming the cell that cannot be started.
    """
    assert study.servers is not None
    cells = []
    for name, entry in study.recipes.items():
        assert entry.on_hosts is not None
        points = [(ALONE, "torch", 1)] + [
            (layout, where, workers)
            for layout, where in study.servers.layouts.items()
            for workers in numbers or entry.on_hosts.workers
            if workers > 1
        ]
        for layout, where, workers in points:
            protocol = None
            if where != "torch":
                holders = where.model_dump() if isinstance(where, Centralised) else where
                protocol = {"kind": "hardsync", "learners": workers, "servers": holders}
            cells.append(
                hosts_cell(
                    study, folder, name, f"{layout}-{workers}", workers=workers,
                    samples=entry.on_hosts.mini_batch, look=layout, protocol=protocol,
                )
            )  # fmt: skip
    return cells


def servers_of(cell: HostsCell) -> int | None:
    """Return the number of servers with their own hosts; 0 beside workers, None without servers."""
    return None if cell.recipe.protocol is None else cell.recipe.protocol.dedicated


def rows_of(
    cells: Sequence[HostsCell], starts: Mapping[str, Mapping[int, Start]]
) -> list[HostsRow]:
    """Return the cells that have starts, given by the names of cells and by seed."""
    rows = [HostsRow(cell=cell, starts=starts[cell.name]) for cell in cells]
    alone = {row.cell.configuration: row for row in rows if row.cell.look == ALONE}
    return [replace(row, alone=alone[row.cell.configuration]) for row in rows if row.starts]


def simulations(study: Study, folder: Path, measured: Sequence[HostsRow]) -> list[HostsRow]:
    """Return the simulated rows of a study whose file is in `folder`.

    A ring's workers wait for the slowest gradient, and then for the bytes of a ring on each link.
    An update also takes what that of one worker alone takes besides its gradient, if `measured`
    has it.
    """
    assert study.servers is not None
    if not study.servers.simulated:
        return []
    overheads = {}
    for row in measured:
        compute = row.cell.on_hosts.compute
        if row.cell.look == ALONE and compute is not None:
            gradient = compute.overhead + compute.sample * row.cell.samples
            left = row.seconds.mean - gradient * expectation(compute.factor)
            overheads[row.cell.configuration] = max(0.0, left)
    cells, starts = cells_of(study, folder, study.servers.simulated), {}
    for cell in cells:
        recipe, protocol = cell.recipe, cell.recipe.protocol
        if cell.look == ALONE:  # the first one of its recipe
            model = model_without_memory(recipe.model, classes=recipe.data.classes)
            groups = param_groups(model, weight_decay=0.0)
            sizes = [weight.nbytes for group in groups for weight in group["params"]]
        parts = divide(sizes, protocol.num_servers if protocol else 1)
        shares = [sum(sizes[number] for number in part) for part in parts]
        starts[cell.name] = _simulate(cell, shares, overheads.get(cell.configuration, 0.0))
    return rows_of(cells, starts)


def _simulate(cell: HostsCell, shares: Sequence[int], overhead: float) -> dict[int, Start]:
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
        servers = servers_of(cell)
        if servers is None:
            draws = [
                compute_times(compute.factor, seed=seed, learner=n, factor=gradient)
                for n in range(cell.workers)
            ]
            sent = 2 * sum(shares) * (cell.workers - 1) / cell.workers / bandwidth
            every = islice(zip(*draws, strict=True), UPDATES)
            seconds = [max(each) + sent for each in every]
        else:
            rule = Rule.hardsync(cell.workers)
            ends = simulate(rule, cluster, servers=servers or None, updates=UPDATES, seed=seed).ends
            seconds = np.diff(ends, prepend=0.0).tolist()
        found[seed] = Start(seconds=seconds)
    return found


def findings(rows: Sequence[HostsRow], how: str) -> Iterator[Finding]:
    """Yield how servers beside the workers compare with a central one."""
    for one, other in product(rows, rows):
        name, workers = one.cell.configuration, one.cell.workers
        pair = servers_of(one.cell) == 1 and servers_of(other.cell) == 0
        times = ratio(other.throughputs, one.throughputs)
        if pair and (name, workers) == (other.cell.configuration, other.cell.workers):
            doubts = doubts_about_rows([one, other], rows)
            if times is None:
                text = ""
                doubts.append("no two starts of one seed")
            else:
                shown = times.with_ends(".2f", " times")
                text = f"{other.cell.look} is {shown} as fast as {one.cell.look}"
            yield Finding(
                about=f"{name} on {workers} workers, {how}, {other.cell.look} against "
                f"{one.cell.look}",
                text=text,
                doubts=doubts,
            )
    yield from slower_than_alone(rows, how)


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    cells = cells_of(study, folder)
    rows = rows_of(cells, {cell.name: starts_of(cell, records) for cell in cells})
    return draw(study.name, rows, simulations(study, folder, rows))


def draw(name: str, rows: Sequence[HostsRow], simulated: Sequence[HostsRow]) -> Page:
    """Return the page of measured and of simulated rows."""
    both = [*rows, *simulated]
    layouts = dict.fromkeys(row.cell.look for row in both)
    looks = {layout: series(place, layout) for place, layout in enumerate(layouts)}
    recipes = list(dict.fromkeys(row.cell.configuration for row in both))
    tables = [("Layouts", "cells", rows, _TABLE), ("Simulated", "simulated", simulated, _SIMULATED)]
    sections = [
        Section(title=title, parts=[table_of(key, some, looks)], notes=[note])
        for title, key, some, note in tables
        if some
    ]
    charts = [
        chart_of(
            recipe,
            [row for row in rows if row.cell.configuration == recipe],
            looks,
            simulated=[row for row in simulated if row.cell.configuration == recipe],
        )
        for recipe in recipes
    ]
    found = [*findings(rows, "measured"), *findings(simulated, "simulated")]
    return Page(
        title=name,
        subtitle=", ".join(recipes),
        findings=list(map(str, found)),
        is_sound=not any(finding.doubts for finding in found),
        note=_NOTE,
        legend=("Layouts", list(looks.values())),
        sections=[*sections, Section(title="Speed-up", parts=charts)],
        source="the records of a study",
    )
