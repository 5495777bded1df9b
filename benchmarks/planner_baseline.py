"""Baseline of the planner: a model with five constants, without data sheets or network.

    step = b (1 + evaluation) / rate + launch + level log2(nodes)

with b images on a GPU, a rate and a launch time for each of V100 and A100. It is fitted to the
logarithms of the times with the soft L1 loss, so that single runs do not bend it.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from largebatch.lab.planner.published import IMAGES, VALIDATION, Published

START = np.log([1500, 3200, 0.01, 0.002, 0.0007])
SCALE = 0.05
"""Ratio up to which an error counts by its square."""

EVALUATION = VALIDATION / 3 / 4 / IMAGES
"""Validation forward passes every four epochs, as a fraction of the training time."""


def baseline(runs: Sequence[Published]) -> NDArray[np.float64]:
    """Return logarithms: rates of V100 and A100, their launch times, time of a level."""
    found = least_squares(
        lambda logs: [math.log(baseline_seconds(run, logs) / run.seconds) for run in runs],
        START,
        loss="soft_l1",
        f_scale=SCALE,
    )
    return np.asarray(found.x)


def baseline_seconds(run: Published, logs: NDArray[np.float64]) -> float:
    """Return the time of a run on V100 or A100."""
    first = run.generation == "volta"
    rate, launch, level = np.exp(logs[[0, 2, 4] if first else [1, 3, 4]])
    step = run.device_batch * (1 + EVALUATION) / rate + launch + level * math.log2(_nodes(run))
    return float(step * run.epochs * IMAGES / run.global_batch)


def baseline_errors(runs: Sequence[Published]) -> list[float]:
    """Return the error at each run from a fit without its generation, nodes and batch."""
    errors = []
    for left in runs:
        found = baseline([run for run in runs if _like(run) != _like(left)])
        errors.append(baseline_seconds(left, found) / left.seconds - 1)
    return errors


def _nodes(run: Published) -> int:
    return run.workers // run.cluster.gpus_per_node


def _like(run: Published) -> tuple[str, int, int]:
    return run.generation, _nodes(run), run.global_batch
