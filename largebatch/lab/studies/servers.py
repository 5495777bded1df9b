"""Servers: how fast each layout of the weights is, and what it sends.

Every layout makes the same update: its workers compute gradients of equal mini-batches, and nobody
continues before the mean of all of them is in the weights (hardsync). Only where the weights are
differs, and so who sends what to whom (Jaeger et al., DIDL 2018, compare layouts of two
frameworks). More workers, other links and other mini-batches are simulated, from the same bytes and
the same times of gradients: workers of a real start take turns on the cores of this machine.

Bytes of an update over the link of each host, in one direction, with lambda workers on a host each
and a model of M bytes, of which the k-th parameter server has M_k:

    central server k, on its own host         receives lambda M_k, sends lambda M_k
    worker of central servers                 sends M, receives M
    worker k with server k beside it          sends M - M_k + (lambda - 1) M_k, receives as much
    worker of a ring                          sends 2 M (lambda - 1) / lambda, receives as much

A worker pushes its gradient to all servers, and pulls the weights from all; what goes to the server
on its own host crosses no link (Li et al., OSDI 2014; Jaeger et al., DIDL 2018; ring: Patarasuk
and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). Servers hold whole tensors: if one tensor is most of
the model, so is the part of its server.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
import torch

from largebatch.errors import LargebatchError
from largebatch.lab.protocols.cluster import Cluster, Link, Recorded, compute_times
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.simulator import simulate
from largebatch.lab.protocols.split import server_bytes
from largebatch.lab.studies.hosts import HostsCell, HostsRow, Json, Placement, Start, starts_of
from largebatch.lab.studies.lines import interval_line
from largebatch.lab.studies.metrics import Interval, ratio
from largebatch.lab.studies.namespaces import payload_bandwidth
from largebatch.lab.studies.study import (
    ALONE,
    Compute,
    Layout,
    Simulated,
    Split,
    Study,
    named_error,
    recipe_of,
)
from largebatch.lab.studies.trained import is_installed
from largebatch.models import param_groups
from largebatch.models.of_recipe import model_without_memory
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.protocols import Centralised
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import (
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

NEAR = 0.05
"""How far counters may be from the formulas, as a fraction of these."""

LEVEL = 1.1
"""Ratio of speeds up to which two layouts count as level."""

BUSY = 0.05
"""Fraction of late gradients above which a machine is too busy to judge by it."""

LIMITED = 1.25
"""Ratio of measured to simulated seconds above which the machine and not the links limits."""

Sweep = Literal["workers", "megabits", "mini_batch"]
UNITS: dict[Sweep, str] = {"workers": "workers", "megabits": "Mbit/s", "mini_batch": "samples"}
"""The swept quantities, and their units."""

_QUANTILES = 256
"""Number of times that represent a distribution that was not recorded."""

_NOTE = (
    "Every layout makes the same update of the same mini-batches; only where the weights are "
    "differs. Hosts are network namespaces of one machine with a shaped link each. Means over "
    "starts with Student's interval of 95 %."
)
_TABLE = (
    "A batch is the mini-batch of one worker. Speed-up is against one worker alone, and efficiency "
    "is that over the workers: servers on their own hosts are not counted. Links carry payload, by "
    "the counters of their interfaces without the 66 bytes of headers of each packet."
)
_SIMULATED = (
    "Simulated from the bytes of the formulas, the times of gradients, and what an update of one "
    "worker alone takes besides its gradient; messages share links at fair rates. Servers update "
    "in no time. Links and mini-batches are changed at the most workers that are started."
)


class Traffic(NamedTuple):
    """Bytes of payload in an update, over the link of one host."""

    received: float
    sent: float


def central(parts: Sequence[int], *, learners: int) -> list[Traffic]:
    """Return the links of the learners and then of the servers, which have these bytes each.

    >>> [link.sent for link in central([4], learners=2)]
    [4.0, 4.0, 8.0]
    """
    whole = float(sum(parts))
    servers = [Traffic(float(learners * part), float(learners * part)) for part in parts]
    return [Traffic(whole, whole)] * learners + servers


def beside(parts: Sequence[int]) -> list[Traffic]:
    """Return the links of learners, each of which has a server with these bytes on its host.

    >>> [link.sent for link in beside([10, 1, 1])]
    [22.0, 13.0, 13.0]
    """
    learners, whole = len(parts), sum(parts)
    each = [float(whole - part + (learners - 1) * part) for part in parts]
    return [Traffic(bytes_, bytes_) for bytes_ in each]


def ring(model_bytes: int, *, workers: int) -> list[Traffic]:
    """Return the links of workers that sum their gradients in a ring.

    >>> ring(12, workers=3)[0]
    Traffic(received=16.0, sent=16.0)
    """
    each = 2 * model_bytes * (workers - 1) / workers
    return [Traffic(each, each)] * workers


@dataclass(frozen=True, kw_only=True)
class ServersCell(HostsCell):
    """One recipe with one layout on a number of workers."""

    layout: str
    """Name of the layout in the study."""

    @property
    def is_central(self) -> bool:
        """True if servers have hosts of their own."""
        return self.recipe.protocol is not None and self.recipe.protocol.dedicated > 0

    @property
    def is_split(self) -> bool:
        """True if servers hold a part of each tensor."""
        return self.recipe.protocol is not None and self.recipe.protocol.split

    @property
    def is_beside(self) -> bool:
        """True if each worker's host has a server."""
        return self.recipe.protocol is not None and not self.recipe.protocol.dedicated

    def expected(self, start: Start) -> list[Traffic]:
        """Return the bytes of the formulas for the link of each host."""
        if self.is_central:
            return central(start.shards, learners=self.workers)
        if self.is_beside:
            return beside(start.shards)
        return ring(sum(start.shards), workers=self.workers)


