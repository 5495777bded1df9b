"""Starts of workers on hosts: how they are started, what is measured, and its page.

    python -m largebatch.lab.studies.hosts FOLDER

is one worker. It makes the updates of `largebatch train`, by the same stage, in three segments: the
warm-up, one update, and one update plus the timed ones. No worker sends anything at either end of a
segment, when the counters of its host's link are read. What is sent besides updates is the same in
the last two segments, so the difference of their counters is the traffic of the timed updates.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import BackendName
from largebatch.errors import LargebatchError, RequestedStopError, StudyError
from largebatch.formatting import plural
from largebatch.lab.protocols.server import divide
from largebatch.lab.studies import words
from largebatch.lab.studies.doubts import CellRuns, StudyFinding, doubts_about
from largebatch.lab.studies.metrics import interval_line
from largebatch.lab.studies.namespaces import (
    CARD,
    Counters,
    HostCommand,
    addresses,
    read_counters,
    run_on_hosts,
)
from largebatch.lab.studies.records import Count, Duration, Json, Share, StudyRecord, read_as
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import (
    PROBED,
    Cell,
    OnHosts,
    Slot,
    Study,
    Values,
    naming,
    recipe_of,
)
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import (
    Chart,
    Column,
    Line,
    Panel,
    Series,
    Table,
    columns_over,
    line_chart,
)
from largebatch.report.seeds import Interval, interval, ratio
from largebatch.runs.build import open_session
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.launch import reporting_errors
from largebatch.runs.options import Options
from largebatch.storage import write_whole
from largebatch.tracking.events import Event, StepEvent
from largebatch.training.loop import Criterion
from largebatch.training.stages import STAGES

IDEAL = "ideal"
"""Name of the line of as many times one worker, for charts that show it."""

_PORT = 29_500

_UNTIMED = 1  # updates at the start of the last two segments


class PacedCriterion:
    """A criterion that sleeps until a gradient has taken its set time.

    Workers of a study may have fewer cores than there are hosts. So each computes the gradient of
    a few samples only, and sleeps before backward until the time of its nominal mini-batch is
    over. The gradient and all messages are real; the time is that of a host with its own core. It
    starts with the forward pass. Backward comes on top; for a `late` gradient so does the excess
    of its few samples over the set time.
    """

    def __init__(self, criterion: Criterion, model: nn.Module, seconds: Iterator[float]) -> None:
        self._criterion = criterion
        self._seconds = seconds
        self._begun = 0.0
        self.gradients = 0
        self.late = 0
        """Number of gradients that took longer than their set time."""

        model.register_forward_pre_hook(self._begin)

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, after the set time."""
        loss = self._criterion(outputs, labels)
        if torch.is_grad_enabled():
            # Evaluations pass here too, without gradients; they are not part of a set time.
            left = self._begun + next(self._seconds) - time.perf_counter()
            self.gradients += 1
            self.late += left < 0
            # Before backward, because its messages must leave when those of a real host would.
            time.sleep(max(0.0, left))
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord(StudyRecord):
    """Record of one start of the workers of a cell."""

    seconds: Annotated[tuple[Duration, ...], Field(min_length=1)]
    """Seconds of each timed update, on the first worker or server."""

    late: Share
    """Fraction of gradients that took longer than their set time."""

    shares: Annotated[tuple[Annotated[Count, Field(ge=1)], ...], Field(min_length=1)]
    """Bytes of the weights on each server; without servers those of all weights."""

    received: tuple[float, ...]
    sent: tuple[float, ...]
    """Bytes of payload in an update by host, from the counters of its network interface."""

    rates: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...]
    """Learning rate of every update on every worker that updates weights, in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult:
    """Result of one start of the workers of a cell, or of a simulated one."""

    seconds: Sequence[float]
    """Seconds of each timed update, on the first worker or server."""

    late: float = 0.0
    """Fraction of gradients that took longer than their set time."""

    shares: Sequence[int] = ()
    """Bytes of the weights on each server; without servers those of all weights."""

    record: StartRecord | None = None
    """None for a simulation."""


@dataclass(frozen=True, kw_only=True)
class HostsCell(Cell):
    """A recipe on a number of workers that are started on hosts."""

    workers: int
    """Number of workers that compute gradients."""

    samples: int
    """Samples of each worker in an update."""

    workers_per_host: tuple[int, ...]
    megabits: float
    """Rate of each host's link in each direction, in Mbit/s."""

    on_hosts: OnHosts
    look: str
    """Name of its layout or place; each has a colour on the page."""

    backend: BackendName = "torch"
    """Library that sums the gradients of several workers."""

    @property
    def definition(self) -> Json:
        """Recipe, times and placement."""
        elsewhere = {"workers", "megabits", "paper"}  # where they decide, or after the starts
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "on_hosts": self.on_hosts.model_dump(mode="json", exclude=elsewhere),
            "samples": self.samples,
            "workers_per_host": self.workers_per_host,
            "megabits": self.megabits,
            "backend": self.backend,
        }

    @property
    def hosts(self) -> list[str]:
        """Host of every worker, by rank."""
        names = addresses(len(self.workers_per_host))
        numbers = zip(names, self.workers_per_host, strict=True)
        return [name for name, number in numbers for _ in range(number)]

    def carry_out(self, slot: Slot, values: Values, options: Options) -> Json:
        """Start the workers once, on hosts made for them, and record what they measure.

        Raises LargebatchError with a worker's message if the user can fix it, WorkerFailedError if
        a worker was lost, BackendError if this machine cannot make hosts.
        """
        del values
        seeded = replace(self, recipe=self.recipe.model_copy(update={"seed": slot.seed}))
        backend: BackendName = self.backend if self.workers > 1 else "auto"
        with tempfile.TemporaryDirectory(prefix="largebatch-") as name:
            folder = Path(name)
            run_options = replace(options, out=folder / "run", backend=backend)
            run_options.out.mkdir()
            (folder / JOB).write_bytes(_JOB.dump_json((seeded, run_options)))
            command = [sys.executable, "-m", "largebatch.lab.studies.hosts", name]
            commands = [
                HostCommand(host, command, environment(rank, self.hosts))
                for rank, host in enumerate(self.hosts)
            ]
            try:
                run_on_hosts(
                    commands,
                    hosts=addresses(len(self.workers_per_host)),
                    megabits=self.megabits,
                    horovod=backend == "horovod",
                )
            except RequestedStopError:
                raise InterruptedStudyError from None
            files = [folder / f"worker-{rank}.json" for rank in range(len(self.hosts))]
            workers = [json.loads(path.read_bytes()) for path in files]
        return {"seed": slot.seed, **combined(workers, self.hosts, updates=self.on_hosts.updates)}

    @property
    def probe(self) -> "HostsCell":
        """The cell with few updates."""
        few = {"warm_up": 1, "updates": PROBED - 1}
        return replace(self, on_hosts=self.on_hosts.model_copy(update=few))

    def seconds_of(self, probed: Json) -> float:
        """Return the seconds of a start: its probe's, and those of all further updates."""
        further = self.on_hosts.warm_up + self.on_hosts.updates - PROBED
        return float(probed["ended"] - probed["begun"] + further * fmean(probed["seconds"]))


