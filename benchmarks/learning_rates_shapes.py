"""Vary the step size, the value range and the rate of LRBench's policies.

    python benchmarks/learning_rates_shapes.py [--data digits] [--processes N]

Needs LARGEBATCH_DATA for Fashion-MNIST, and optuna. The large batch with SGD of learning_rates.py,
with its lengths:

- `shapes`: a study of `lr bench` in which every shape, changed in one key, has a rate of its own,
  found as that of the policy's own shape: by 6 trials on held-out images. 5 seeds at the best;
- `scales`: multiples (FACTORS) of the rates that learning_rates.py found, with 5 seeds;
- `bounds`: cyclic policies between the bounds of the range test, with 5 seeds. The test replaces
  the schedule, so it is the same for all policies of a recipe.

Decided before: points of a changed shape above the policy's own hold together, with 95 %, by the
noise of all shapes of which no run fails (contrasts.py); one of which a run fails has none. A
change whose interval lies within MARGIN of zero makes no difference that counts.

Started again it continues; runs are kept in --work. Writes
benchmarks/results/learning_rates_shapes_<machine>_<date>.json, and
`learning_rates_shapes_tables.py` prints and draws it.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from learning_rates import CONFIGURATIONS, SEEDS, SETS, Configuration, carry_out, policies
from learning_rates import NAME as SEARCHED
from measuring import RESULTS, circumstances, few_processes, hardware, newest, today

from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.lab.measure.lr_range import choose_range, content, read_range, train_range
from largebatch.lab.studies.confidence import measure_confidence
from largebatch.lab.studies.metrics import outcome
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import read_run
from largebatch.runs.options import Options

NAME = "learning_rates_shapes"
FACTORS = (0.25, 0.5, 1.0, 1.4, 2.0, 4.0)
SCALED = ("fix", "poly2", "cosine", "warmup-cosine", "tri", "composite")
BOUNDED = ("tri", "sin", "cos")
BETWEEN = "between the bounds"
RANGE_SEEDS = 3
MARGIN = 1.0
"""Points of top-1."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key of a policy's decay, as search.keys names it, and a factor of its value."""

    key: str
    factor: float

    @property
    def name(self) -> str:
        """Name in the results: `half_cycle.epochs-x-0.5`."""
        return f"{self.key}-x-{self.factor:g}"

    def of(self, decay: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changed decay.

        >>> Change("half_cycle.epochs", 0.5).of({"half_cycle": {"epochs": 4.0}})
        {'half_cycle': {'epochs': 2.0}}
        """
        first, _, rest = self.key.partition(".")
        value = decay[first]
        return {
            **decay,
            first: Change(rest, self.factor).of(value) if rest else value * self.factor,
        }


SHAPES: dict[str, tuple[Change, ...]] = {
    "step": tuple(Change("every.epochs", it) for it in (0.5, 2))
    + tuple(Change("gamma", it) for it in (0.85, 1.1)),
    "inv": tuple(Change("gamma", it) for it in (0.25, 4)),
    "tri": tuple(Change("half_cycle.epochs", it) for it in (0.5, 2))
    + tuple(Change("low_lr", it) for it in (0.25, 3)),
    "cos": tuple(Change("cycle.epochs", it) for it in (0.5, 2))
    + tuple(Change("low_lr", it) for it in (0.25, 3)),
}
"""Changed shapes of a policy."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One run."""

    group: str
    policy: str
    what: str
    """Scale or bounds, by name."""

    seed: int
    schedule: str
    """Schedule of the recipe, as JSON."""


def main() -> None:
    """Train what is left and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=("digits", "fashion_mnist"), default="digits", help="images to train on")
    add("--processes", type=int, default=1, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("runs") / NAME, metavar="DIR", help="for the runs")
    args = parser.parse_args()
    one = next(it for it in CONFIGURATIONS if it.key == f"{args.data}, large, sgd")
    searched = newest(SEARCHED, RESULTS)
    if searched is None:
        raise SystemExit("the rates are those of benchmarks/learning_rates.py: run it first")
    found = json.loads(searched.read_text(encoding="utf-8"))[one.key]["policies"]
    work, images = args.work / args.data, one.images(args.work)
    options = {"data": images} if images else {}
    with few_processes(args.processes) as pool:
        bounds = test_range(one, work / "range", options)
        asked = list(runs_of(one, found, bounds))
        records = list(pool.map(partial(train, one, work, options), asked))
    shapes = carry_out(one, study_of(one), args.work, processes=args.processes)["policies"]
    about = circumstances(NAME, f"python benchmarks/learning_rates_shapes.py --data {args.data}")
    path = newest(NAME, RESULTS) or RESULTS / f"{NAME}_{hardware()}_{today()}.json"
    every = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    every[one.key] = {
        **about,
        "rates from": searched.name,
        "range": bounds,
        "runs": records,
        "shapes": shapes,
    }
    path.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    print(path)


def study_of(one: Configuration) -> dict[str, Any]:
    """Return the study of a configuration's shapes: own ones, `sin` too, and changed ones."""
    study = one.study()
    peak = study["recipes"][one.optimizer]["set"]["schedule"]["peak_lr"]
    shapes = {}
    for name in sorted({*SHAPES, *BOUNDED}):
        own = {key: it for key, it in schedule_of(one, name, peak).items() if key != "peak_lr"}
        shapes[name] = own
        for change in SHAPES.get(name, ()):
            shapes[f"{name}-{change.name}"] = {**own, "decay": change.of(own["decay"])}
    return study | {"name": f"{one.name}-shapes", "policies": shapes}


def runs_of(
    one: Configuration, found: Mapping[str, Any], bounds: Mapping[str, Any]
) -> Iterator[Asked]:
    """Yield the runs of a configuration, whose policies have these rates."""
    for name in SCALED:
        for factor in FACTORS:
            scaled = schedule_of(one, name, found[name]["rate"] * factor)
            yield from _seeds("scales", name, f"{factor:g}", scaled)
    for name in BOUNDED:
        own = schedule_of(one, name, bounds["upper"]["value"])
        between = {**own, "decay": {**own["decay"], "low_lr": bounds["lower"]["value"]}}
        yield from _seeds("bounds", name, BETWEEN, between)


def _seeds(group: str, policy: str, what: str, schedule: Mapping[str, Any]) -> Iterator[Asked]:
    for seed in range(1, SEEDS + 1):
        yield Asked(group, policy, what, seed, json.dumps(schedule))


def schedule_of(one: Configuration, name: str, peak: float) -> dict[str, Any]:
    """Return the schedule of a policy at a peak rate."""
    of = SETS[one.data]
    steps = of.epochs * of.images / of.batches[one.batch]
    return {"peak_lr": peak, **policies(peak=peak, epochs=of.epochs, steps=steps)[name]}


def recipe_of(one: Configuration, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a configuration, evaluated at the end alone, with further changes."""
    (of,) = one.study()["recipes"].values()
    every = of["set"] | {"evaluation": {}, "monitor": []} | dict(changes)
    return load_recipe(of["recipe"], [f"{key}={json.dumps(it)}" for key, it in every.items()])


def test_range(one: Configuration, out: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of the range test of a configuration."""
    recipe = recipe_of(one, {})
    rates = choose_range(recipe, low=None, high=None, steps=None, seeds=RANGE_SEEDS)
    train_range(recipe, Options(out=out, report=False, **options), rates)
    found = content(read_range(recipe, out, rates))
    return {key: value for key, value in found.items() if key != "curves"}


def train(one: Configuration, work: Path, options: Mapping[str, Any], asked: Asked) -> Any:  # noqa: ANN401 -- JSON
    """Return the record of a run, from its folder if it has ended with this schedule."""
    folder = work / asked.group / f"{asked.policy} {asked.what}" / f"seed-{asked.seed}"
    record = folder.with_suffix(".json")
    if record.is_file() and (kept := json.loads(record.read_bytes()))["schedule"] == asked.schedule:
        return kept
    recipe = recipe_of(one, {"schedule": json.loads(asked.schedule), "seed": asked.seed})
    try:
        run(recipe, out=folder, resume="auto", report=False, **options)
    except DivergedError as error:
        print(f"{folder}: {error}")
    found = outcome(read_run(folder))
    content = {
        "group": asked.group,
        "policy": asked.policy,
        "what": asked.what,
        "seed": asked.seed,
        "schedule": asked.schedule,
        "peak_lr": recipe.schedule.peak_lr,
        "top1": round(found.top1, 5),
        "diverged": found.diverged,
    }
    if not found.diverged:
        sure = measure_confidence(folder, Options(out=folder, **options))
        content |= {
            "average_confidence": round(sure.average_confidence, 5),
            "confidence_deviation": round(sure.confidence_deviation, 5),
            "class_confidence_deviation": round(sure.class_confidence_deviation, 5),
        }
    record.write_text(json.dumps(content), encoding="utf-8")
    return content


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