def cells_of(study: Study, folder: Path) -> list[ServersCell]:
    """Return the cells of a study whose file is in `folder`, each checked.

    Layouts on Horovod are left out if it is not installed. Raises RecipeError naming the cell that
    cannot be started.
    """
    cells = []
    for name in study.recipes:
        on_hosts = study.recipes[name].on_hosts
        assert on_hosts is not None
        with_horovod = is_installed("horovod")
        cells += _cells(study, folder, name, on_hosts.workers, with_horovod=with_horovod)
    return cells


def _cells(
    study: Study, folder: Path, name: str, numbers: Sequence[int], *, with_horovod: bool
) -> list[ServersCell]:
    """Return one worker alone, and every layout on these numbers of workers."""
    assert study.servers is not None
    base = recipe_of(study.recipes[name], folder)
    points: list[tuple[str, Layout, int]] = [(ALONE, "torch", 1)]
    for layout, where in study.servers.layouts.items():
        if with_horovod or where != "horovod":
            points += [(layout, where, one) for one in numbers if one > 1 or where != "torch"]
    return [_cell(study, name, base, *point) for point in points]


def _cell(
    study: Study, name: str, base: Recipe, layout: str, where: Layout, workers: int
) -> ServersCell:
    on_hosts, servers = study.recipes[name].on_hosts, study.servers
    assert on_hosts is not None
    assert servers is not None
    tree = base.model_dump(mode="json")
    tree["batch"]["global_batch"] = workers * (on_hosts.computed or on_hosts.mini_batch)
    tree["polish"], tree["evaluation"] = None, {}
    holders = where.split if isinstance(where, Split) else where
    if holders == "decentralised" or isinstance(holders, Centralised):
        tree["protocol"] = {
            "kind": "hardsync",
            "learners": workers,
            "servers": holders if isinstance(holders, str) else holders.model_dump(),
            "split": isinstance(where, Split),
        }
    try:
        recipe = validate_tree(Recipe, tree, source=base.name)
        every = recipe.protocol.workers if recipe.protocol else workers
        on_hosts.require_length(make_plan(recipe, workers=every).steps)
    except LargebatchError as error:
        raise named_error(f"{name}/{layout}-{workers}", error) from None
    dedicated = recipe.protocol.dedicated if recipe.protocol else 0
    return ServersCell(
        study=study.name, configuration=name, variant=f"{layout}-{workers}", recipe=recipe,
        seeds=study.seeds, workers=workers, samples=on_hosts.mini_batch, on_hosts=on_hosts,
        layout=layout,
        placement=Placement(
            workers_per_host=(1,) * (workers + dedicated),
            megabits=on_hosts.megabits or servers.megabits,
            backend="horovod" if where == "horovod" else "torch",
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class ServersRow(HostsRow):
    """A cell with its starts; its work is counted in mini-batches."""

    cell: ServersCell

    def times(self, other: "ServersRow") -> Interval | None:
        """Return how many times as fast as another layout, over the pairs of a seed."""
        return ratio(self.throughputs, other.throughputs).interval

    @property
    def expected(self) -> list[Traffic]:
        """Bytes of the formulas for each host's link."""
        return self.cell.expected(self.first)

    @property
    def measured(self) -> list[Traffic]:
        """Bytes of the counters of each host's link, the mean over the starts."""
        return [
            Traffic(
                fmean([one.received[host] for one in self.starts.values()]),
                fmean([one.sent[host] for one in self.starts.values()]),
            )
            for host in self.first.sent
        ]

    @property
    def busiest(self) -> int:
        """Place of the host whose link carries most by the formulas."""
        return max(range(len(self.expected)), key=lambda place: sum(self.expected[place]))

    @property
    def deviation(self) -> float:
        """The largest |measured / formula - 1| over hosts and both directions."""
        ratios = [
            abs(measured / formula - 1)
            for own, by in zip(self.measured, self.expected, strict=True)
            for measured, formula in zip(own, by, strict=True)
            if formula
        ]
        return max(ratios, default=0.0)

    @property
    def late(self) -> float:
        """Fraction of gradients that took longer than set."""
        return fmean([one.late for one in self.starts.values()])


def row_of(
    cell: ServersCell, starts: Mapping[int, Start], alone: Mapping[int, Start]
) -> ServersRow:
    """Return the row of a cell; each worker has one mini-batch in an update."""
    return ServersRow(cell, starts, alone, work=cell.workers, work_alone=1)


def rows_of(
    cells: Sequence[ServersCell], records: Mapping[str, Mapping[str, Json]]
) -> list[ServersRow]:
    """Return the cells that have records, given by cell and run."""
    starts = {cell.name: starts_of(cell, records.get(cell.name, {})) for cell in cells}
    return [
        row_of(cell, starts[cell.name], starts.get(f"{cell.configuration}/{ALONE}-1", {}))
        for cell in cells
        if starts[cell.name]
    ]


def sweeps(
    study: Study, folder: Path, measured: Sequence[ServersRow]
) -> dict[Sweep, list[ServersRow]]:
    """Return the simulated rows of a study whose file is in `folder`, by what is swept.

    A ring's workers wait for the slowest gradient, and then for the bytes of a ring on each link.
    An update also takes what that of one worker alone takes besides its gradient, if `measured`
    has it.
    """
    found: dict[Sweep, list[ServersRow]] = {sweep: [] for sweep in UNITS}
    assert study.servers is not None
    section = study.servers.simulated
    if section is None:
        return found
    for name, entry in study.recipes.items():
        assert entry.on_hosts is not None
        weights = weights_of(recipe_of(entry, folder))
        overhead = _overhead(measured, name)
        most = _cells(study, folder, name, (max(entry.on_hosts.workers),), with_horovod=False)
        points: list[tuple[Sweep, list[ServersCell]]] = [
            ("workers", _cells(study, folder, name, section.workers, with_horovod=False))
        ]
        points += [
            (
                "megabits",
                [replace(cell, placement=replace(cell.placement, megabits=one)) for cell in most],
            )
            for one in section.megabits
        ]
        for factor in section.mini_batches:
            samples = max(1, round(factor * entry.on_hosts.mini_batch))
            points.append(("mini_batch", [replace(cell, samples=samples) for cell in most]))
        for sweep, cells in points:
            starts = [_simulate(cell, weights, overhead, section) for cell in cells]
            found[sweep] += [
                row_of(cell, own, starts[0]) for cell, own in zip(cells, starts, strict=True)
            ]
    return found


def weights_of(recipe: Recipe) -> list[torch.Tensor]:
    """Return the weights of a recipe's model without numbers, in the order of its optimizer."""
    groups = param_groups(
        model_without_memory(recipe.model, classes=recipe.data.classes), weight_decay=0.0
    )
    return [weight.detach() for group in groups for weight in group["params"]]


def _overhead(measured: Sequence[ServersRow], name: str) -> float:
    """Return the seconds that an update of one worker alone takes besides its gradient."""
    for row in measured:
        if row.cell.configuration == name and row.cell.layout == ALONE and row.cell.compute:
            return max(0.0, row.seconds.mean - row.cell.compute.mean(row.cell.samples))
    return 0.0


def _simulate(
    cell: ServersCell, weights: Sequence[torch.Tensor], overhead: float, section: Simulated
) -> dict[int, Start]:
    """Return the simulations of a cell by their seeds, from 1 on."""
    assert cell.compute is not None
    assert cell.placement.megabits is not None
    protocol = cell.recipe.protocol
    shares = server_bytes(weights, protocol.num_servers if protocol else 1, split=cell.is_split)
    bandwidth = payload_bandwidth(cell.placement.megabits)
    cluster = Cluster(
        learners=cell.workers,
        compute=_times(cell.compute, cell.samples, overhead=overhead),
        link=Link(bandwidth=bandwidth),
        shares=tuple(map(float, shares)),
        sharing="fair",
    )
    servers = None if cell.is_beside else len(shares)
    found = {}
    for seed in range(1, section.repeats + 1):
        if protocol is None:
            draws = [
                islice(compute_times(cluster.compute, seed=seed, learner=n), section.updates)
                for n in range(cell.workers)
            ]
            sent = ring(sum(shares), workers=cell.workers)[0].sent / bandwidth
            seconds = [max(each) + sent for each in zip(*draws, strict=True)]
        else:
            rule = Rule.hardsync(cell.workers)
            ends = simulate(rule, cluster, servers=servers, updates=section.updates, seed=seed).ends
            seconds = np.diff(ends, prepend=0.0).tolist()
        found[seed] = Start(
            seconds=seconds, sent={}, received={}, shards=shares, late=0.0, rates=[],
        )  # fmt: skip
    return found


def _times(compute: Compute, samples: int, *, overhead: float) -> Recorded:
    """Return the seconds of an update without messages."""
    factor = compute.factor
    uniform = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    drawn = factor.seconds if isinstance(factor, Recorded) else factor.at(uniform).tolist()
    usual = compute.usual(samples)
    return Recorded(kind="recorded", seconds=tuple(overhead + usual * one for one in drawn))


def value_of(row: ServersRow, sweep: Sweep) -> float:
    """Return the swept value of a row."""
    if sweep == "megabits":
        return row.cell.placement.megabits or 0.0
    return row.cell.samples if sweep == "mini_batch" else row.cell.workers


def slower(rows: Sequence[ServersRow], how: str) -> Iterator[str]:
    """Yield on how many workers each layout is slower than one worker."""
    slow: dict[tuple[str, str], list[ServersRow]] = {}
    for row in rows:
        if row.cell.workers > 1 and row.speed_up and round(row.speed_up.mean, 2) < 1:
            slow.setdefault((row.cell.configuration, row.cell.layout), []).append(row)
    for (recipe, layout), some in slow.items():
        numbers = ", ".join(str(row.cell.workers) for row in some)
        means = [row.speed_up.mean for row in some if row.speed_up]
        ends = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(means), max(means))))
        yield f"SLOWER THAN ONE WORKER: {recipe}, {how}: {layout} on {numbers} workers ({ends})."


