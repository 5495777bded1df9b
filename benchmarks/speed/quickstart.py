"""Time `largebatch train RECIPE` from the command to the report, with several seeds.

    python -m benchmarks.speed.quickstart [RECIPE] [--seeds 5] [--workers 2] [--name quickstart]
        [--starts 5 --start-workers 1 8] [--folder SET] [--set KEY=VALUE ...] [--seconds 300]

Records accuracy after each stage, the gain by polishing, seconds of the updates and of the whole
command, and images a second. --starts also stops that many commands at the first update, for each
number of workers: its seconds, and the processor's. --folder writes Fashion-MNIST or CIFAR-10 from
LARGEBATCH_DATA as a folder of images first. No run starts after --seconds. On a GPU the share of
the peak of a matrix product is that of the network's operations in the updates.
Writes benchmarks/results/<name>_<machine>_<date>.json with every run, mean and spread.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.measuring import add_seconds, paired_ratio, spread, take_turns, write
from benchmarks.speed.resnet50 import PRODUCT, matrix_product, operations_per_image
from benchmarks.studies.images import load, write_part
from largebatch import accelerator, load_recipe
from largebatch.models import build

ROWS = 8192
"""Rows of the matrices in a product."""


def main() -> None:
    args = arguments()
    words = [word for change in args.set for word in ("--set", change)]
    if args.folder:
        train, val = args.images or [len(labels) for _, labels in load(args.folder)]
        words += ["--data", str(write_part(args.work, args.folder, train=train, val=val))]
    result: dict[str, Any] = {"recipe": args.recipe, "changes": args.set}
    for workers in args.start_workers if args.starts else ():
        starts = [
            command(args.recipe, [*words, "--workers", str(workers), "--max-steps", "1"])
            for _ in range(args.starts)
        ]
        result[f"start with --workers {workers}"] = {
            key: spread(values) | interval(values)
            for key in ("to the first update", "of processors")
            if (values := [one[key] for one in starts])
        }
    end = time.monotonic() + args.seconds
    runs: list[dict[str, Any]] = []
    for seed in range(1, args.seeds + 1):
        if runs and time.monotonic() > end:
            break
        more = ["--set", f"seed={seed}", "--workers", str(args.workers)]
        runs.append({"seed": seed, **command(args.recipe, [*words, *more])})
        write(args.name, result | summary_of(runs))
    result |= summary_of(runs)
    if accelerator.count():
        result["share of the peak"] = share_of_peak(args, result["images a second"]["median"])
    write(args.name, result)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="digits_96")
    parser.add_argument("--name", default="quickstart", help="name of the result")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--start-workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--folder", help="fashion_mnist or cifar10")
    parser.add_argument(
        "--images", type=int, nargs=2, help="training and test images; default: all"
    )
    parser.add_argument("--set", nargs="+", default=[], help="changes of the recipe")
    parser.add_argument("--work", type=Path, default=Path("build"), help="for folders of images")
    add_seconds(parser)
    return parser.parse_args()


def command(recipe: str, words: list[str]) -> dict[str, Any]:
    """Train a recipe by the command; return its seconds and what its summary holds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    first = None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        process = subprocess.Popen(
            [sys.executable, "-m", "largebatch", "train", recipe, "--out", str(out), *words],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in process.stdout or ():
            if first is None and " step 1/" in line:
                first = time.monotonic() - start
        if process.wait():
            sys.exit(f"{recipe} failed with exit code {process.returncode}")
        seconds = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return {
        "to the first update": first,
        "of the command": seconds,
        "of processors": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "of updates": summary["samples"] / summary["images_per_second"],
        **{key: summary[key] for key in ("seconds", "images_per_second", "stages")},
    }


def summary_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return mean, spread and interval of what the runs recorded."""
    top1 = {
        stage["name"]: [one["stages"][number]["top1"] for one in runs]
        for number, stage in enumerate(runs[0]["stages"])
    }
    first, last = next(iter(top1.values())), list(top1.values())[-1]
    found = {
        "images a second": [one["images_per_second"] for one in runs],
        "seconds of the command": [one["of the command"] for one in runs],
        "seconds of updates": [one["of updates"] for one in runs],
        "seconds": [one["seconds"] for one in runs],
        "top1 at the end": last,
    }
    gains = [after - before for before, after in zip(first, last, strict=True)]
    return {
        "n": len(runs),
        "top1": {name: spread(values) for name, values in top1.items()},
        "top1_gain_of_polishing": spread(gains),
        **{name: spread(values) | interval(values) for name, values in found.items()},
        "runs": runs,
    }


def interval(values: list[float]) -> dict[str, float]:
    """Return the median of values and its 95 % bootstrap interval."""
    return paired_ratio(values, [1.0] * len(values))


def share_of_peak(args: argparse.Namespace, images_per_second: float) -> dict[str, float]:
    """Return the operations of the updates in a second over those of a matrix product in bf16."""
    recipe = load_recipe(args.recipe, args.set)
    device = accelerator.current()
    side = recipe.data.image_size
    network = recipe.model
    model = build(network.name, num_classes=recipe.data.classes, arguments=network.arguments)
    work = operations_per_image(model.to(device), torch.randn(2, 3, side, side, device=device))
    (seconds,) = take_turns({PRODUCT: matrix_product(device, ROWS)}, rounds=10, steps=10).values()
    return interval([work * images_per_second * each / (2 * ROWS**3) for each in seconds])


if __name__ == "__main__":
    main()
