"""The fastest batch to a given accuracy, for each number of GPUs.

A larger batch keeps GPUs busier and takes more epochs: epochs(B) = shortest (1 + B / critical), the
law through MLPerf's reference points (`suggest`). Time is epochs x steps of an epoch x time of a
step, so every number of GPUs has a best batch, and beyond some number more GPUs do not help. The
law is that of ResNet-50 on ImageNet with LARS, to 75.9 % top-1, and so are these batches; the
recipe decides how images are decoded and gradients are sent.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from largebatch.lab.planner.calibration import installed_fit
from largebatch.lab.planner.cluster import Cluster, ClusterError
from largebatch.lab.planner.model import Load, Machine, evaluation_seconds, step_seconds
from largebatch.lab.planner.prediction import (
    CLASSES,
    FIXED_BYTES,
    KEPT_BYTES,
    gradient_bytes,
    machine_for,
    sends_at_once,
)
from largebatch.lab.planner.published import EVALUATE_EVERY, IMAGES, VALIDATION
from largebatch.lab.planner.suggest import LARGEST, EpochLaw, fit_epochs, reference_points
from largebatch.recipe.recipe import Recipe

SMALLEST_DEVICE_BATCH = 8
RATIO = 2 ** (1 / 8)
"""Ratio of two consecutive batches that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run to 75.9 % top-1."""

    workers: int
    global_batch: int
    accumulation: int
    epochs: float
    seconds: float


def has_epoch_law(recipe: Recipe, cluster: Cluster) -> bool:
    """Return True if the law holds for the recipe's data and the cluster's model."""
    return cluster.gpu is not None and recipe.data.classes == CLASSES


def best_batches(recipe: Recipe, cluster: Cluster) -> list[Point]:
    """Return the best batch for one GPU, two, four ... and all of a cluster."""
    return [
        min(batches(recipe, cluster, workers=workers), key=lambda point: point.seconds)
        for workers in _numbers(cluster)
    ]


def batches(recipe: Recipe, cluster: Cluster, *, workers: int) -> list[Point]:
    """Return the time with each batch between the smallest reference point and the largest run.

    Raises ClusterError where an image does not fit a GPU's memory.
    """
    assert cluster.gpu is not None
    law = fit_epochs(reference_points())
    on = machine_for(recipe, cluster, installed_fit().constants)
    fits = (cluster.gpu.memory_gigabytes * 1e9 - FIXED_BYTES) / KEPT_BYTES
    if fits < 1:
        raise ClusterError(
            f"{cluster.name}: gpu.memory_gigabytes: {cluster.gpu.memory_gigabytes:g}: libraries "
            f"take {FIXED_BYTES / 1e9:g} GB and an image {KEPT_BYTES / 1e9:g}; give the GPU's own"
        )
    return [
        _point(on, law, _load(recipe, workers, batch, most=math.floor(fits)), batch=batch)
        for batch in _batches(workers)
    ]


def _load(recipe: Recipe, workers: int, batch: int, *, most: int) -> Load:
    share = batch // workers
    accumulation = math.ceil(share / most)
    return Load(
        workers=workers,
        device_batch=math.ceil(share / accumulation),
        accumulation=accumulation,
        gradient_bytes=gradient_bytes(recipe),
        overlap=not sends_at_once(recipe.execution.groups),
    )


def _point(on: Machine, law: EpochLaw, load: Load, *, batch: int) -> Point:
    epochs = law(batch)
    one = evaluation_seconds(on, workers=load.workers, samples=VALIDATION)
    steps = epochs * IMAGES / batch
    return Point(
        workers=load.workers,
        global_batch=batch,
        accumulation=load.accumulation,
        epochs=epochs,
        seconds=on.start + steps * step_seconds(on, load).seconds + epochs / EVALUATE_EVERY * one,
    )


def _batches(workers: int) -> list[int]:
    """Return multiples of the workers, from the smallest reference point to the largest run."""
    smallest = reference_points()[0].batch
    number = math.ceil(math.log(LARGEST / smallest, RATIO))
    shares = (smallest * RATIO**place / workers for place in range(number + 1))
    found = {max(SMALLEST_DEVICE_BATCH, math.ceil(share)) * workers for share in shares}
    within = {batch for batch in found if batch <= LARGEST}
    return sorted(within or {SMALLEST_DEVICE_BATCH * workers})


def _numbers(cluster: Cluster) -> Iterator[int]:
    """Yield powers of two of GPUs in a node, then of nodes, and the whole cluster."""
    workers = 1
    while workers < cluster.gpus_per_node:
        yield workers
        workers *= 2
    workers = cluster.gpus_per_node
    while workers < cluster.workers:
        yield workers
        workers *= 2
    yield cluster.workers