def verdict(paper: str | None, low: float, high: float) -> str:
    """Return how a range of ratios, servers beside workers over a central one, fits the paper."""
    if paper is None:
        return "the paper does not have this model"
    differ = low > 1 or high < 1
    if paper == "no difference":
        level = low >= 1 / LEVEL and high <= LEVEL
        found = "confirmed" if level else "refuted" if differ else "not decided"
        return f"the paper has no difference for this model: {found} (level: up to {LEVEL:g} times)"
    found = "not decided" if not differ else "confirmed" if low > 1 else "refuted"
    return f"the paper has faster for this model: {found}"


def findings(rows: Sequence[ServersRow]) -> Iterator[str]:
    """Yield how measured layouts compare, and how far the formulas are off.

    Jaeger et al. (DIDL 2018) found servers beside the workers faster than central ones for their
    smaller model, and no significant difference for their larger one. One pair of layouts judges a
    model: whole tensors, one central server, and its most workers. Other pairs are only compared.
    """
    for row in rows:
        for other in rows:
            pair = row.cell.is_central and other.cell.is_beside
            if pair and _point(row.cell) == _point(other.cell):
                yield _compared(row, other)
    if rows:
        worst = max(row.deviation for row in rows)
        found = "within" if worst <= NEAR else "NOT within"
        yield (
            f"The counters of all links are {found} {NEAR:.0%} of the formulas: at most "
            f"{worst:.1%} off."
        )


