"""Measurements that are made once: each start of workers has one file, complete or absent.

A stopped study is resumed by the same command, and loses only the running start.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from largebatch.distributed.environment import available_cores
from largebatch.errors import StudyError
from largebatch.lab.studies.hosts.compute import Compute
from largebatch.lab.studies.hosts.measure import Placement, measure_on_hosts
from largebatch.lab.studies.hosts.worker import Job
from largebatch.lab.studies.metrics import Interval, interval, ratio
from largebatch.lab.studies.queue.study import Timed, read_record
from largebatch.recipe.recipe import Recipe
from largebatch.report.interactive_charts import Chart, Curve
from largebatch.runs.options import Options
from largebatch.storage import write_whole
from largebatch.tracking.environment import source_commit, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of one start."""

    seconds: list[float]
    """Seconds of each timed update, on the first worker or server."""

    sent: dict[str, float]
    received: dict[str, float]
    """Payload in bytes of an update, by host."""

    shards: list[int]
    """Bytes of the weights on each parameter server, or of all weights."""

    late: float
    """Fraction of gradients that took longer than their set time."""

    rates: list[list[str]]
    """Learning rate of every update on every worker, in hexadecimal."""

    device_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the workers of a cell with a seed, and the file of its record."""

    cell: str
    seed: int
    job: Job
    placement: Placement
    path: Path

    @property
    def settings(self) -> dict[str, Any]:
        """Definition of the measurement, as JSON."""
        job = self.job
        definition = {
            "recipe": job.recipe.model_dump(mode="json"),
            "compute": job.compute and job.compute.model_dump(mode="json"),
            "samples": job.samples,
            "warm_up": job.warm_up,
            "updates": job.updates,
            "placement": asdict(self.placement),
        }
        as_read: dict[str, Any] = json.loads(json.dumps(definition))  # a tuple becomes a list
        return as_read

    def read(self) -> Found | None:
        """Return the record; None if there is none.

        Raises StudyError if it is of another study.
        """
        record = read_record(self.path, {"settings": self.settings})
        if record is None:
            return None
        try:
            return Found(**record["found"])
        except (KeyError, TypeError):
            raise StudyError(f"{self.path}: is not the record of a start; remove it") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A recipe on a number of workers."""

    name: str
    """Name of its folder."""

    configuration: str
    """Name of its recipe in the study."""

    workers: int
    """Number of workers that compute gradients."""

    samples: int
    """Samples of each worker in an update."""

    recipe: Recipe
    placement: Placement
    trained: Timed
    compute: Compute | None

    def start(self, seed: int, *, data: Path | None, out: Path) -> Start:
        """Return one start of its workers."""
        backend = self.placement.backend if self.workers > 1 else "auto"
        job = Job(
            recipe=self.recipe.model_copy(update={"seed": seed}),
            options=Options(out=Path(), data=data, backend=backend, report=False),
            compute=self.compute,
            samples=self.samples,
            warm_up=self.trained.warm_up,
            updates=self.trained.updates,
        )
        path = out / self.name / f"seed-{seed}.json"
        return Start(cell=self.name, seed=seed, job=job, placement=self.placement, path=path)


