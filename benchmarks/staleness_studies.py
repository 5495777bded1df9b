"""The studies of staleness.py: a fifth of CIFAR-10's images, 12 epochs, three grids.

`sensitivity` has the rate found without staleness, a third and a tenth of it, with one seed: at
which rates do learners that wait, learners that do not, and one learner train? By it FACTOR is
chosen, for momentum makes late gradients unstable at rates at which they are not when in time: a
rate found without staleness would decide what staleness costs.

`main` has 30 learners with mini-batches of 4: waiting or not, the rate over tau or a fixed one, SGD
and LARS, clean epochs and the statistics pass on images that are cropped otherwise. An update of a
gradient that is late has 4 samples, one that waits 120. So each has two cells to be held against:
learners that wait, and one learner `alone` with mini-batches of 4, which is never late, at ALONE of
the rate. LARS divides a gradient by its length, and noise with it, so that a mini-batch of 4 moves
less along the gradient than one of 120: `lars-root` has sqrt(30) times its rate. `sgd-found` is
hardsync at the rate found for it, and `sgd-tenth` a tenth of that, at which one learner trains: do
learners that do not wait, at this rate as it is?

`products` has a mu x lambda of 16, 120 and 480 from several pairs, at Rudra's rate over n; hardsync
has one pair of each, for others are the same training, and 120 is that of `main`.
"""

import math
from typing import Any

from largebatch.lab.protocols.compute_times import Lognormal, Stragglers

IMAGES = 10_000
EPOCHS = 12
BATCH = 120
"""Batch for which the rates were searched: 30 mini-batches of 4."""

RATES = {"sgd": 0.03, "lars": 0.362, "norm": 0.0048}
"""Best rates, from --rates."""

FACTOR = {"sgd": 1 / 3, "lars": 1.0, "norm": 1.0}
"""Multiples of these rates in `main` and `products`: the one of FACTORS with which, in
`sensitivity`, a recipe's cells whose learners wait or divide the rate by tau have the highest mean
top-1."""

FACTORS = {"whole": 1.0, "third": 1 / 3, "tenth": 1 / 10}

ALONE = 0.0376
"""Mean of 1 / tau at sigma 30 under the usual times: the mean factor on the rate of a late
gradient."""

LARS = {
    "kind": "lars", "convention": "reference", "momentum": 0.9, "weight_decay": 0.004, "eta": 0.02,
}  # fmt: skip
DECAY = {
    "kind": "steps", "at": [{"epochs": EPOCHS - 2}, {"epochs": EPOCHS - 1}], "gamma": 0.1,
}  # fmt: skip
ALL: dict[str, Any] = {
    "data.train_samples": IMAGES,
    "duration": {"epochs": EPOCHS},
    "schedule.decay": DECAY,
    "execution.memory_format": "channels_last",  # a quarter sooner on a CPU
}
PLAIN = ALL | {"batch.global_batch": BATCH}
NORM = ALL | {
    "batch": {"global_batch": BATCH, "bn_span": 4},
    "model.arguments": {"batch_norm": True},
    "data.crop_area": [0.35, 1.0],
}
STATISTICS = {"statistics": {"samples": IMAGES}}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", PLAIN),
    "lars": ("lars", PLAIN | {"optimizer": LARS}),
    "norm": ("norm", NORM | {"polish": STATISTICS}),
    "polished": ("norm", NORM | {"polish": {"clean": {"epochs": 2}, **STATISTICS}}),
}
"""Recipe whose rate each uses, and its changes to cifar10_quick_128."""

MACHINES: dict[str, Any] = {  # a gradient's seconds as fitted by staleness_times.py
    "overhead": 0.0011,
    "sample": 0.00079,
    "link": {"bandwidth": 1.25e9, "latency": 1e-4},
    "server_link": {"bandwidth": 1.25e10, "latency": 1e-4},  # else it limits 30 learners
}
USUAL = Lognormal(kind="lognormal", median=1.0, sigma=0.1)
STRAGGLERS = Stragglers(kind="stragglers", usual=USUAL, probability=0.02, factor=10.0)