def _point(cell: ServersCell) -> tuple[str, int, bool]:
    return cell.configuration, cell.workers, cell.is_split


def _compared(one: ServersRow, other: ServersRow) -> str:
    cell = one.cell
    times = other.times(one)
    head = (
        f"{cell.configuration} ({one.model_bytes / 1e6:.1f} MB) on {cell.workers} workers, "
        f"{other.cell.layout} against {cell.layout}"
    )
    if times is None or times.number == 1:
        measured = "" if times is None else f" {times.mean:.2f} times as fast,"
        return f"{head}:{measured} too few starts to judge."
    shown = f"{head}: {times.with_ends('.2f', ' times as fast')}"
    if cell.is_split or len(one.first.shards) > 1 or cell.workers < max(cell.on_hosts.workers):
        return f"{shown}."
    late = max(one.late, other.late)
    if late > BUSY:
        return f"{shown}; {late:.0%} of gradients were late, so the machine was too busy to judge."
    return f"{shown}; {verdict(cell.on_hosts.paper, times.low, times.high)}."


def simulated_findings(
    simulated: Mapping[Sweep, Sequence[ServersRow]], measured: Sequence[ServersRow]
) -> Iterator[str]:
    """Yield how simulated layouts compare, from which links workers pay, and the deviations."""
    for recipe in dict.fromkeys(row.cell.configuration for row in simulated["workers"]):
        for sweep, unit in UNITS.items():
            rows = [row for row in simulated[sweep] if row.cell.configuration == recipe]
            times = _beside_over_central(rows, sweep)
            if times:
                low, high = (end(one.mean for one in times.values()) for end in (min, max))
                ends = " to ".join(dict.fromkeys((f"{low:.2f}", f"{high:.2f}")))
                over = " to ".join(f"{end(times):,g}" for end in (min, max))
                judged = f"; {verdict(rows[0].cell.on_hosts.paper, low, high)}"
                yield (
                    f"{recipe}, simulated, beside over one central server: {ends} at {over} {unit}"
                    f"{judged * (sweep == 'workers')}."
                )
        rows = [row for row in simulated["megabits"] if row.cell.configuration == recipe]
        if faster := pays_from(rows):
            listed = ", ".join(f"{layout} {rate:,g}" for layout, rate in faster.items())
            yield f"{recipe}, simulated: faster than one worker from these Mbit/s on: {listed}."
    by_name = {row.cell.name: row for row in simulated["workers"]}
    ratios = {
        row.cell.name: by_name[row.cell.name].seconds.mean / row.seconds.mean
        for row in measured
        if row.cell.workers > 1 and row.cell.name in by_name
    }
    if ratios:
        low, high = min(ratios.values()), max(ratios.values())
        yield (
            f"The simulated time of an update is {low:.2f} to {high:.2f} times the measured one "
            f"over {len(ratios)} cells of several workers."
        )
    if limited := [name for name, one in ratios.items() if one * LIMITED < 1]:
        yield (
            f"Updates took more than {LIMITED:g} times as long as simulated, so cores rather than "
            f"links limit them and the simulation judges: {', '.join(limited)}."
        )