def combined(workers: Sequence[Json], hosts: Sequence[str], *, updates: int) -> Json:
    """Return the results of a start from those of its workers; `hosts` has the host of each.

    All workers of a host read the same counters, so the first one's are taken.
    """
    received, sent = [], []
    for host in dict.fromkeys(hosts):
        marks = [Counters(*mark) for mark in workers[hosts.index(host)]["counters"]]
        before, between, after = marks  # the second segment is between the first two
        # Both segments have the same messages at their ends. The difference is that of the updates.
        received.append((after.received - 2 * between.received + before.received) / updates)
        sent.append((after.sent - 2 * between.sent + before.sent) / updates)
    gradients = sum(worker["gradients"] for worker in workers)
    return {
        "seconds": workers[0]["seconds"],
        "late": sum(worker["late"] for worker in workers) / gradients if gradients else 0.0,
        "shares": workers[0]["shares"],
        "received": received,
        "sent": sent,
        "rates": [worker["rates"] for worker in workers if worker["rates"]],
    }


JOB = "job.json"
"""Name of the file with what all workers of a start read: the cell, of its seed, and options."""

_JOB: TypeAdapter[tuple[HostsCell, Options]] = TypeAdapter(tuple[HostsCell, Options])


def hosts_cell(  # noqa: PLR0913 -- where it is in the study, and what it starts
    study: Study,
    folder: Path,
    configuration: str,
    variant: str,
    *,
    workers: int,
    samples: int,
    look: str,
    protocol: Json | None = None,
    backend: BackendName = "torch",
    one_host: bool = False,
) -> HostsCell:
    """Return the cell of workers with `samples` samples each in an update, set or computed.

    Raises RecipeError naming the cell if its recipe, relative to `folder`, does not fit, or is
    shorter than what is measured.
    """
    entry = study.recipes[configuration]
    section = study.servers or study.scaling
    on_hosts = entry.on_hosts
    assert on_hosts is not None
    assert section is not None
    computed = samples
    if on_hosts.compute is not None:
        computed = samples * on_hosts.compute.computed // on_hosts.mini_batch
    with naming(f"{configuration}/{variant}"):
        base = recipe_of(entry, folder)
        tree = base.model_dump(mode="json")
        # The recipe has the few samples that are computed; the nominal mini-batch is only slept
        # for.
        tree["batch"]["global_batch"] = workers * computed
        tree["polish"] = None
        tree["evaluation"] = {}
        tree["protocol"] = protocol
        recipe = validate_tree(Recipe, tree, source=base.name)
        processes = recipe.protocol.workers if recipe.protocol else workers
        plan = make_plan(recipe, workers=processes)
        needed = segments_of(on_hosts)[-1]
        if plan.steps <= needed:
            raise LargebatchError(
                f"the recipe ends after {plan.steps} updates, and {needed} are made; give it a "
                "longer duration, or less to measure"
            )
        if plan.accumulation > 1:
            raise LargebatchError(
                f"{computed} samples that are really computed make {plan.accumulation} "
                "micro-batches, and a gradient is slept for once; give a smaller `computed`"
            )
    return HostsCell(
        configuration=configuration, variant=variant, recipe=recipe, seeds=study.seeds,
        workers=workers, samples=samples, megabits=on_hosts.megabits or section.megabits,
        on_hosts=on_hosts, look=look, backend=backend,
        workers_per_host=(processes,) if one_host else (1,) * processes,
    )  # fmt: skip