def recipe(name: str, *, factor: float = 1.0) -> dict[str, Any]:
    """Return a recipe of a study at a multiple of its best rate."""
    rate, changes = RECIPES[name]
    peak = float(f"{RATES[rate] * factor:.4g}")
    return {"recipe": "cifar10_quick_128", "set": changes | {"schedule.peak_lr": peak}}


def rates_study() -> dict[str, Any]:
    """Return the study of policies that searches the rates, without staleness."""
    return {
        "name": "staleness-rates",
        "recipes": {name: recipe(name) for name in RATES},
        "policies": {"steps": {"decay": DECAY}},
        "search": {"trials": 7, "held_out": 2_000, "part": 0.5, "prune": False},
        "seeds": 1,
    }


def studies() -> dict[str, dict[str, Any]]:
    """Return the studies by name, in the order of their runs."""
    each = {
        f"{name}-{word}": recipe(name, factor=factor)
        for name in RATES
        for word, factor in FACTORS.items()
    }
    sgd = [name for name in each if name.startswith("sgd")]
    factors = {name: FACTOR[rate] for name, (rate, _) in RECIPES.items()}
    late = {name: recipe(name, factor=factor) for name, factor in factors.items()}
    late["lars-root"] = recipe("lars", factor=factors["lars"] * math.sqrt(30))
    alone = {f"{name}-alone": recipe(name, factor=of * ALONE) for name, of in factors.items()}
    alone["lars-root-alone"] = recipe("lars", factor=factors["lars"] * math.sqrt(30) * ALONE)
    other = {"sgd-found": recipe("sgd"), "sgd-tenth": recipe("sgd", factor=0.1)}
    return {
        "sensitivity": _study("sensitivity", each, [
            _grid(sgd, sigma=[0, 1, 30]),
            _grid(sgd, sigma=[30], modulation=["none"]),
            _grid(sgd, sigma=[1], learners=[1]),
            _grid([name for name in each if name not in sgd], sigma=[30]),
        ], seeds=1),
        "main": _study("main", late | alone | other, [
            _grid(["sgd"], sigma=[0, 1, 15, 30]),
            _grid(["lars", "norm", "polished"], sigma=[0, 30]),
            _grid(["lars-root"], sigma=[30]),
            _grid(["sgd", "sgd-tenth"], sigma=[15, 30], modulation=["none"]),
            _grid(["sgd-found"], sigma=[0]),
            _grid(["lars"], sigma=[30], modulation=["none"]),
            _grid(["sgd-tenth", *alone], sigma=[1], learners=[1]),
            _grid(["sgd"], sigma=[30], times=["stragglers"]),
        ]),
        "products": _study("products", {"sgd": late["sgd"]}, [
            _grid(["sgd"], sigma=[0], mu=[16, 480], learners=[1]),
            _grid(["sgd"], sigma=[1], mu=[16, 120, 480], learners=[1], modulation=["n"]),
            _grid(["sgd"], sigma=[1, "lambda"], mu=[4], learners=[4, 30], modulation=["n"]),
            _grid(["sgd"], sigma=[1, "lambda"], mu=[30, 120], learners=[4], modulation=["n"]),
            _grid(["sgd"], sigma=[1, "lambda"], mu=[16], modulation=["n"]),
        ]),
    }  # fmt: skip


def _study(
    name: str, recipes: dict[str, Any], grids: list[dict[str, Any]], *, seeds: int = 3
) -> dict[str, Any]:
    times = {"usual": USUAL, "stragglers": STRAGGLERS}
    used = {word for grid in grids for word in grid["times"]}
    return {
        "name": f"staleness-{name}",
        "seeds": seeds,
        "recipes": recipes,
        "machines": MACHINES,
        "times": {word: {"factor": times[word].model_dump(mode="json")} for word in sorted(used)},
        "grids": grids,
    }


def _grid(recipes: list[str], **changes: Any) -> dict[str, Any]:  # noqa: ANN401 -- any JSON
    usual = {"times": ["usual"], "mu": [4], "learners": [30]}
    return {"recipes": recipes, **usual, **changes}