def _beside_over_central(rows: Sequence[ServersRow], sweep: Sweep) -> dict[float, Interval]:
    """Return how many times as fast servers beside the workers are, of whole tensors."""
    whole = [row for row in rows if not row.cell.is_split]
    one = {
        value_of(row, sweep): row
        for row in whole
        if row.cell.is_central and len(row.first.shards) == 1
    }
    return {
        value_of(row, sweep): times
        for row in whole
        if row.cell.is_beside and row.cell.workers > 1 and value_of(row, sweep) in one
        and (times := row.times(one[value_of(row, sweep)])) is not None
    }  # fmt: skip


def pays_from(rows: Sequence[ServersRow]) -> dict[str, float]:
    """Return the lowest rate from which on each layout is faster than one worker, if any is."""
    found: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: -value_of(row, "megabits")):
        if row.cell.workers > 1 and row.speed_up:
            last = found.get(row.cell.layout)
            if row.speed_up.low > 1 and last != 0.0:
                found[row.cell.layout] = value_of(row, "megabits")
            elif last is None:
                found[row.cell.layout] = 0.0
    return {layout: rate for layout, rate in found.items() if rate}


def make_page(
    study: Study, rows: Sequence[ServersRow], simulated: Mapping[Sweep, Sequence[ServersRow]]
) -> Page:
    """Return the page of a study; `simulated` has the rows of each sweep."""
    assert study.servers is not None
    both = [*rows, *simulated["workers"]]
    layouts = dict.fromkeys(row.cell.layout for row in both)
    looks = {layout: series(place, layout) for place, layout in enumerate(layouts)}
    recipes = list(dict.fromkeys(row.cell.configuration for row in both))
    started = {row.cell.configuration for row in rows if row.cell.layout == ALONE}
    lacking = [name for name in recipes if name not in started]
    sections = (
        [Section(title="Layouts", parts=[_table(rows, looks)], notes=[_TABLE])] if rows else []
    )
    for recipe in recipes:
        own = [row for row in rows if row.cell.configuration == recipe]
        points = {
            sweep: [row for row in simulated[sweep] if row.cell.configuration == recipe]
            for sweep in UNITS
        }
        charts = [
            line_chart(
                f"{sweep}-{recipe}",
                Panel(
                    lines=[*_lines(some, looks, sweep, points=False),
                           *_lines(own if sweep == "workers" else [], looks, sweep,
                                   line=not some)],
                    x=UNITS[sweep].capitalize(), y="Speed-up", from_zero=True,
                    log="" if sweep == "workers" else "x",
                ),
                caption="Points are measured, lines simulated." if some else "",
            )
            for sweep, some in points.items()
            if some or (own and sweep == "workers")
        ]  # fmt: skip
        sections.append(Section(title=f"Speed-up: {recipe}", parts=charts))
    every = [row for sweep in UNITS for row in simulated[sweep]]
    if every:
        tables = [_simulated_table(every, looks)]
        sections.append(Section(title="Simulated", parts=tables, notes=[_SIMULATED]))
    return Page(
        title=study.name,
        subtitle=", ".join(recipes),
        findings=[
            *slower(rows, "measured"),
            *slower(simulated["workers"], "simulated"),
            *findings(rows),
            *simulated_findings(simulated, rows),
            *(
                f"{name}: one worker alone was not started, so the time of its update besides the "
                "gradient counts as 0 in simulations."
                for name in lacking
            ),
        ],
        is_sound=all(row.deviation <= NEAR for row in rows),
        note=_NOTE,
        legend=("Layouts", list(looks.values())),
        sections=sections,
        source="the records of a study",
    )


