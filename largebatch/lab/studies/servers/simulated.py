"""What more workers, other links and other mini-batches change, simulated.

The bytes are those of the formulas, which the counters of real starts are held against, and the
times of gradients are those that workers of a real start sleep. Besides, an update takes what that
of one worker alone takes besides its gradient. Messages share links at fair rates, as TCP does. A
ring's workers wait for the slowest gradient, and then for the bytes of a ring on each link.

A simulated point is a cell and its starts, as a measured one is, with one seed for each simulation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from largebatch.lab.protocols.cluster import Cluster, Link
from largebatch.lab.protocols.compute_times import Recorded, compute_times
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.simulator import simulate
from largebatch.lab.protocols.split import server_bytes
from largebatch.lab.studies.hosts.compute import Compute
from largebatch.lab.studies.hosts.namespaces import payload_bandwidth
from largebatch.lab.studies.hosts.starts import Found
from largebatch.lab.studies.metrics import Interval
from largebatch.lab.studies.queue.study import base_recipe
from largebatch.lab.studies.servers.rows import Row, row_of, verdict
from largebatch.lab.studies.servers.study import ALONE, Cell, ServersStudy, Simulated, make_cell
from largebatch.lab.studies.servers.traffic import ring
from largebatch.models import param_groups
from largebatch.models.of_recipe import model_without_memory
from largebatch.recipe.recipe import Recipe

Sweep = Literal["workers", "megabits", "mini_batch"]
UNITS: dict[Sweep, str] = {"workers": "workers", "megabits": "Mbit/s", "mini_batch": "samples"}
"""What a study sweeps, and its unit."""

LIMITED = 1.25
"""Ratio of measured to simulated seconds from which on the machine and not the links limits."""

_QUANTILES = 256
"""Number of times that stand for a distribution that was not recorded."""


def sweeps(study: ServersStudy, folder: Path, measured: Sequence[Row]) -> dict[Sweep, list[Row]]:
    """Return the simulated rows of a study whose file lies in `folder`, by what changes.

    `measured` has the rows of one worker alone, if they were started; without one an update takes
    nothing besides gradients and messages.
    """
    found: dict[Sweep, list[Row]] = {sweep: [] for sweep in UNITS}
    section = study.simulated
    if section is None:
        return found
    for name, trained in study.recipes.items():
        base = base_recipe(trained, folder)
        weights = weights_of(base)
        overhead = _overhead(measured, name)

        most = _cells(study, name, base, (max(trained.workers),))
        points: list[tuple[Sweep, list[Cell]]] = [
            ("workers", _cells(study, name, base, section.workers)),
            *(
                ("megabits", [_at(cell, megabits) for cell in most])
                for megabits in section.megabits
            ),
            *(
                ("mini_batch", [_of(cell, factor * trained.mini_batch) for cell in most])
                for factor in section.mini_batches
            ),
        ]
        for sweep, cells in points:
            alone, *others = (_simulated(cell, weights, overhead, section) for cell in cells)
            pairs = zip(cells, [alone, *others], strict=True)
            found[sweep] += [row_of(cell, own, alone) for cell, own in pairs]
    return found


def _at(cell: Cell, megabits: float) -> Cell:
    """Return a cell over links of another rate."""
    name = f"{cell.name} at {megabits:g} Mbit/s"
    return replace(cell, name=name, placement=replace(cell.placement, megabits=megabits))


def _of(cell: Cell, samples: float) -> Cell:
    """Return a cell with other mini-batches."""
    own = max(1, round(samples))
    return replace(cell, name=f"{cell.name} of {own} samples", samples=own)


def weights_of(recipe: Recipe) -> list[torch.Tensor]:
    """Return the weights of a recipe's model without numbers, in the order of its optimizer."""
    groups = param_groups(model_without_memory(recipe), weight_decay=0.0)
    return [weight.detach() for group in groups for weight in group["params"]]


def _cells(study: ServersStudy, name: str, base: Recipe, workers: Sequence[int]) -> list[Cell]:
    """Return one worker alone, and every layout on these numbers of workers."""
    layouts = {layout: where for layout, where in study.layouts.items() if where != "horovod"}
    points = [(layout, where, number) for number in workers for layout, where in layouts.items()]
    return [
        make_cell(study, name, base, layout=layout, where=where, workers=number)
        for layout, where, number in [(ALONE, "torch", 1), *points]
        if number > 1 or layout == ALONE or where != "torch"
    ]


def _overhead(measured: Sequence[Row], name: str) -> float:
    """Return the seconds that an update of one worker alone takes besides its gradient."""
    for row in measured:
        if row.cell.configuration == name and row.cell.layout == ALONE and row.cell.compute:
            return max(0.0, row.seconds.mean - row.cell.compute.mean(row.cell.samples))
    return 0.0