@dataclass(frozen=True, slots=True)
class Row:
    """A cell with the results of its starts by seed, and those of one worker alone."""

    cell: Cell
    found: Mapping[int, Found]
    alone: Mapping[int, Found]
    work: float
    """Work of an update on all workers, in the unit of the throughput."""

    work_alone: float
    """Work of an update on one worker alone."""

    @property
    def throughputs(self) -> dict[int, float]:
        """Work per second, by seed."""
        return {seed: self.work / fmean(one.seconds) for seed, one in self.found.items()}

    @property
    def throughputs_alone(self) -> dict[int, float]:
        """Work per second of one worker alone, by seed."""
        return {seed: self.work_alone / fmean(one.seconds) for seed, one in self.alone.items()}

    @property
    def throughput(self) -> Interval:
        """Mean work per second."""
        return interval(self.throughputs.values())

    @property
    def speed_up(self) -> Interval | None:
        """Throughput over that of one worker alone, by pairs of a seed; None without one."""
        return ratio(self.throughputs, self.throughputs_alone).interval

    @property
    def efficiency(self) -> Interval | None:
        """Speed-up over the number of workers, in percent; 100 is ideal."""
        found = self.speed_up
        return found and found.scaled(100 / self.cell.workers)

    @property
    def seconds(self) -> Interval:
        """Seconds of an update."""
        return interval(fmean(found.seconds) for found in self.found.values())

    @property
    def first(self) -> Found:
        """The result of the first start."""
        return next(iter(self.found.values()))

    @property
    def model_bytes(self) -> int:
        """Size of all weights."""
        return sum(self.first.shards)


def chart_by_workers(
    rows: Sequence[Row], curves: Sequence[Curve], *, name: str, y_title: str, caption: str
) -> Chart:
    """Return a chart of the columns `workers` and `value`."""
    return Chart(
        name=name, x="workers", y="value", x_title="Workers", y_title=y_title, caption=caption,
        ticks=sorted({row.cell.workers for row in rows}), from_zero=True, curves=curves,
    )  # fmt: skip


def starts_of(
    cells: Sequence[Cell], *, repeats: int, data: Mapping[str, Path], out: Path
) -> list[Start]:
    """Return the starts of a study: every cell once, then every cell again.

    `data` holds the data folders of recipes by their names in the study.
    """
    return [
        cell.start(seed, data=data.get(cell.configuration), out=out)
        for seed in range(1, repeats + 1)
        for cell in cells
    ]


def read_by_cell(starts: Sequence[Start]) -> dict[str, dict[int, Found]]:
    """Return the existing records by cell and seed; raise StudyError as Start.read does."""
    by_cell: dict[str, dict[int, Found]] = {}
    for start in starts:
        record = start.read()
        if record is not None:
            by_cell.setdefault(start.cell, {})[start.seed] = record
    return by_cell


def carry_out(starts: Sequence[Start], report: Callable[[Start, Found], None]) -> None:
    """Run the starts without a record one by one; call `report` after each.

    Raises StudyError for records of another study before anything is started.
    """
    for start in [start for start in starts if start.read() is None]:
        load = os.getloadavg()[0]
        workers = measure_on_hosts(start.job, start.placement)
        result = put_together(workers, start.placement, updates=start.job.updates)
        record = {
            "cell": start.cell,
            "seed": start.seed,
            "found": asdict(result),
            "load_before": load,
            "machine": f"{platform.machine()}, {available_cores()} cores",
            "commit": source_commit(),
            "versions": versions(),
            "settings": start.settings,
        }
        write_whole(start.path, json.dumps(record, indent=1).encode())
        report(start, result)


def put_together(workers: Sequence[dict[str, Any]], placement: Placement, *, updates: int) -> Found:
    """Combine the results of the workers of a start, given by rank.

    Counters belong to hosts, so only those of the first worker on each host are used.
    """
    first = {host: rank for rank, host in reversed(list(enumerate(placement.hosts)))}
    received, sent = {}, {}
    for host in sorted(first, key=lambda host: first[host]):
        begin, middle, end = workers[first[host]]["counters"]
        pairs = [
            (last - between) - (between - early)
            for early, between, last in zip(begin, middle, end, strict=True)
        ]
        received[host], sent[host] = (total / updates for total in pairs)
    gradients = sum(worker["gradients"] for worker in workers)
    return Found(
        seconds=workers[0]["seconds"],
        sent=sent,
        received=received,
        shards=workers[0]["shards"],
        late=sum(worker["late"] for worker in workers) / gradients if gradients else 0.0,
        rates=[worker["rates"] for worker in workers if worker["rates"] or worker["gradients"]],
        device_batch=workers[0]["device_batch"],
    )
