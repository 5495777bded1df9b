"""One worker of a measurement on hosts: trains, and counts the traffic of its link.

    python -m largebatch.lab.studies.hosts.worker JOB FOLDER

It makes the updates of `largebatch train`, by the same stage, in three stretches: the warm-up, a
few updates, and as many plus the timed ones. All workers are idle at both ends of each stretch.
The last two stretches send the same while idle, so the difference of their counters is the
traffic of the timed updates alone.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch.optim import Optimizer

from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import LOST
from largebatch.errors import LargebatchError, PeerLostError
from largebatch.lab.protocols.split import server_bytes
from largebatch.lab.studies.hosts.compute import Compute, PacedCriterion
from largebatch.lab.studies.hosts.namespaces import Counters, read_counters
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session
from largebatch.runs.options import Options
from largebatch.storage import write_whole
from largebatch.tracking.events import Event, Step
from largebatch.training.session import Session
from largebatch.training.stages import STAGES

USER = 2
"""Exit code of an error that the user can fix."""

_UNTIMED = 1
"""Number of untimed updates at the start of a stretch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Job of a measurement, the same for all workers."""

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


def measure(job: Job) -> dict[str, Any]:
    """Train, and return the result of this worker as JSON."""
    with open_session(job.recipe, job.options, {"command": "study"}) as opened:
        session, paced = _pace(opened, job)
        training = session.training
        steps = StepTimes()
        session.log.trackers.append(steps)
        marks = []
        with applied_rates(session.state.updater.optimizer) as rates:
            for until in job.stretches:
                STAGES[0].run(session, range(training.plan.train_steps), until)
                session.saver.finish()
                marks.append(_read_counters(training.backend))
        return {
            "rank": training.backend.rank,
            "counters": marks,
            "seconds": steps.seconds[-job.updates :],
            "rates": rates,
            "gradients": paced.gradients if paced else 0,
            "late": paced.late if paced else 0,
            "shards": _shards(session.state.updater.optimizer, job.recipe.protocol),
            "device_batch": training.plan.device_batch,
        }


def _pace(session: Session, job: Job) -> tuple[Session, PacedCriterion | None]:
    """Set the time of gradients, if the job has one."""
    training = session.training
    if job.compute is None:
        return session, None
    seed, rank = training.seed, training.backend.rank
    times = job.compute.times(job.samples, seed=seed, worker=rank)
    paced = PacedCriterion(training.criterion, training.state.model, times)
    return replace(session, training=replace(training, criterion=paced)), paced


def _read_counters(backend: Backend) -> Counters:
    """Read the counters while no worker sends anything."""
    backend.barrier()
    counters = read_counters(Path("/proc/net/dev").read_text())
    backend.barrier()
    return counters


def _shards(optimizer: Optimizer, protocol: Protocol | None) -> list[int]:
    """Return the bytes of the weights on each parameter server; without servers, of all weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    servers = 1 if protocol is None else protocol.num_servers
    return server_bytes(weights, servers, split=protocol is not None and protocol.split)


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
