"""One worker of a measurement on hosts: a program that trains, and counts what crossed its link.

    python -m largebatch.studies.hosts.worker JOB FOLDER

It makes the updates of `largebatch train`, by the same stage, in three stretches: those to warm up,
a few, and as many and the timed ones. Each stretch begins and ends with all workers at rest. What
a rest sends is in the last two alike, so that the difference of their counters is that of the
timed updates and of nothing else.
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

from largebatch.distributed.environment import LOST
from largebatch.errors import LargebatchError, PeerLostError
from largebatch.recipe.protocols import Hardsync
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_trainer
from largebatch.runs.options import Options
from largebatch.storage import write_whole
from largebatch.studies.hosts.compute import Compute, PacedCriterion
from largebatch.studies.hosts.namespaces import Counters, read_counters
from largebatch.tracking.events import Event, Step
from largebatch.training.protocols.exchange import Layout
from largebatch.training.protocols.server import divide
from largebatch.training.saving import finish_saving
from largebatch.training.stages import STAGES
from largebatch.training.trainer import Trainer

USER = 2
"""Exit code where the user can fix what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker of a measurement is told alike."""

    recipe: Recipe
    options: Options
    compute: Compute | None
    """None: gradients take what they take."""

    samples: float = 0.0
    """Of a worker's nominal mini-batch, for which `compute` is."""

    warm_up: int
    updates: int
    """Those that are timed, after so many to warm up."""

    @property
    def stretches(self) -> tuple[int, int, int]:
        """How many updates lie behind at the end of each stretch.

        The second and the third one begin alike, with updates that are not timed.
        """
        first = self.warm_up
        return first, first + self.untimed, first + 2 * self.untimed + self.updates

    @property
    def untimed(self) -> int:
        """Updates with which a stretch begins that are not timed."""
        return 1


JOB = TypeAdapter(Job)


@dataclass(slots=True)
class StepTimes:
    """A tracker that keeps how long each update took."""

    seconds: list[float] = field(default_factory=list)

    def record(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, Step):
            self.seconds.append(event.step_seconds)


@contextmanager
def applied_rates(optimizer: Optimizer) -> Iterator[list[str]]:
    """Yield the learning rate of every update that this worker makes, as it makes it.

    Rates are hexadecimal (float.hex), which loses no bit. They are read from the parameter groups
    when the optimizer steps: not what a schedule has, but what is applied.
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
    """Train, and return what this worker found, as JSON."""
    with open_trainer(job.recipe, job.options, {"command": "study"}) as opened:
        trainer, paced = _pace(opened, job)
        steps = StepTimes()
        trainer.trackers.append(steps)
        marks = []
        with applied_rates(trainer.state.updater.optimizer) as rates:
            for until in job.stretches:
                STAGES[0].run(trainer, range(trainer.plan.train_steps), until)
                finish_saving(trainer)
                marks.append(_read_counters(trainer))
        return {
            "rank": trainer.backend.rank,
            "counters": marks,
            "seconds": steps.seconds[-job.updates :],
            "rates": rates,
            "gradients": paced.gradients if paced else 0,
            "late": paced.late if paced else 0,
            "shards": _shards(trainer),
            "device_batch": trainer.plan.device_batch,
        }


def _pace(trainer: Trainer, job: Job) -> tuple[Trainer, PacedCriterion | None]:
    """Let gradients take the time that is set, if one is."""
    if job.compute is None:
        return trainer, None
    seed, rank = trainer.recipe.seed, trainer.backend.rank
    times = job.compute.times(job.samples, seed=seed, worker=rank)
    paced = PacedCriterion(trainer.criterion, trainer.state.model, times)
    return replace(trainer, criterion=paced), paced


def _read_counters(trainer: Trainer) -> Counters:
    """Read them when no worker sends anything: before it all have ended, and none goes on."""
    trainer.backend.barrier()
    found = read_counters(Path("/proc/net/dev").read_text())
    trainer.backend.barrier()
    return found


def _shards(trainer: Trainer) -> list[int]:
    """Return the bytes of the weights on each parameter server; without servers, of all weights."""
    groups = trainer.state.updater.optimizer.param_groups
    sizes = [weight.nbytes for group in groups for weight in group["params"]]
    protocol = trainer.recipe.protocol
    if not isinstance(protocol, Hardsync):
        return [sum(sizes)]
    parts = divide(sizes, len(Layout.of(protocol).servers))
    return [sum(sizes[number] for number in part) for part in parts]


def main(job: str, folder: str) -> int:
    """Measure, and leave what was found in the folder; return the exit code."""
    try:
        found = measure(JOB.validate_json(Path(job).read_bytes()))
    except LargebatchError as error:
        sys.stdout.write(f"{error}\n")
        return USER
    except PeerLostError as error:
        sys.stdout.write(f"{error}\n")
        return LOST
    path = Path(folder) / f"worker-{found['rank']}.json"
    write_whole(path, json.dumps(found).encode())
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads of libraries may wait for a worker that is gone