def _lines(
    rows: Sequence[ServersRow], looks: Mapping[str, Series], sweep: Sweep, *,
    line: bool = True, points: bool = True,
) -> Iterator[Line]:  # fmt: skip
    """Yield the speed-up of every layout, from one worker alone on."""
    for layout, look in looks.items():
        own = [row for row in rows if row.cell.layout == layout and row.speed_up is not None]
        if sweep == "workers" and own and min(row.cell.workers for row in own) > 1:
            own += [row for row in rows if row.cell.layout == ALONE and row.speed_up is not None]
        own.sort(key=lambda row: value_of(row, sweep))
        if layout != ALONE:
            x = [value_of(row, sweep) for row in own]
            means = [row.speed_up for row in own if row.speed_up is not None]
            if points:
                yield interval_line(look, x, means, line=line)
            else:
                yield Line(series=look, x=x, y=[mean.mean for mean in means], points=False)


def _speed_columns(rows: Sequence[ServersRow]) -> list[Column]:
    column = columns_over(rows)
    return [
        column("Batches/s", lambda row: row.throughput.mean, ",.3f"),
        column("±", lambda row: row.throughput.reach, ",.3f"),
        column("Speed-up", lambda row: row.speed_up and row.speed_up.mean, ".2f"),
        column("± speed-up", lambda row: row.speed_up and row.speed_up.reach, ".2f"),
        column("Efficiency, %", lambda row: row.efficiency and row.efficiency.mean, ".0f"),
    ]


