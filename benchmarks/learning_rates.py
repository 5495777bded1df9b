"""Compare the policies of LRBench, each at its own rate: three data sets, two batches, SGD and
LARS.

    python benchmarks/learning_rates.py [--only WORDS ...] [--processes N]

Needs LARGEBATCH_DATA, the folder of Fashion-MNIST and CIFAR-10 (the digits are embedded), and
optuna. Carries out a study of `largebatch lr bench` for every configuration (a set, a batch, an
optimizer) and writes what its database has to
benchmarks/results/learning_rates_<machine>_<date>.json. Started again it goes on where it was
stopped; a configuration that the newest such file has whole is not done again.

The shapes are those of LRBench (arXiv:1908.06477), stretched over the run, low_lr a sixth of
peak_lr. There are 2 cycles in it, 2.5 of cos, which begins at the peak, so that all end low;
`tri-tables` has the tables' 2.5 cycles, which end at the peak. nstep falls to a tenth at a half and
three quarters, as residual networks are trained (arXiv:1512.03385). Besides: `composite`, three
pieces of ever lower rates, and, without and with a warm-up of a fifth of the run, a constant rate,
a cosine, and the polynomial of power 2 that recipes for large batches have.

The digits, 8 x 8, are drawn with 20 pixels, of which LeNet-5's second convolution makes its 4 x 4
maps. They have every policy with SGD, the rest those that the questions need. Two more
configurations of the digits tell what a search is worth: `one rate` has no search, but for all
policies the rate that was found for a constant one, and `searched again` another seed of the
search. CIFAR-10 is computed in bfloat16, which takes two thirds of the time on a CPU that has it.

A trial is as long as a run: of trials half as long the rate found for a polynomial of power 2 was
one at which all five seeds diverged (results/learning_rates_half_trials).
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import RESULTS, circumstances, hardware, newest, run_largebatch, today
from polishing_data import prepare

from largebatch.lab.studies.queue.database import open_existing
from largebatch.lab.studies.queue.results import CellResults, Result, read_results
from largebatch.lab.studies.queue.study import RATE

NAME = "learning_rates"
SEEDS = 5
TRIALS = 6
AROUND = (0.16, 6.25)
"""Range of the search, as multiples of the first rate."""

SGD = {"kind": "sgd", "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
LARS = {"kind": "lars", "convention": "reference", "momentum": 0.9, "weight_decay": 5e-4}


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set, and the length of its runs."""

    recipe: str
    """Recipe whose images, model and other settings are used, apart from `changes`."""

    images: int
    held_out: int
    epochs: int
    evaluations: float
    """Updates in an epoch, by batch."""

    changes: dict[str, Any]
    batches: dict[str, int]
    rates: dict[str, float]
    """First rate of the search, by batch and optimizer."""

    policies: tuple[str, ...] | None = None
    """Policies with SGD; None for all."""

    test: int | None = None
    """Number of test images; None for all."""


FACTORIAL = ("fix", "poly2", "cosine", "warmup-fix", "warmup-poly2", "warmup-cosine")
"""Three decays without and with a warm-up."""

SOME = (*FACTORIAL, "nstep", "tri", "cos", "composite")
LENET = {
    "model": {"name": "lenet5", "arguments": {}},
    "batch.bn_span": None,
    "polish": None,
    "loss.label_smoothing": 0.0,
    "execution.cache": "memory",
    "execution.memory_format": "channels_last",  # two thirds of the time on a CPU
}
MONITOR = {"monitor": ["generalization_gap"]}
SETS = {
    "digits": DataSet(
        recipe="digits_96", images=1437, held_out=300, epochs=20, evaluations=2,
        changes=LENET | MONITOR | {"data.image_size": 20, "data.crop_area": None},
        batches={"small": 48, "large": 480},
        rates={"small, sgd": 0.02, "large, sgd": 0.03, "small, lars": 0.15, "large, lars": 0.5},
    ),
    "fashion_mnist": DataSet(
        recipe="fashion_mnist_resnet9_128", images=10_000, held_out=2_000, test=5_000, epochs=8,
        evaluations=2.5,
        changes=LENET | MONITOR | {"data.crop_area": None, "data.flip": False},
        batches={"small": 50, "large": 1_000},
        rates={"small, sgd": 0.02, "large, sgd": 0.02, "large, lars": 0.5},
        policies=(*SOME, "inv", "poly"),
    ),
    "cifar10": DataSet(
        recipe="cifar10_resnet8_128", images=8_000, held_out=2_000, test=2_500, epochs=8,
        evaluations=2, changes=MONITOR | {
            "batch.bn_span": 50, "execution.memory_format": "channels_last", "precision": "bf16"
        },
        batches={"small": 50, "large": 800},
        rates={"small, sgd": 0.05, "large, sgd": 0.4, "large, lars": 1.0}, policies=SOME,
    ),
}  # fmt: skip
ETA = 0.02


