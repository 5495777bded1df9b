"""Time single gradients of the recipes of a study of servers: what `compute` of its file states.

    python benchmarks/gradient_times.py [STUDY] [--data RECIPE=DIR ...]

Processor seconds on one core of forward and backward over a recipe's mini_batch, which its own
input pipeline reads. The recipes, and the paper's LSTM on random
words, take turns, so that all have the machine of the same minutes.
Prints `sample`, the mean over the samples of a gradient, and `factor`, the single times over their
mean, and writes benchmarks/results/gradient_times_<machine>_<date>.json.
"""

import argparse
import time
from contextlib import closing
from pathlib import Path
from statistics import fmean

import torch
from measuring import Step, take_turns, write

from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.lab.studies.queue.study import base_recipe
from largebatch.lab.studies.servers.study import Trained, load_study
from largebatch.models.lstm import LSTM
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.runs.state import build_criterion
from largebatch.training.loss import cross_entropy

NAME = "gradient_times"
GRADIENTS = 40
"""Timed gradients of each recipe."""

VOCABULARY, WINDOWS, WORDS = 10_000, 20, 20
"""Sizes of Penn Treebank's vocabulary, and of a mini-batch of the LSTM."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", nargs="?", default="jaeger", help="a file, or an installed study")
    parser.add_argument("--data", action="append", default=[], metavar="RECIPE=DIR")
    args = parser.parse_args()
    folders = {name: Path(folder) for name, folder in (each.split("=", 1) for each in args.data)}
    study = load_study(args.study)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    gradients: dict[str, Step] = {
        name: gradient_of(trained, Path(args.study).parent, folders.get(name))
        for name, trained in study.recipes.items()
    }
    gradients["lstm"] = gradient_of_lstm()
    sizes = {"lstm": WINDOWS} | {name: each.mini_batch for name, each in study.recipes.items()}
    times = take_turns(gradients, rounds=GRADIENTS, steps=1, clock=time.process_time)
    found = {
        name: {
            "mini_batch": size,
            "sample": float(f"{fmean(seconds) / size:.3g}"),
            "factor": [round(one / fmean(seconds), 3) for one in seconds],
        }
        for name, seconds in times.items()
        if (size := sizes[name])
    }
    for name, each in found.items():
        print(f"{name}: sample: {each['sample']}\n  seconds: {each['factor']}")
    print(write(NAME, f"python benchmarks/{NAME}.py {args.study}", {"recipes": found}))


def gradient_of(trained: Trained, folder: Path, data: Path | None) -> Step:
    """Return what computes the gradient of one mini-batch of a recipe."""
    tree = base_recipe(trained, folder).model_dump(mode="json")
    span = tree["batch"]["bn_span"] and trained.mini_batch
    tree["batch"] |= {"global_batch": trained.mini_batch, "bn_span": span}
    tree["polish"], tree["evaluation"] = None, {}
    recipe = validate_tree(Recipe, tree, source=trained.recipe)
    backend, plan = Serial(), make_plan(recipe, workers=1)
    pipeline = open_images(recipe, plan, backend, folder=data)
    with closing(pipeline.training(range(plan.train_steps), clean=False)) as batches:
        samples, labels = next(iter(batches))
    model, criterion = build_model(recipe, backend.device).train(), build_criterion(recipe)

    def gradient() -> None:
        criterion(model(samples), labels).backward()
        model.zero_grad()

    return gradient


def gradient_of_lstm() -> Step:
    """Return what computes the gradient of the LSTM of Jaeger et al. over random words."""
    model, criterion = LSTM(VOCABULARY).train(), cross_entropy(smoothing=0.0, off_target="all")
    words, following = torch.randint(VOCABULARY, (2, WINDOWS, WORDS))

    def gradient() -> None:
        criterion(model(words).flatten(0, 1), following.flatten()).backward()
        model.zero_grad()

    return gradient


if __name__ == "__main__":
    main()