def segments_of(on_hosts: OnHosts) -> tuple[int, int, int]:
    """Return the numbers of updates made at the ends of the segments."""
    first = on_hosts.warm_up
    return first, first + _UNTIMED, first + 2 * _UNTIMED + on_hosts.updates


class StepTimes(list[float]):
    """A tracker that keeps the seconds of each update."""

    def record(self, event: Event) -> None:
        """Record one event."""
        if isinstance(event, StepEvent):
            self.append(event.step_seconds)


@contextmanager
def applied_rates(optimizer: Optimizer) -> Iterator[list[str]]:
    """Yield the learning rate of every update of this worker; it grows as updates are made.

    It is read from the parameter groups when the optimizer steps, so it is the rate that is applied
    and not that of the schedule. Hexadecimal numbers (float.hex) are exact.
    """
    rates: list[str] = []

    def read(stepping: Optimizer, *_: object) -> None:
        of_groups = dict.fromkeys(float(group["lr"]).hex() for group in stepping.param_groups)
        rates.append(" ".join(of_groups))

    handle = optimizer.register_step_pre_hook(read)
    try:
        yield rates
    finally:
        handle.remove()


def measure(cell: HostsCell, options: Options) -> Json:
    """Train, and return the result of this worker."""
    on_hosts = cell.on_hosts
    recipe = cell.recipe
    if recipe.model.name == words.NAME:
        opening = words.open_words(recipe, options)
    else:
        opening = open_session(recipe, options, {"command": "study"})
    with opening as opened:
        session = opened
        paced = None
        rank = opened.backend.rank
        if on_hosts.compute is not None:
            times = on_hosts.compute.times(cell.samples, seed=recipe.seed, worker=rank)
            paced = PacedCriterion(opened.criterion, opened.state.model, times)
            session = replace(opened, criterion=paced)
        steps = StepTimes()
        session.log.trackers.append(steps)
        optimizer = session.state.updater.optimizer
        counters = []
        with applied_rates(optimizer) as rates:
            # By the stage itself, so that the timed updates are those of `largebatch train`.
            for until in segments_of(on_hosts):
                STAGES[0].run(session, range(session.plan.train_steps), until)
                session.saver.finish()
                counters.append(idle_counters(session.backend))
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return {
            "rank": rank,
            "seconds": steps[-on_hosts.updates :],
            "counters": counters,
            "rates": rates,
            "shares": server_bytes([weight.nbytes for weight in weights], recipe.protocol),
            "gradients": paced.gradients if paced else 0,
            "late": paced.late if paced else 0,
        }


