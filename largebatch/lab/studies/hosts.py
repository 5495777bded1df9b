"""Starts of workers on hosts: how they are placed and started, what is measured, and its rows.

    python -m largebatch.lab.studies.hosts JOB FOLDER

is one worker. It makes the updates of `largebatch train`, by the same stage, in three stretches:
the warm-up, a few updates, and as many plus the timed ones. All workers are idle at both ends of
each stretch. The last two stretches send the same while idle, so the difference of their counters
is the traffic of the timed updates alone.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import LOST
from largebatch.errors import LargebatchError, PeerLostError, StudyError, WorkerFailedError
from largebatch.lab.protocols.split import server_bytes
from largebatch.lab.studies.metrics import Interval, interval, ratio
from largebatch.lab.studies.namespaces import (
    CARD,
    Command,
    Counters,
    addresses,
    read_counters,
    run_on_hosts,
)
from largebatch.lab.studies.study import Cell, Compute, OnHosts, Task
from largebatch.lab.studies.trained import circumstances
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session
from largebatch.runs.options import Options
from largebatch.storage import write_whole
from largebatch.tracking.events import Event, Step
from largebatch.training.loop import Criterion
from largebatch.training.stages import STAGES

USER = 2
"""Exit code of an error that the user can fix."""

_UNTIMED = 1
"""Number of untimed updates at the start of a stretch."""

_PORT = 29_500
_SHOWN_LINES = 20

Json = dict[str, Any]


class PacedCriterion:
    """A criterion that sleeps until a gradient has taken its set time.

    Workers of a study may have fewer cores than there are hosts. So each computes the gradient of
    a few samples only, and sleeps before backward until the time of its nominal mini-batch is
    over. The gradient and all messages are real; the time is that of a host with its own core. It
    starts with the forward pass. Backward comes on top; for a `late` gradient so does the excess
    of its few samples over the set time.
    """

    def __init__(self, criterion: Criterion, model: nn.Module, seconds: Iterator[float]) -> None:
        self._criterion, self._seconds = criterion, seconds
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
            left = self._begun + next(self._seconds) - time.perf_counter()
            self.gradients += 1
            self.late += left < 0
            time.sleep(max(0.0, left))
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of workers on hosts, and their links."""

    workers_per_host: Sequence[int]
    megabits: float | None
    """Rate of each host's link in each direction, in Mbit/s; None for no limit."""

    backend: Literal["torch", "horovod"] = "torch"

    @property
    def hosts(self) -> list[str]:
        """Host of every worker, by rank."""
        names = addresses(len(self.workers_per_host))
        pairs = zip(names, self.workers_per_host, strict=True)
        return [name for name, number in pairs for _ in range(number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of a start, the same for all workers."""

    recipe: Recipe
    options: Options
    compute: Compute | None
    """Distribution of gradient times; None for the real times."""

    samples: float = 0.0
    """Nominal mini-batch of a worker, for `compute`."""

    warm_up: int
    updates: int
    """Number of timed updates, after the warm-up updates."""

    @property
    def stretches(self) -> tuple[int, int, int]:
        """Numbers of updates at the ends of the stretches; the last two start with untimed ones."""
        first = self.warm_up
        return first, first + _UNTIMED, first + 2 * _UNTIMED + self.updates


JOB = TypeAdapter(Job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Result of one start of the workers of a cell."""

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


_START = TypeAdapter(Start)


@dataclass(frozen=True, kw_only=True)
class HostsCell(Cell):
    """A recipe on a number of workers that are started on hosts."""

    workers: int
    """Number of workers that compute gradients."""

    samples: int
    """Samples of each worker in an update."""

    placement: Placement
    on_hosts: OnHosts

    @property
    def compute(self) -> Compute | None:
        """Set time of gradients."""
        return self.on_hosts.compute

    @property
    def definition(self) -> Json:
        """Recipe, times and placement."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "compute": self.compute and self.compute.model_dump(mode="json"),
            "samples": self.samples,
            "warm_up": self.on_hosts.warm_up,
            "updates": self.on_hosts.updates,
            "placement": asdict(self.placement),
        }

    def job(self, seed: int, options: Options) -> Job:
        """Return the job of one start."""
        return Job(
            recipe=self.recipe.model_copy(update={"seed": seed}),
            options=options,
            compute=self.compute,
            samples=self.samples,
            warm_up=self.on_hosts.warm_up,
            updates=self.on_hosts.updates,
        )

    def carry_out(self, task: Task) -> Json:
        """Start the workers once, and record what they measure."""
        backend = self.placement.backend if self.workers > 1 else "auto"
        own = {**task.options, "backend": backend}
        workers = measure_on_hosts(
            self.job(task.slot.seed, Options(out=Path(), report=False, **own)), self.placement
        )
        result = put_together(workers, self.placement, updates=self.on_hosts.updates)
        return {"seed": task.slot.seed, "start": asdict(result), **circumstances()}

    def describe(self, record: Json) -> str:
        """Describe the time of an update."""
        start = record["start"]
        late = f", {start['late']:.0%} of gradients late" if start["late"] else ""
        return f"{fmean(start['seconds']):.4g} s an update{late}"


@dataclass(slots=True)
class StepTimes:
    """A tracker that records the time of each update."""

    seconds: list[float] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Record one event."""
        if isinstance(event, Step):
            self.seconds.append(event.step_seconds)


@contextmanager
def applied_rates(optimizer: Optimizer) -> Iterator[list[str]]:
    """Yield the learning rate of every update of this worker, as it makes it.

    Rates are hexadecimal (float.hex), which is exact. They are read from the parameter groups at
    the optimizer's step: the applied rate, not the schedule's.
    """
    rates: list[str] = []

    def read(stepping: Optimizer, *_: object) -> None:
        rates.append(" ".join(dict.fromkeys(float(g["lr"]).hex() for g in stepping.param_groups)))

    handle = optimizer.register_step_pre_hook(read)
    try:
        yield rates
    finally:
        handle.remove()


def measure(job: Job) -> Json:
    """Train, and return the result of this worker."""
    with open_session(job.recipe, job.options, {"command": "study"}) as opened:
        session, paced, training = opened, None, opened.training
        if job.compute is not None:
            seed, rank = job.recipe.seed, training.backend.rank
            times = job.compute.times(job.samples, seed=seed, worker=rank)
            paced = PacedCriterion(training.criterion, training.state.model, times)
            session = replace(opened, training=replace(training, criterion=paced))
        steps = StepTimes()
        session.log.trackers.append(steps)
        marks = []
        with applied_rates(session.state.updater.optimizer) as rates:
            for until in job.stretches:
                STAGES[0].run(session, range(training.plan.train_steps), until)
                session.saver.finish()
                marks.append(_idle_counters(training.backend))
        return {
            "rank": training.backend.rank,
            "counters": marks,
            "seconds": steps.seconds[-job.updates :],
            "rates": rates,
            "gradients": paced.gradients if paced else 0,
            "late": paced.late if paced else 0,
            "shards": _shards(session.state.updater.optimizer, job.recipe.protocol),
        }


def _idle_counters(backend: Backend) -> Counters:
    """Read the counters while no worker sends anything."""
    backend.barrier()
    counters = read_counters(Path("/proc/net/dev").read_text())
    backend.barrier()
    return counters


def _shards(optimizer: Optimizer, protocol: Protocol | None) -> list[int]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    servers = 1 if protocol is None else protocol.num_servers
    return server_bytes(weights, servers, split=protocol is not None and protocol.split)


def measure_on_hosts(job: Job, placement: Placement) -> list[Json]:
    """Run a job on hosts made for it; return the result of each worker, by rank.

    Raises StudyError with a worker's message if the user can fix it, WorkerFailedError if a
    worker was lost, BackendError if this machine cannot make hosts.
    """
    hosts = placement.hosts
    with tempfile.TemporaryDirectory(prefix="largebatch-") as name:
        folder = Path(name)
        own = replace(job, options=replace(job.options, out=folder / "run"))
        (folder / "run").mkdir()
        (folder / "job.json").write_bytes(JOB.dump_json(own))
        words = [sys.executable, "-m", "largebatch.lab.studies.hosts"]
        words += [str(folder / "job.json"), str(folder)]
        commands = [
            Command(host, words, environment(rank, hosts), folder / f"output-{rank}")
            for rank, host in enumerate(hosts)
        ]
        codes = run_on_hosts(
            commands,
            hosts=addresses(len(placement.workers_per_host)),
            megabits=placement.megabits,
            horovod=placement.backend == "horovod",
        )
        if any(codes):
            raise_cause(codes, folder)
        files = [folder / f"worker-{rank}.json" for rank in range(len(hosts))]
        return [json.loads(path.read_bytes()) for path in files]


def raise_cause(codes: Sequence[int | None], folder: Path) -> None:
    """Raise the first failure that is not the consequence of another."""
    order = {USER: 0, None: 3, LOST: 2, 0: 4}
    rank = min(range(len(codes)), key=lambda rank: order.get(codes[rank], 1))
    code = codes[rank]
    text = (folder / f"output-{rank}").read_text(errors="replace").strip()
    if code == USER:
        raise StudyError(text.splitlines()[-1] if text else f"worker {rank} failed")
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    last = "\n".join(text.splitlines()[-_SHOWN_LINES:])
    raise WorkerFailedError(f"worker {rank} exited without reporting: {how}\n{last}".rstrip())


def environment(rank: int, hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the variables that torchrun and horovodrun would set, and the network interface."""
    here = hosts[rank]
    local, each = hosts[:rank].count(here), hosts.count(here)
    names = list(dict.fromkeys(hosts))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": addresses(len(names))[names[0]],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": CARD,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(each),
        "HOROVOD_CROSS_RANK": str(names.index(here)),
        "HOROVOD_CROSS_SIZE": str(len(names)),
        "HOROVOD_HOSTNAME": here,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def put_together(workers: Sequence[Json], placement: Placement, *, updates: int) -> Start:
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
    return Start(
        seconds=workers[0]["seconds"],
        sent=sent,
        received=received,
        shards=workers[0]["shards"],
        late=sum(worker["late"] for worker in workers) / gradients if gradients else 0.0,
        rates=[worker["rates"] for worker in workers if worker["rates"] or worker["gradients"]],
    )


def starts_of(cell: HostsCell, records: Mapping[str, Json]) -> dict[int, Start]:
    """Return the starts of a cell by seed; raise StudyError if a record is damaged."""
    starts = {}
    for name, record in records.items():
        try:
            starts[int(record["seed"])] = _START.validate_python(record["start"])
        except (KeyError, ValidationError):
            raise StudyError(f"{cell.name}/{name}.json: is not a start; remove it") from None
    return starts


@dataclass(frozen=True)
class HostsRow:
    """A cell with its starts by seed, and those of one worker alone."""

    cell: HostsCell
    starts: Mapping[int, Start]
    alone: Mapping[int, Start]
    work: float
    """Work of an update on all workers, in the unit of the throughput."""

    work_alone: float
    """Work of an update on one worker alone."""

    @property
    def throughputs(self) -> dict[int, float]:
        """Work per second, by seed."""
        return {seed: self.work / fmean(one.seconds) for seed, one in self.starts.items()}

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
        return interval(fmean(start.seconds) for start in self.starts.values())

    @property
    def first(self) -> Start:
        """The first start."""
        return next(iter(self.starts.values()))

    @property
    def model_bytes(self) -> int:
        """Size of all weights."""
        return sum(self.first.shards)


def main(job: str, folder: str) -> int:
    """Measure, and write the result to the folder; return the exit code."""
    try:
        result = measure(JOB.validate_json(Path(job).read_bytes()))
    except LargebatchError as error:
        sys.stdout.write(f"{error}\n")
        return USER
    except PeerLostError as error:
        sys.stdout.write(f"{error}\n")
        return LOST
    path = Path(folder) / f"worker-{result['rank']}.json"
    write_whole(path, json.dumps(result).encode())
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of libraries may wait for a worker that is gone
