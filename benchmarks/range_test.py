"""Test whether a recipe trains at the bound of its range test, and how far beyond.

    python benchmarks/range_test.py [--processes N]

The range test of three recipes of the digits, then runs of each at constant rates that are FACTORS
of the upper bound, as long as the test. Both have SEEDS seeds. Writes what the tests found and
top-1 at each rate; a run that diverges counts as chance.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import few_processes, write

from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.lab.measure.lr_range import choose_range, content, read_range, train_range
from largebatch.lab.studies.metrics import interval
from largebatch.runs.options import Options

SEEDS = 3
FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
SAME = ("execution.cache=memory",)
LENET = (
    "data.image_size=20",
    "data.crop_area=null",
    "model={name: lenet5, arguments: {}}",
    "batch.bn_span=null",
    "polish=null",
    "schedule.peak_lr=0.1",
)
RECIPES = {
    "LeNet-5, SGD with momentum 0.9": (*LENET, "optimizer={kind: sgd, momentum: 0.9}"),
    "LeNet-5, SGD without momentum": (*LENET, "optimizer={kind: sgd, momentum: 0.0}"),
    "digits_96 with images of 16 pixels, LARS": ("data.image_size=16",),
}
"""Range of the tests, as multiples of peak_lr."""

Asked = tuple[str, float, float, int, int]
"""A run at a constant rate: recipe, factor, rate, updates, seed."""


def main() -> None:
    """Test every recipe, train it at constant rates, and write both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="runs at a time")
    args = parser.parse_args()
    with few_processes(args.processes) as pool, TemporaryDirectory() as work:
        tests = dict(zip(RECIPES, pool.map(partial(found_by, Path(work)), RECIPES), strict=True))
        asked = [one for name, found in tests.items() for one in constant_rates(name, found)]
        top1 = list(pool.map(partial(train, Path(work)), asked))
    by_factor: dict[str, dict[float, list[float]]] = {}
    for (name, factor, *_), reached in zip(asked, top1, strict=True):
        by_factor.setdefault(name, {}).setdefault(factor, []).append(reached)
    result = {
        "settings": {name: [*SAME, *changes] for name, changes in RECIPES.items()},
        "tests": tests,
        "top-1 at multiples of the upper bound": {
            name: {
                factor: {"by seed": reached, "points": interval(reached).scaled(100)._asdict()}
                for factor, reached in each.items()
            }
            for name, each in by_factor.items()
        },
    }
    print(write("range_test", "python benchmarks/range_test.py", result))


def found_by(work: Path, name: str) -> dict[str, Any]:
    """Return the result of a recipe's range test."""
    recipe = load_recipe("digits_96", [*SAME, *RECIPES[name]])
    rates = choose_range(recipe, low=None, high=None, steps=None, seeds=SEEDS)
    train_range(recipe, Options(out=work / name, report=False), rates)
    found = content(read_range(recipe, work / name, rates))
    return {key: value for key, value in found.items() if key != "curves"}


def constant_rates(name: str, found: dict[str, Any]) -> Iterator[Asked]:
    """Yield the runs that are compared with a test."""
    for factor in FACTORS:
        for seed in range(1, SEEDS + 1):
            yield name, factor, factor * found["upper"]["value"], found["steps"], seed


def train(work: Path, asked: Asked) -> float:
    """Return top-1 of a run at a constant rate."""
    name, factor, rate, steps, seed = asked
    constant = f"schedule={{peak_lr: {rate}, warmup: null, decay: {{kind: constant}}}}"
    length = (f"duration={{steps: {steps}}}", "evaluation={}", "polish=null")
    recipe = load_recipe("digits_96", [*SAME, *RECIPES[name], *length, constant, f"seed={seed}"])
    try:
        top1 = run(recipe, out=work / f"{name}-{factor}-{seed}", report=False).top1
    except DivergedError:
        top1 = None
    return 1 / recipe.data.classes if top1 is None else top1


if __name__ == "__main__":
    main()