def idle_counters(backend: Backend) -> Counters:
    """Read the counters of this host's link while no worker sends anything."""
    # The first barrier: all have ended their sums, and nothing is under way.
    backend.barrier()
    counters = read_counters(Path("/proc/net/dev").read_text())
    backend.barrier()  # nobody continues, or leaves, before all have read
    return counters


def server_bytes(sizes: Sequence[int], protocol: Protocol | None) -> list[int]:
    """Return the bytes of the weights on each server, of tensors of these sizes."""
    parts = divide(sizes, protocol.num_servers if protocol else 1)
    return [sum(sizes[number] for number in part) for part in parts]


def environment(rank: int, hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the variables that torchrun and horovodrun would set, and the network interface."""
    here = hosts[rank]
    names = addresses(len(set(hosts)))
    local_rank, local_size = str(hosts[:rank].count(here)), str(hosts.count(here))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": names[hosts[0]],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": CARD,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": local_size,
        "HOROVOD_CROSS_RANK": str(list(names).index(here)),
        "HOROVOD_CROSS_SIZE": str(len(names)),
        "HOROVOD_HOSTNAME": here,
        # Hosts of a study share the cores of this machine.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@dataclass(frozen=True, kw_only=True)
class HostsRow:
    """A cell with its starts by seed; work is counted in samples."""

    cell: HostsCell
    starts: Mapping[int, StartResult]
    alone: "HostsRow | None" = None
    """One worker alone; None: it is this."""

    scaling: str | None = None
    """weak or strong; None in a study of servers."""

    @property
    def seconds(self) -> Interval:
        """Seconds of an update."""
        return interval(fmean(start.seconds) for start in self.starts.values())

    @property
    def throughputs(self) -> dict[int, float]:
        """Samples per second of all workers, by seed."""
        samples = self.cell.workers * self.cell.samples
        return {seed: samples / fmean(start.seconds) for seed, start in self.starts.items()}

    @property
    def speed_up(self) -> Interval | None:
        """Throughput over that of one worker alone, by pairs of a seed; None without one."""
        return ratio(self.throughputs, (self.alone or self).throughputs)

    @property
    def efficiency(self) -> Interval | None:
        """Speed-up over the number of workers, in percent; 100 is ideal."""
        speed_up = self.speed_up
        return speed_up and speed_up.scaled(100 / self.cell.workers)


def starts_of(cell: HostsCell, records: Records) -> dict[int, StartResult]:
    """Return the starts of a cell by seed; raise StudyError for a damaged record."""
    starts = {}
    hosts = len(cell.workers_per_host)
    protocol = cell.recipe.protocol
    servers = 1 if protocol is None else protocol.num_servers
    for name, content in records.get(cell.name, {}).items():
        source = f"{cell.name}/{name}.json"
        record = read_as(StartRecord, content, source=source)
        for key, values, expected in (
            ("received", record.received, hosts),
            ("sent", record.sent, hosts),
            ("shares", record.shares, servers),
        ):
            if len(values) != expected:
                raise StudyError(
                    f"{source}: {key}: has {plural(len(values), 'value')}, expected {expected}; "
                    "remove the file"
                )
        starts[record.seed] = StartResult(
            seconds=record.seconds, late=record.late, shares=record.shares, record=record
        )
    return starts


def doubts_about_rows(
    rows: Sequence[HostsRow], every: Sequence[HostsRow], *, of_time: bool = True
) -> list[str]:
    """Return what speaks against a finding about some of these rows, or about their times.

    Simulations have no doubts: they follow from the study alone.
    """
    compared = {}
    for row in rows:
        for compared_row in (row, row.alone or row):
            if records_of(compared_row):
                compared[compared_row.cell.name] = CellRuns(
                    name=compared_row.cell.name,
                    runs=records_of(compared_row),
                    seeds=compared_row.cell.seeds,
                )
    if not compared:
        return []
    study = [record for row in every for record in records_of(row).values()]
    return doubts_about(list(compared.values()), study=study, of_time=of_time, run="start")


def records_of(row: HostsRow) -> dict[int, StudyRecord]:
    """Return the records of a row by seed; none for a simulation."""
    return {seed: start.record for seed, start in row.starts.items() if start.record}


def slower_than_alone(rows: Sequence[HostsRow], how: str) -> Iterator[StudyFinding]:
    """Yield which layouts and places are slower than one worker alone, beyond the noise of starts.

    Without this a page could praise the better of two that both lose time.
    """
    groups: dict[tuple[str, str, str], list[HostsRow]] = {}
    for row in rows:
        if row.cell.workers > 1 and row.speed_up is not None and row.speed_up.mean < 1:
            # One finding for all numbers of workers of a layout.
            key = row.cell.configuration, row.cell.look, row.scaling or ""
            groups.setdefault(key, []).append(row)
    for (recipe, look, scaling), slow in groups.items():
        surely = [row for row in slow if row.speed_up is not None and row.speed_up.high < 1]
        doubts = doubts_about_rows(surely or slow, rows)
        if not surely:
            doubts.append("within the noise of starts")
        described = ", ".join(
            f"{row.speed_up.with_ends('.2f', ' times')} on {row.cell.workers} workers"
            for row in surely
            if row.speed_up is not None
        )
        yield StudyFinding(
            about=", ".join(filter(None, (recipe, how, scaling, f"{look} against one worker"))),
            text=f"SLOWER THAN ONE WORKER: {described}",
            doubts=doubts,
        )


def table_of(
    name: str,
    rows: Sequence[HostsRow],
    looks: Mapping[str, Series],
    further: Sequence[Column] = (),
) -> Table:
    """Return the table that shows how fast each row is, with further columns."""
    column = columns_over(rows)

    def late(row: HostsRow) -> float:
        return 100 * fmean(start.late for start in row.starts.values())

    columns = [
        column("Cell", lambda row: row.cell.name, None),
        column("Scaling", lambda row: row.scaling, None),
        column("Hosts", lambda row: len(row.cell.workers_per_host), "d"),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Samples each", lambda row: row.cell.samples, "d"),
        column("Samples/s", lambda row: fmean(row.throughputs.values()), ",.1f"),
        column("Speed-up", lambda row: row.speed_up and row.speed_up.mean, ".2f"),
        column("±", lambda row: row.speed_up and row.speed_up.reach, ".2f"),
        column("Efficiency, %", lambda row: row.efficiency and row.efficiency.mean, ".0f"),
        column("An update, s", lambda row: row.seconds.mean, ",.4f"),
        *further,
        column("Link, Mbit/s", lambda row: row.cell.megabits, ",g"),
        column("Late gradients, %", late, ".1f"),
        column("Starts", lambda row: len(row.starts), "d"),
    ]
    return Table(name=name, columns=columns, series=[looks[row.cell.look] for row in rows])


def chart_of(
    title: str,
    rows: Sequence[HostsRow],
    looks: Mapping[str, Series],
    *,
    simulated: Sequence[HostsRow] = (),
    by: Literal["workers", "megabits", "samples"] = "workers",
    axis: str = "Workers",
) -> Chart:
    """Return a chart of the speed-up of each layout or place: points measured, lines simulated.

    `by` names the field of a cell that the horizontal axis has, and `axis` its title.
    """
    lines = []
    for look, shown in looks.items():
        for some in (simulated, rows):
            line = [row for row in some if row.cell.look == look]
            if by == "workers":  # every line starts at one worker alone
                line += [row for row in some if row.cell.workers == 1]
            else:
                line = [row for row in line if row.cell.workers > 1]
            means = {getattr(row.cell, by): row.speed_up for row in line if row.speed_up}
            x = sorted(means)
            if some is rows:
                line_too = not simulated
                lines.append(interval_line(shown, x, [means[n] for n in x], line=line_too))
            else:
                y = [means[n].mean for n in x]
                lines.append(Line(series=shown, x=x, y=y, points=False))
    if IDEAL in looks:
        x = sorted({row.cell.workers for row in rows})
        lines.append(Line(series=looks[IDEAL], x=x, y=x, points=False))
    log: Literal["", "x"] = "" if by == "workers" else "x"
    panel = Panel(lines=lines, x=axis, y="Speed-up", log=log, from_zero=True)
    name = f"speed-up-{title.replace(', ', '-')}-{by}"
    caption = f"{title}: points are measured, lines simulated." if simulated and rows else title
    return line_chart(name, panel, title=f"Speed-up: {title}", caption=caption)


def main(name: str) -> None:
    """Measure the job in a folder, and write the result there."""
    folder = Path(name)
    result = measure(*_JOB.validate_json((folder / JOB).read_bytes()))
    write_whole(folder / f"worker-{result['rank']}.json", json.dumps(result).encode())


if __name__ == "__main__":
    with reporting_errors():
        main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may wait for a worker that is gone
