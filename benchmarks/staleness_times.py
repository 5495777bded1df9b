"""Measure waits and staleness of 30 simulated learners, without computing gradients.

    python benchmarks/staleness_times.py

Needs the extra `studies`. First what a gradient of the study's network takes one core alone, for
mini-batches of 4 to 120 samples, fitted by the seconds that staleness_studies.MACHINES has. Then
GRADIENTS gradients with each of SEEDS under each distribution of their times: how many times as
long hardsync takes for the same samples, and how late gradients are at sigma 1, 15 and 30; and how
late where all learners come to rest after a fixed number of updates. Writes
benchmarks/results/staleness_times_<machine>_<date>.json. Servers update in no time here.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch
from measuring import write
from staleness import clopper_pearson
from staleness_studies import MACHINES, STRAGGLERS, USUAL
from torch.nn import functional as F

from largebatch.lab.protocols.cluster import Cluster
from largebatch.lab.protocols.compute_times import (
    Distribution,
    Exponential,
    Lognormal,
    Recorded,
    Stragglers,
)
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.simulator import simulate
from largebatch.lab.studies.metrics import interval
from largebatch.models import build

LEARNERS, MU = 30, 4
GRADIENTS = 60_000
SEEDS = range(1, 6)
RESTS = (30, 100, 500, 6_000)
MINI_BATCHES = (4, 16, 30, 120)
ROUNDS = 300


def main() -> None:
    """Measure, simulate and write."""
    torch.set_num_threads(1)
    model = build("cifar_quick", num_classes=10)
    measured = {mu: _gradients(model, mu) for mu in MINI_BATCHES}
    medians = {mu: statistics.median(seconds) for mu, seconds in measured.items()}
    sample, overhead = np.polyfit(
        [*medians], [*medians.values()], 1, w=[1 / found for found in medians.values()]
    )
    of_4 = [seconds / medians[MU] for seconds in measured[MU]]
    size = float(sum(weight.nbytes for weight in model.parameters()))
    found = {
        "seconds of a gradient": medians,
        "fitted": {"overhead": float(overhead), "sample": float(sample)},
        "used": MACHINES,
        "spread of the logarithm of seconds": float(np.std(np.log(of_4))),
        "gradients": GRADIENTS,
        "seeds": len(SEEDS),
        "times": {
            name: simulated(factor, model_bytes=size)
            for name, factor in distributions(of_4).items()
        },
        "mean tau at sigma 30 by updates between two rests, usual times": {
            updates: mean_tau(updates, model_bytes=size) for updates in RESTS
        },
    }
    print(write("staleness_times", "python benchmarks/staleness_times.py", found))


def _gradients(model: torch.nn.Module, mu: int) -> list[float]:
    """Return the seconds of each of ROUNDS gradients."""
    images, labels = torch.randn(mu, 3, 32, 32), torch.randint(10, (mu,))
    found = []
    for _ in range(ROUNDS + 10):
        start = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        found.append(time.perf_counter() - start)
        model.zero_grad()
    return found[10:]


def distributions(recorded: list[float]) -> dict[str, Distribution]:
    """Return the factors on the seconds, mild first."""

    def stragglers(probability: float, factor: float) -> Stragglers:
        return STRAGGLERS.model_copy(update={"probability": probability, "factor": factor})

    return {
        "usual: lognormal 0.1": USUAL,
        **{
            f"lognormal {sigma:g}": Lognormal(kind="lognormal", median=1.0, sigma=sigma)
            for sigma in (0.2, 0.3, 0.5)
        },
        "recorded here": Recorded(kind="recorded", seconds=tuple(recorded)),
        "1 of 500 takes 10 times as long": stragglers(0.002, 10.0),
        "1 of 50 takes 2 times as long": stragglers(0.02, 2.0),
        "1 of 50 takes 3 times as long": stragglers(0.02, 3.0),
        "1 of 50 takes 10 times as long": STRAGGLERS,
        "exponential": Exponential(kind="exponential", mean=1.0),
    }


def simulated(
    factor: Distribution, *, model_bytes: float, gradients: int = GRADIENTS
) -> dict[str, Any]:
    """Return the times of hardsync and softsync, and the staleness of softsync."""
    cluster = _cluster(factor, model_bytes)
    hardsync = Rule.hardsync(LEARNERS)
    waits = {
        seed: simulate(hardsync, cluster, servers=1, updates=gradients // LEARNERS, seed=seed)
        for seed in SEEDS
    }
    found = {}
    for sigma in (1, 15, 30):
        takes = LEARNERS // sigma
        rule = Rule(learners=LEARNERS, gradients=takes, waits=False)
        free = {
            seed: simulate(rule, cluster, servers=1, updates=gradients // takes, seed=seed)
            for seed in SEEDS
        }
        tau = np.concatenate([each.arrivals[0].staleness for each in free.values()])
        late = int((tau > 2 * sigma).sum())
        found[f"sigma {sigma}"] = {
            "hardsync takes, times": interval(
                float(waits[seed].ends[-1] / free[seed].ends[-1]) for seed in SEEDS
            )._asdict(),
            "mean tau": float(tau.mean()),
            "highest tau": int(tau.max()),
            "tau > 2 sigma": {"gradients": late, "of": len(tau), **clopper_pearson(late, len(tau))},
        }
    return found


def mean_tau(updates: int, *, model_bytes: float, gradients: int = GRADIENTS) -> float:
    """Return the staleness at sigma 30 if all learners rest after some updates."""
    cluster = _cluster(USUAL, model_bytes)
    rule = Rule(learners=LEARNERS, gradients=1, waits=False)
    return statistics.fmean(
        simulate(rule, cluster, servers=1, updates=updates, seed=seed).arrivals[0].staleness.mean()
        for seed in range(1, 1 + gradients // updates)
    )


def _cluster(factor: Distribution, model_bytes: float) -> Cluster:
    seconds = MACHINES["overhead"] + MACHINES["sample"] * MU
    return Cluster.model_validate({
        "learners": LEARNERS, "compute": factor, "slow": dict.fromkeys(range(LEARNERS), seconds),
        "link": MACHINES["link"], "server_link": MACHINES["server_link"],
        "model_bytes": model_bytes,
    })  # fmt: skip


if __name__ == "__main__":
    main()
