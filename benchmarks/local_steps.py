"""Measure local steps against softsync and hardsync that send as many bytes, on the digits.

    python benchmarks/local_steps.py [--seeds 5] [--write]

LeNet-5 on the digits at 16 pixels, four learners in processes of their own, EPOCHS epochs. Once in
H x MU samples a learner sends as many bytes as its weights have, and receives as many:

    local steps     H updates of its own, of MU samples each; then all average (local SGD)
    hardsync        one gradient of H x MU samples; all wait
    1-softsync      one gradient of H x MU samples; any four make an update, nobody waits
    asynchronous    one gradient of H x MU samples; each makes an update, nobody waits

Hardsync with gradients of MU samples, which sends H times as many, is the reference. Rates without
waiting are divided by staleness. SGD with a momentum of 0.9, one tenth of the run warm-up, then a
cosine to zero. `sent` in the result is what a learner sent, counted from the record of arrivals,
over the bytes of the weights.

Every arm has a rate of its own. SEARCH_SEEDS, which no result has, try GRID on HELD_OUT training
images, and go on beyond its ends as long as the best is the highest or the lowest; the best has the
highest top-1 of its worst seed, so none at which one of them fails. Goes on where it was stopped;
with --write it trains nothing. Writes benchmarks/results/local_steps_<machine>_<date>.json.

Decided before: the six differences between local steps and the others of the same H hold together,
with 95 %, by the noise of the arms of this H of which no run fails (contrasts.py). An arm of which
one fails has no difference.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contrasts import contrast, no_run_fails, noise_of, none_fails
from measuring import best_rate, recorded, write

from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.lab.protocols.arrivals import ARRIVALS
from largebatch.lab.studies.metrics import interval
from largebatch.recipe.recipe import Recipe

NAME = "local_steps"
LEARNERS, MU, EPOCHS = 4, 8, 10
INTERVALS = (4, 16)
"""H: updates of MU samples for which a learner may send once."""

GRID, STRIDE, SEARCH_SEEDS = (0.01, 0.04, 0.16), 4.0, (101, 102, 103)
HELD_OUT = 240
LOCAL, REFERENCE = "local steps", "hardsync, every MU samples"
FREE = "modulation: staleness"
PROTOCOLS = {
    LOCAL: "kind: local_steps, steps: {}",
    "hardsync": "kind: hardsync",
    "1-softsync": f"kind: softsync, n: 1, {FREE}",
    "asynchronous": f"kind: asynchronous, {FREE}",
}
"""Sections of the recipe, without the number of learners."""


class Arm(NamedTuple):
    """A protocol, and the samples of a learner between two messages over MU."""

    protocol: str
    interval: int

    @property
    def name(self) -> str:
        """Name in the result."""
        return f"{self.protocol}, H = {self.interval}" if self.interval > 1 else REFERENCE

    def recipe(self, rate: float, *, seed: int, epochs: float) -> Recipe:
        """Return its recipe."""
        section = PROTOCOLS[self.protocol].format(self.interval)
        mini_batch = MU if self.protocol == LOCAL else MU * self.interval
        gradients = 1 if self.protocol == "asynchronous" else LEARNERS
        held_out = f"{{samples: {HELD_OUT}}}" if seed in SEARCH_SEEDS else "null"
        return load_recipe(
            "digits_96",
            [
                f"seed={seed}",
                f"data.held_out={held_out}",
                f"duration.epochs={epochs}",
                "data.image_size=16",
                "model={name: lenet5, arguments: {}}",
                f"batch={{global_batch: {mini_batch * gradients}, bn_span: null}}",
                f"protocol={{learners: {LEARNERS}, {section}}}",
                "optimizer={kind: sgd, momentum: 0.9, weight_decay: 5e-4}",
                f"schedule.peak_lr={rate}",
                f"schedule.warmup={{epochs: {epochs / 10}}}",
                "schedule.decay={kind: cosine}",
                "loss.label_smoothing=0.0",
                *("polish=null", "evaluation={}", "execution.cache=memory"),
            ],
        )


ARMS = [Arm("hardsync", 1), *(Arm(name, every) for every in INTERVALS for name in PROTOCOLS)]


def main() -> None:
    """Search the rates, train the seeds and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--work", type=Path, default=Path("build") / NAME, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="train nothing, write what is there")
    args = parser.parse_args()
    if not args.write:
        for arm in ARMS:
            search(arm, args)
        for seed in range(1, args.seeds + 1):
            for arm in ARMS:
                carry_out(arm, search(arm, args), seed=seed, args=args)
    command = f"python benchmarks/{NAME}.py --epochs {args.epochs:g}"
    print(write(NAME, command, result(read(args.work))))


