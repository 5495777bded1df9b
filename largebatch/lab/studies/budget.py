"""The time of the runs that a study has left, for its dry run.

What an update takes is measured now, on a few samples; runs of one cell are measured once.
"""

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from statistics import fmean

from largebatch.distributed.environment import available_cores
from largebatch.formatting import plural
from largebatch.lab.measure.estimate import estimate
from largebatch.lab.protocols.split import server_bytes
from largebatch.lab.studies.hosts.namespaces import payload_bandwidth
from largebatch.lab.studies.hosts.starts import Start
from largebatch.lab.studies.servers.simulated import weights_of
from largebatch.lab.studies.servers.traffic import beside, central, ring
from largebatch.lab.studies.staleness.run import Run
from largebatch.lab.studies.staleness.study import Cell
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe

TRAINING = "forward, backward and update"
STARTING = "starting workers, gradients and messages"
_MOST, _ENOUGH_SECONDS = 20, 1.0


def describe_total(runs: str, seconds: float, *, of: str = TRAINING, processes: int = 1) -> str:
    """Describe the time of some runs, whose seconds are those of one process."""
    total = timedelta(seconds=round(seconds / processes))
    return (
        f"{runs}; about {total} of {of} in {plural(processes, 'process', 'processes')} on this "
        "machine"
    )


def seconds_of_runs(runs: Sequence[Run]) -> float:
    """Return the seconds of forward, backward and update in runs of simulated learners."""
    gradients = {(run.cell.configuration, run.cell.mu): run.cell for run in runs}
    seconds = {key: _gradient_seconds(cell) for key, cell in gradients.items()}
    numbers = {run.cell.name: _gradients(run.cell) for run in runs}
    return sum(
        numbers[run.cell.name] * seconds[run.cell.configuration, run.cell.mu] for run in runs
    )


def _gradient_seconds(cell: Cell) -> float:
    """Return the seconds of one gradient, with an update."""
    batch = cell.recipe.batch.model_copy(update={"global_batch": cell.mu})
    recipe = cell.recipe.model_copy(update={"protocol": None, "batch": batch})
    return _step_seconds(recipe)


def _step_seconds(recipe: Recipe) -> float:
    """Return the least seconds of a few estimates; the first one of a small batch is slow."""
    plan = make_plan(recipe, workers=1)
    found, begun = [estimate(recipe, plan).step_seconds], time.perf_counter()
    while len(found) < _MOST and time.perf_counter() < begun + _ENOUGH_SECONDS:
        found.append(estimate(recipe, plan).step_seconds)
    return min(found)


def _gradients(cell: Cell) -> int:
    recipe = cell.recipe.model_copy(update={"protocol": None})
    return make_plan(recipe, workers=1).steps * cell.rule.gradients


def seconds_of_starts(starts: Sequence[Start]) -> float:
    """Return the seconds of starts on hosts: of their processes, gradients and messages."""
    if not starts:
        return 0.0
    begun = time.perf_counter()
    command = [sys.executable, "-c", "import largebatch.lab.studies.hosts.worker"]
    subprocess.run(command, check=True)  # noqa: S603 -- our words
    process = time.perf_counter() - begun
    updates = {start.cell: _update_seconds(start) for start in starts}
    return sum(
        process * math.ceil(len(start.placement.hosts) / available_cores())
        + start.job.stretches[-1] * updates[start.cell]
        for start in starts
    )


def _update_seconds(start: Start) -> float:
    """Return the seconds of a gradient, set or measured, and of the messages of an update."""
    job, workers = start.job, len(start.placement.hosts)
    recipe = job.recipe.model_copy(update={"protocol": None})
    if job.compute is not None:
        draws = job.compute.times(job.samples, seed=1, worker=0)
        gradient = fmean(next(draws) for _ in range(job.updates))
    else:
        batch = recipe.batch.model_copy(update={"global_batch": job.samples})
        alone = recipe.model_copy(update={"batch": batch})
        gradient = _step_seconds(alone) * math.ceil(workers / available_cores())
    if len(start.placement.workers_per_host) == 1 or start.placement.megabits is None:
        return gradient
    return gradient + _message_bytes(start) / payload_bandwidth(start.placement.megabits)


def _message_bytes(start: Start) -> float:
    """Return the bytes of an update on the busiest link, which carries them one after the other."""
    recipe, workers = start.job.recipe, len(start.placement.hosts)
    weights, protocol = weights_of(recipe), recipe.protocol
    if protocol is None:
        total = sum(weight.nbytes for weight in weights)
        return max(link.sent for link in ring(total, workers=workers))
    parts = server_bytes(weights, protocol.num_servers, split=protocol.split)
    if not protocol.dedicated:
        return max(link.sent for link in beside(parts))
    links = central(parts, learners=protocol.learners)
    return max(link.received + link.sent for link in links)
