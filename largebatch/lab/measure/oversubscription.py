"""Measure the slowdown by more workers than cores, for the planner.

Twice as many workers as cores, or the next number that divides the batch, make the recipe's
updates on images in memory. They take longer than the sum of their turns: workers wait in an
all-reduce for others whose turn has not come, and each turn finds another worker's data in the
caches.
"""

import json
import statistics
import sys
import tempfile
import time
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from largebatch.data.types import Batch
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import available_cores
from largebatch.errors import PlanError
from largebatch.lab.planner.cluster import Cluster, Measured
from largebatch.lab.planner.prediction import predict
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.launch import start_workers
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.reduction import build_reducer
from largebatch.runs.state import build_scaler
from largebatch.training.loop import step_seeds, train
from largebatch.training.loss import cross_entropy

UPDATES, WARM_UP = 25, 5
MOST_TURNS = 4
"""Largest number of workers per core."""


def oversubscription(recipe: Recipe, measured: Measured) -> float:
    """Return the measured seconds of an update over the predicted ones, at least 1.

    1 also if the batch cannot be divided over these workers: then no such run is planned.
    """
    cores = available_cores()
    workers = _workers(recipe, cores)
    if workers is None:
        return 1.0
    cluster = Cluster(measured=measured, gpus_per_node=cores, nodes=1, cpu_cores=cores)
    step = predict(recipe, cluster, workers=workers).step
    return max(1.0, seconds_per_update(recipe, workers) / (sum(step.values()) - step["input"]))


def _workers(recipe: Recipe, cores: int) -> int | None:
    for workers in range(2 * cores, MOST_TURNS * cores + 1):
        try:
            make_plan(recipe, workers=workers)
        except PlanError:
            continue
        return workers
    return None


def seconds_per_update(recipe: Recipe, workers: int) -> float:
    """Return the median seconds between updates of some workers."""
    with tempfile.TemporaryDirectory() as folder:
        file, times = Path(folder, "recipe.yaml"), Path(folder, "seconds.json")
        file.write_text(dump_yaml(recipe), encoding="utf-8")
        command = ["-m", "largebatch.lab.measure.oversubscription", str(file), str(times)]
        start_workers(command, workers=workers)
        return float(json.loads(times.read_text(encoding="utf-8")))


def run_worker(file: Path, times: Path) -> None:
    """Run one of the workers; worker 0 writes the seconds between updates."""
    backend = connect("torch")
    torch.set_num_threads(1)
    recipe = load_recipe(file)
    plan = make_plan(recipe, workers=backend.world_size)
    model = build_model(recipe, backend.device)
    side = recipe.data.image_size
    images = torch.randn(plan.device_batch, 3, side, side)
    labels = torch.randint(recipe.data.classes, (plan.device_batch,))
    with build_reducer(recipe, plan, model, backend) as reducer:
        updates = train(
            model,
            build_optimizer(recipe, model, backend),
            repeat(Batch(images, labels)),
            lambda _: 0.0,
            cross_entropy(smoothing=0.1, off_target="others"),
            reducer,
            Spans(model, backend, sync_workers=plan.sync_workers),
            build_scaler(recipe, plan, backend),
            steps=range(UPDATES),
            accumulation=plan.accumulation,
            global_batch=plan.global_batch,
            seed=step_seeds(recipe.seed, backend.rank),
        )
        ends = [time.perf_counter() for _ in updates]
    if backend.rank == 0:
        seconds = statistics.median(np.diff(ends[WARM_UP:]))
        times.write_text(json.dumps(seconds), encoding="utf-8")
    backend.close()


if __name__ == "__main__":
    run_worker(Path(sys.argv[1]), Path(sys.argv[2]))