def search(arm: Arm, args: argparse.Namespace) -> float:
    """Return the best rate of an arm."""

    def score(rate: float) -> float:
        trials = [carry_out(arm, rate, seed=seed, args=args) for seed in SEARCH_SEEDS]
        return float(min(one["top1"] for one in trials))

    return best_rate(GRID, score, stride=STRIDE)


def carry_out(arm: Arm, rate: float, *, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a run; train it first if there is none."""
    name = f"{arm.name}, rate {rate:g}, {args.epochs:g} epochs, seed {seed}"
    about = {"arm": arm.name, "rate": rate, "seed": seed}
    recipe = arm.recipe(rate, seed=seed, epochs=args.epochs)
    path = args.work / f"{name}.json"
    return recorded(path, lambda: about | train(recipe, args.work / name))


def train(recipe: Recipe, out: Path) -> dict[str, Any]:
    """Train a recipe and print top-1; one that diverges is as good as chance."""
    try:
        summary = run(recipe, workers=LEARNERS, out=out, resume="auto", report=False)
    except DivergedError:
        print(f"{out.name}: diverged", flush=True)
        return {"top1": 1 / recipe.data.classes}
    if summary.status != "finished":
        raise KeyboardInterrupt
    print(f"{out.name}: {summary.top1:.2%}", flush=True)
    return {"top1": summary.top1, "samples": summary.samples, "sent": sent(out)}


def sent(out: Path) -> float:
    """Return how often a learner sent all its weights, from the arrivals at one server."""
    lines = (out / ARRIVALS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["server"] for line in lines].count(0) / LEARNERS


def read(work: Path) -> list[dict[str, Any]]:
    """Return the records."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("*, seed *.json"))
    ]


def result(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the arms, what local steps gain over the others, and the rates that were tried."""
    runs = [one for one in records if one["seed"] not in SEARCH_SEEDS]
    top1: dict[str, dict[int, float]] = {}
    for one in runs:
        top1.setdefault(one["arm"], {})[one["seed"]] = one["top1"]
    return {
        "arms": {
            name: {
                "rate": next(one["rate"] for one in runs if one["arm"] == name),
                "sent": [one.get("sent") for one in runs if one["arm"] == name],
                "top-1": interval(values.values()).scaled(100)._asdict(),
                "by seed": values,
            }
            for name, values in top1.items()
        },
        "differences": differences(top1),
        "search": [one for one in records if one["seed"] in SEARCH_SEEDS],
    }


def differences(top1: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Any]]:
    """Return top-1 of local steps less that of each protocol that sends as much, in points.

    By the seeds that all arms have.
    """
    if len(top1) < len(ARMS):
        return {}
    seeds = set.intersection(*(set(values) for values in top1.values()))
    found, pairs = {}, len(INTERVALS) * (len(PROTOCOLS) - 1)
    for every in INTERVALS:
        names = {protocol: Arm(protocol, every).name for protocol in PROTOCOLS}
        arms = {it: {seed: top1[name][seed] for seed in seeds} for it, name in names.items()}
        good = none_fails(arms.values())
        own = arms.pop(LOCAL)
        for protocol, other in arms.items():
            if no_run_fails(own, other):
                gain = contrast([(1.0, own), (-1.0, other)], noise_of(good), together=pairs)
                found[f"{names[LOCAL]}, less {protocol}"] = gain.scaled(100)._asdict()
    return found


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