def _simulated(
    cell: Cell, weights: Sequence[torch.Tensor], overhead: float, section: Simulated
) -> dict[int, Found]:
    """Return the simulations of a cell by their seeds, from 1 on."""
    assert cell.compute is not None
    assert cell.placement.megabits is not None
    protocol = cell.recipe.protocol
    shares = server_bytes(weights, protocol.num_servers if protocol else 1, split=cell.is_split)
    cluster = Cluster(
        learners=cell.workers,
        compute=_times(cell.compute, cell.samples, overhead=overhead),
        link=Link(bandwidth=payload_bandwidth(cell.placement.megabits)),
        shares=tuple(map(float, shares)),
        sharing="fair",
    )
    servers = None if cell.is_beside else len(shares)
    found = {}
    for seed in range(1, section.repeats + 1):
        if protocol is None:
            seconds = _ring_seconds(cluster, updates=section.updates, seed=seed)
        else:
            rule = Rule.hardsync(cell.workers)
            ends = simulate(rule, cluster, servers=servers, updates=section.updates, seed=seed).ends
            seconds = np.diff(ends, prepend=0.0).tolist()
        found[seed] = Found(
            seconds=seconds, sent={}, received={}, shards=shares, late=0.0, rates=[],
            device_batch=0,
        )  # fmt: skip
    return found


def _times(compute: Compute, samples: int, *, overhead: float) -> Recorded:
    """Return the seconds of an update without messages."""
    factor = compute.factor
    uniform = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    drawn = factor.seconds if isinstance(factor, Recorded) else factor.at(uniform).tolist()
    usual = compute.usual(samples)
    return Recorded(kind="recorded", seconds=tuple(overhead + usual * one for one in drawn))


def _ring_seconds(cluster: Cluster, *, updates: int, seed: int) -> list[float]:
    """Return the seconds of updates of a ring, or of one worker alone."""
    draws = [
        islice(compute_times(cluster.compute, seed=seed, learner=learner), updates)
        for learner in range(cluster.learners)
    ]
    assert cluster.link.bandwidth is not None
    sent = ring(round(sum(cluster.shares)), workers=cluster.learners)[0].sent
    return [max(each) + sent / cluster.link.bandwidth for each in zip(*draws, strict=True)]


def findings(simulated: Mapping[Sweep, Sequence[Row]], measured: Sequence[Row]) -> Iterator[str]:
    """Yield in words how layouts compare, from which links on workers pay, and how sure that is."""
    for recipe in dict.fromkeys(row.cell.configuration for row in simulated["workers"]):
        own = {
            sweep: [row for row in rows if row.cell.configuration == recipe]
            for sweep, rows in simulated.items()
        }
        yield from _compared(recipe, own)
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
    limited = [name for name, ratio in ratios.items() if ratio * LIMITED < 1]
    if limited:
        yield (
            f"Updates took more than {LIMITED:g} times as long as simulated, so cores rather than "
            f"links limit them and the simulation judges: {', '.join(limited)}."
        )


def _compared(recipe: str, rows: Mapping[Sweep, Sequence[Row]]) -> Iterator[str]:
    """Yield how servers beside the workers compare with one central server, by what changes."""
    for sweep, unit in UNITS.items():
        times = _beside_over_central(rows[sweep], sweep)
        if times:
            low, high = (end(one.mean for one in times.values()) for end in (min, max))
            ends = f"{low:.2f}", f"{high:.2f}"
            over = " to ".join(f"{end(times):,g}" for end in (min, max))
            found = f"{' to '.join(dict.fromkeys(ends))} at {over} {unit}"
            words = f"{recipe}, simulated, beside over one central server: {found}"
            paper = rows[sweep][0].cell.trained.paper
            judged = f"; {verdict(paper, low, high)}" if sweep == "workers" else ""
            yield f"{words}{judged}."
    faster = _pays_from(rows["megabits"])
    if faster:
        listed = ", ".join(f"{layout} {rate:,g}" for layout, rate in faster.items())
        yield f"{recipe}, simulated: faster than one worker from these Mbit/s on: {listed}."


def value_of(row: Row, sweep: Sweep) -> float:
    """Return what a sweep changes."""
    if sweep == "megabits":
        return row.cell.placement.megabits or 0.0
    return row.cell.samples if sweep == "mini_batch" else row.cell.workers


def _beside_over_central(rows: Sequence[Row], sweep: Sweep) -> dict[float, Interval]:
    """Return how many times as fast servers beside the workers are, of whole tensors."""
    whole = [row for row in rows if not row.cell.is_split]
    central = {
        value_of(row, sweep): row
        for row in whole
        if row.cell.is_central and len(row.first.shards) == 1
    }
    found = {}
    for row in whole:
        if row.cell.is_beside and row.cell.workers > 1 and value_of(row, sweep) in central:
            times = row.times(central[value_of(row, sweep)])
            assert times is not None
            found[value_of(row, sweep)] = times
    return found


def _pays_from(rows: Sequence[Row]) -> dict[str, float]:
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