@dataclass(frozen=True, slots=True)
class Configuration:
    """A data set, a batch and an optimizer, within which policies are compared."""

    data: str
    batch: str
    optimizer: str
    arm: str = ""
    """Difference of its search from the study of the same name without an arm."""

    robustness_seeds: int = 0
    """Policies that run at multiples of the rate."""

    @property
    def key(self) -> str:
        """Name in the results."""
        return ", ".join(filter(None, (self.data, self.batch, self.optimizer, self.arm)))

    @property
    def name(self) -> str:
        """Name of its study and its folder."""
        return self.key.replace(", ", "-").replace("_", "-").replace(" ", "-")

    def study(self, peak: float | None = None) -> dict[str, Any]:
        """Return the content of its study file, with a first rate for the search."""
        of = SETS[self.data]
        batch = of.batches[self.batch]
        peak = peak or of.rates[f"{self.batch}, {self.optimizer}"]
        changes = of.changes | {
            "duration": {"epochs": of.epochs},
            "data.train_samples": of.images,
            "batch.global_batch": batch,
            "optimizer": SGD if self.optimizer == "sgd" else LARS | {"eta": ETA},
            "schedule": {"peak_lr": peak, "warmup": None, "decay": {"kind": "constant"}},
            "evaluation": {"every_epochs": 1 / of.evaluations},
        }
        if of.test:
            changes |= {"data.val_samples": of.test}
        every = policies(peak=peak, epochs=of.epochs, steps=of.epochs * of.images / batch)
        search = {
            "trials": TRIALS, "held_out": of.held_out, "prune": False, "part": 1.0,
            "keys": {"schedule.peak_lr": AROUND},
        }  # fmt: skip
        return {
            "name": self.name,
            "recipes": {self.optimizer: {"recipe": of.recipe, "set": changes}},
            "policies": {name: every[name] for name in self.chosen or every},
            "search": search | ARMS[self.arm],
            "seeds": SEEDS,
            "robustness_seeds": self.robustness_seeds,
        }

    @property
    def main(self) -> "Configuration":
        """The configuration without an arm."""
        return next(
            one for one in CONFIGURATIONS if one.key == self.key.removesuffix(f", {self.arm}")
        )

    @property
    def chosen(self) -> tuple[str, ...] | None:
        """Names of its policies; None for all."""
        is_full = self.optimizer == "sgd" and self.arm != AGAIN
        return SETS[self.data].policies if is_full else SOME

    def images(self, work: Path) -> Path | None:
        """Return the folder of images; None for the digits."""
        if self.data == "digits":
            return None
        of = SETS[self.data]
        return prepare(work / "data", self.data, train=of.images, test=of.test)


ONE_RATE, AGAIN = "one rate", "searched again"
ARMS: dict[str, dict[str, Any]] = {"": {}, ONE_RATE: {"trials": 1}, AGAIN: {"seed": 200}}
CONFIGURATIONS = [
    Configuration("digits", "small", "sgd", robustness_seeds=3),
    Configuration("digits", "large", "sgd"),
    Configuration("digits", "small", "lars"),
    Configuration("digits", "large", "lars"),
    Configuration("digits", "small", "sgd", ONE_RATE),
    Configuration("digits", "small", "sgd", AGAIN),
    Configuration("fashion_mnist", "small", "sgd"),
    Configuration("fashion_mnist", "large", "sgd"),
    Configuration("fashion_mnist", "large", "lars"),
    Configuration("cifar10", "small", "sgd"),
    Configuration("cifar10", "large", "sgd"),
    Configuration("cifar10", "large", "lars"),
]


