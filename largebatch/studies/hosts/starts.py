"""Measurements that are carried out once: each start of workers is one file, whole or not there.

A study that was stopped goes on with the same command, and loses what was under way.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from largebatch.distributed.environment import available_cores
from largebatch.errors import StudyError
from largebatch.storage import write_whole
from largebatch.studies.hosts.measure import Placement, measure_on_hosts
from largebatch.studies.hosts.worker import Job
from largebatch.tracking.environment import source_commit, versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one start has measured."""

    seconds: list[float]
    """Of each update that was timed, on the first worker or server."""

    sent: dict[str, float]
    received: dict[str, float]
    """Bytes of payload in an update, by host."""

    shards: list[int]
    """Bytes of the weights on each parameter server, or of all of them."""

    late: float
    """The share of gradients that took longer than was set."""

    rates: list[list[str]]
    """The learning rate of every update on every worker, in hexadecimal."""

    device_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the workers of a cell, with a seed, and the file of its record."""

    cell: str
    seed: int
    job: Job
    placement: Placement
    path: Path

    @property
    def settings(self) -> dict[str, Any]:
        """What the record was measured with, as JSON."""
        job = self.job
        found: dict[str, Any] = json.loads(
            json.dumps(
                {
                    "recipe": job.recipe.model_dump(mode="json"),
                    "compute": job.compute and job.compute.model_dump(mode="json"),
                    "samples": job.samples,
                    "warm_up": job.warm_up,
                    "updates": job.updates,
                    "placement": asdict(self.placement),
                }
            )
        )
        return found

    def read(self) -> Found | None:
        """Return the record, None where there is none.

        Raises StudyError where it is of another study.
        """
        try:
            record = json.loads(self.path.read_bytes())
            settings, found = record["settings"], Found(**record["found"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise StudyError(f"{self.path}: is not the record of a start; remove it") from None
        if settings != self.settings:
            raise StudyError(
                f"{self.path}: was recorded with other settings than the study has now; give "
                "another --out, or remove it"
            )
        return found


class Cell(Protocol):
    """What a study measures, whatever its kind."""

    @property
    def configuration(self) -> str:
        """The study's name of its recipe."""

    def start(self, seed: int, *, data: Path | None, out: Path) -> Start:
        """Return one start of its workers."""


def starts_of(
    cells: Sequence[Cell], *, repeats: int, data: Mapping[str, Path], out: Path
) -> list[Start]:
    """Return the starts of a study, every cell once before any is started again.

    `data` are the folders of recipes by their names in the study.
    """
    return [
        cell.start(seed, data=data.get(cell.configuration), out=out)
        for seed in range(1, repeats + 1)
        for cell in cells
    ]


def read_by_cell(starts: Sequence[Start]) -> dict[str, dict[int, Found]]:
    """Return the records that there are, by cell and seed; raise StudyError as Start.read does."""
    by_cell: dict[str, dict[int, Found]] = {}
    for start in starts:
        found = start.read()
        if found is not None:
            by_cell.setdefault(start.cell, {})[start.seed] = found
    return by_cell


def carry_out(starts: Sequence[Start], report: Callable[[Start, Found], None]) -> None:
    """Measure what has no record yet, one start after the other; `report` is called after each.

    Raises StudyError for records of another study before anything is started.
    """
    for start in [start for start in starts if start.read() is None]:
        load = os.getloadavg()[0]
        workers = measure_on_hosts(start.job, start.placement)
        found = put_together(workers, start.placement, updates=start.job.updates)
        record = {
            "cell": start.cell,
            "seed": start.seed,
            "found": asdict(found),
            "load_before": load,
            "machine": f"{platform.machine()}, {available_cores()} cores",
            "commit": source_commit(),
            "versions": versions(),
            "settings": start.settings,
        }
        write_whole(start.path, json.dumps(record, indent=1).encode())
        report(start, found)


def put_together(workers: Sequence[dict[str, Any]], placement: Placement, *, updates: int) -> Found:
    """Return what the workers of a start have found, by rank, as one.

    The counters are of hosts, so that those of the first worker on each are taken.
    """
    first = {host: rank for rank, host in reversed(list(enumerate(placement.hosts)))}
    received, sent = {}, {}
    for host in sorted(first, key=lambda host: first[host]):
        begin, middle, end = workers[first[host]]["counters"]
        pairs = [
            (last - between) - (between - early)
            for early, between, last in zip(begin, middle, end, strict=True)
        ]
        received[host], sent[host] = (each / updates for each in pairs)
    gradients = sum(one["gradients"] for one in workers)
    return Found(
        seconds=workers[0]["seconds"],
        sent=sent,
        received=received,
        shards=workers[0]["shards"],
        late=sum(one["late"] for one in workers) / gradients if gradients else 0.0,
        rates=[one["rates"] for one in workers if one["rates"] or one["gradients"]],
        device_batch=workers[0]["device_batch"],
    )