def _table(rows: Sequence[ServersRow], looks: Mapping[str, Series]) -> Table:
    """Return a row for each cell."""
    column = columns_over(rows)

    def link(row: ServersRow, links: Sequence[Traffic]) -> float | None:
        return None if row.cell.workers == 1 else 1e-6 * sum(links[row.busiest])

    columns = [
        column("Cell", lambda row: row.cell.name, None),
        *_speed_columns(rows),
        column("Busiest link, MB", lambda row: link(row, row.measured), ",.3f"),
        column("Formula, MB", lambda row: link(row, row.expected), ",.3f"),
        column(
            "Largest deviation, %",
            lambda row: 100 * row.deviation if row.cell.workers > 1 else None,
            ".2f",
        ),
        column("Model, MB", lambda row: 1e-6 * row.model_bytes, ",.2f"),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Hosts", lambda row: len(row.cell.placement.workers_per_host), "d"),
        column("Late gradients, %", lambda row: 100 * row.late, ".1f"),
        column("Starts", lambda row: len(row.starts), "d"),
    ]
    printed = {one.title for one in columns[:9]}
    shown = [looks[row.cell.layout] for row in rows]
    return Table(name="cells", columns=columns, series=shown, printed=printed)


def _simulated_table(rows: Sequence[ServersRow], looks: Mapping[str, Series]) -> Table:
    """Return a row for each simulated point."""
    column = columns_over(rows)
    columns = [
        column("Simulated cell", lambda row: row.cell.name, None),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Link, Mbit/s", lambda row: row.cell.placement.megabits, ",g"),
        column("Mini-batch", lambda row: row.cell.samples, "d"),
        column("An update, s", lambda row: row.seconds.mean, ",.4f"),
        *_speed_columns(rows),
    ]
    shown = [looks[row.cell.layout] for row in rows]
    return Table(name="simulated", columns=columns, series=shown)