def policies(*, peak: float, epochs: float, steps: float) -> dict[str, dict[str, Any]]:
    """Return LRBench's shapes over a run of some epochs and updates, and further policies.

    >>> list(policies(peak=0.1, epochs=10, steps=100))[:4]
    ['fix', 'nstep', 'step', 'exp']
    """

    def part(share: float) -> dict[str, float]:
        return {"epochs": share * epochs}

    warmup = part(0.2)
    falling = 0.55 ** (1 / steps)  # 0.99994 in each of 10,000 updates, as in the tables
    low = {"low_lr": peak / 6}
    half = low | {"half_cycle": part(0.25)}
    decays: dict[str, dict[str, Any]] = {
        "fix": {"kind": "fix"},
        "nstep": {"kind": "nstep", "at": [part(share) for share in (0.5, 0.75)]},
        "step": {"kind": "step", "every": part(0.1), "gamma": 0.85},
        "exp": {"kind": "exp", "gamma": falling},
        "inv": {"kind": "inv", "gamma": 1 / steps, "power": 0.75},
        "poly": {"kind": "poly", "power": 1.2},
        "poly2": {"kind": "poly", "power": 2.0},
        "cosine": {"kind": "cosine"},
        "tri": {"kind": "tri", **half},
        "tri-tables": {"kind": "tri", **low, "half_cycle": part(0.2)},
        "tri2": {"kind": "tri2", **half},
        "triexp": {"kind": "triexp", **half, "gamma": falling},
        "sin": {"kind": "sin", **half},
        "sin2": {"kind": "sin2", **half},
        "sinexp": {"kind": "sinexp", **half, "gamma": falling},
        "cos": {"kind": "cos", **low, "cycle": part(0.4)},
        "composite": {"kind": "piecewise", "pieces": [
            _triangle(peak, part(0.6), part(0.2)),
            _triangle(peak / 10, part(0.3), part(0.1)),
            {"length": None, "peak_lr": peak / 100, "decay": {"kind": "fix"}},
        ]},
    }  # fmt: skip
    later = {
        "warmup-fix": {"kind": "fix"},
        "warmup-poly2": {"kind": "poly", "power": 2.0},
        "warmup-cosine": {"kind": "cosine"},
    }
    return {name: {"warmup": None, "decay": decay} for name, decay in decays.items()} | {
        name: {"warmup": warmup, "decay": decay} for name, decay in later.items()
    }


def _triangle(peak: float, length: dict[str, float], half: dict[str, float]) -> dict[str, Any]:
    decay = {"kind": "tri", "low_lr": peak / 6, "half_cycle": half}
    return {"length": length, "peak_lr": peak, "decay": decay}


def carry_out(
    configuration: Configuration, study: dict[str, Any], work: Path, *, processes: int
) -> dict[str, Any]:
    """Run the study of a configuration and return the content of its database."""
    out, file = work / study["name"], work / f"{study['name']}.yaml"
    file.write_text(json.dumps(study, indent=1), encoding="utf-8")  # YAML as well
    command = ["lr", "bench", str(file), "--out", str(out), "--processes", str(processes)]
    if images := configuration.images(work):
        command += ["--data", str(images)]
    run_largebatch(command)
    with open_existing(f"sqlite:///{out / 'study.db'}") as storage:
        cells = {cell.policy: _record(cell) for cell in read_results(storage)}
    about = circumstances(NAME, "python benchmarks/learning_rates.py")
    return {**about, "study": study, "policies": cells}


def _record(cell: CellResults) -> dict[str, Any]:
    return {
        "rate": cell.values[RATE],
        "edge": cell.edges.get(RATE),
        "trials": [_result(one) for one in cell.search],
        "seeds": [{**_result(one), "curve": _curve(one)} for one in cell.seeds],
        "scaled": [_result(one) for one in cell.scaled],
    }


def _result(one: Result) -> dict[str, Any]:
    """Return the final metrics of a run."""
    found = {
        "rate": one.values[RATE] * one.scale,
        "top1": one.top1,
        "top5": one.top5,
        "loss": one.loss,
        "average_confidence": one.average_confidence,
        "confidence_deviation": one.confidence_deviation,
        "class_confidence_deviation": one.class_confidence_deviation,
        "loss_difference": one.loss_difference,
        "seconds": one.seconds,
    }
    return {
        "seed": one.seed,
        "scale": one.scale,
        "updates": one.updates,
        **{key: _rounded(value) for key, value in found.items()},
        "diverged": one.diverged,
    }


def _curve(one: Result) -> list[list[float | None]]:
    """Return the update and top-1 of each evaluation."""
    return [[at.step, _rounded(at.top1)] for at in one.evaluations]


def _rounded(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def main() -> None:
    """Run the configurations that the newest results do not have."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="WORDS", help="configurations with all of these")
    add("--processes", type=int, default=2, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("runs") / NAME, metavar="DIR", help="for the studies")
    add("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    path = newest(NAME, args.results) or args.results / f"{NAME}_{hardware()}_{today()}.json"
    done: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for one in CONFIGURATIONS:
        if not all(word in one.key for word in args.only):
            continue
        found = done[one.main.key]["policies"]["fix"]["rate"] if one.arm == ONE_RATE else None
        study = one.study(found)
        if one.key in done and done[one.key]["study"] == study:
            continue
        done[one.key] = carry_out(one, study, args.work, processes=args.processes)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(done) + "\n", encoding="utf-8")
        partial.replace(path)
        print(f"{one.key}: {path}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
