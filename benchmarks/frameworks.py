"""Exchange settings between training frameworks: does the best of one fail on another (GTDLBench).

    python benchmarks/frameworks.py [--data digits|cifar10] [--processes N]

Needs lightning (pip install 'largebatch[examples]') and, for CIFAR-10, LARGEBATCH_DATA. Every
setting of SETTINGS trains the same network on the same pixels, without augmentation, in three
loops: plain PyTorch as torchvision's references/classification/train.py at 017e9b9, timm's train.py
at 004fb5f, and largebatch. Lightning's Trainer takes the steps of PyTorch's loop: one seed of each
setting shows that it ends alike. A setting is what a user writes down:
batch, optimizer, rate, weight decay, decay, warm-up, label smoothing. All else is the framework's:

- torch and Lightning decay all weights, biases too; timm and largebatch not the biases;
- `sgd` with momentum is Nesterov's in timm alone;
- torch, timm and Lightning change the rate once an epoch, largebatch in each update; timm's steps
  fall an epoch sooner;
- timm drops the last batch of an epoch, torch and Lightning train on a small one, and that of
  largebatch goes on with the next epoch.

Decays are stretched over the run; timm's warm-up of 5 in 300 epochs is none then. The weights at
the start are torch's default of the same modules in all. Started again it continues. Writes
benchmarks/results/frameworks_<machine>_<date>.json: top-1 of all, and the best settings exchanged.

Decided before: the CHOOSING first seeds choose the best setting of each framework, and SEEDS others
are the result, on the same test images. Differences between a framework's own best setting and
those of the others hold together, with 95 %, by the noise of all cells of which no run fails
(contrasts.py). A cell of which one fails has no difference: how many fail is counted.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from contrasts import FAILS, BySeed, contrast, no_run_fails, noise_of, none_fails
from defaults import apart
from frameworks_loops import Data, Loop, Setting, train_lightning, train_timm, train_torch
from measuring import RESULTS, circumstances, few_processes, hardware, newest, today
from polishing_data import prepare

from largebatch import load_recipe, run
from largebatch.data.pipeline import open_images
from largebatch.data.types import IntArray
from largebatch.distributed.serial import Serial
from largebatch.errors import DivergedError
from largebatch.models import build
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe

NAME = "frameworks"
LIGHTNING = "lightning"
CHOOSING, SEEDS = 2, 5
IMAGES = 10_000
CLASSES = 10

Sets = Literal["digits", "cifar10"]

COMMON: dict[str, Any] = {
    "data.crop_area": None,
    "data.flip": False,
    "batch.bn_span": None,
    "polish": None,
    "loss.label_smoothing": 0.0,
    "evaluation": {},
    "execution.cache": "memory",
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits_96", {
        "data.image_size": 20, "model": {"name": "lenet5", "arguments": {}}, "duration.epochs": 10,
    }),
    "cifar10": ("cifar10_quick_128", {"data.train_samples": IMAGES, "duration.epochs": 12}),
}  # fmt: skip
"""Recipe of every data set and its changes: data, network and length."""

OURS = {
    "digits": Setting(96, "sgd", 0.05, weight_decay=5e-4, decay="cosine", warmup=1),
    "cifar10": Setting(
        128, "sgd", 0.01, weight_decay=4e-3, decay="steps", at=(120 / 140, 130 / 140)
    ),
}
"""The settings of docs/examples/digits_policies.yaml, with a cosine, and of cifar10_quick_128."""

SETTINGS = {
    "torch": Setting(32, "sgd", 0.1, weight_decay=1e-4, decay="steps", at=(1 / 3, 2 / 3)),
    "timm": Setting(128, "sgd", 0.05, weight_decay=2e-5, decay="cosine", smoothing=0.1),
    "lightning": Setting(32, "adam", 1e-4),
}
"""Defaults of torchvision's and timm's script, and of Lightning's image classifier
(examples/pytorch/basics/backbone_image_classifier.py at 021e6b1)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One run."""

    framework: str
    setting: str
    seed: int


def main() -> None:
    """Train what is left and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", choices=tuple(RECIPES), default="digits", help="images to train on")
    add("--processes", type=int, default=1, metavar="N", help="runs at a time, of one thread each")
    add("--work", type=Path, default=Path("runs") / NAME, metavar="DIR", help="for the runs")
    args = parser.parse_args()
    if find_spec(LIGHTNING) is None:
        raise SystemExit("this needs Lightning: pip install 'largebatch[examples]'")
    folder = None
    if args.data == "cifar10":
        folder = prepare(args.work / "data", "cifar10", train=IMAGES)
    asked = [
        Asked(framework, setting, seed)
        for seed in range(1, CHOOSING + SEEDS + 1)
        for framework in FRAMEWORKS
        for setting in settings_for(args.data)
        if framework != LIGHTNING or seed == 1
    ]
    with few_processes(args.processes) as pool:
        records = list(pool.map(partial(train, args.data, args.work, folder), asked))
    about = circumstances(NAME, f"python benchmarks/frameworks.py --data {args.data}")
    about["versions"] |= {LIGHTNING: version(LIGHTNING)}
    path = newest(NAME, RESULTS) or RESULTS / f"{NAME}_{hardware()}_{today()}.json"
    every = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    every[args.data] = about | summary(records)
    path.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    print(path)


def settings_for(data: str) -> dict[str, Setting]:
    """Return the settings that are exchanged on a data set."""
    return {**SETTINGS, "largebatch": OURS[data]}


def summary(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all runs, the best settings and what they have elsewhere, and what lies apart."""
    runs = list(records)
    every: dict[str, dict[str, dict[int, float]]] = {}
    for one in runs:
        seeds = every.setdefault(one["framework"], {}).setdefault(one["setting"], {})
        seeds[one["seed"]] = one["top1"]
    lightning = every.pop(LIGHTNING)
    best = {name: chosen(found) for name, found in every.items()}
    top1 = {
        framework: {
            setting: {seed: value for seed, value in cell.items() if seed > CHOOSING}
            for setting, cell in found.items()
        }
        for framework, found in every.items()
    }
    everywhere = {setting: {name: top1[name][setting] for name in top1} for setting in lightning}
    return {
        "runs": runs,
        "Lightning minus PyTorch, seed 1": {
            setting: cell[1] - every["torch"][setting][1] for setting, cell in lightning.items()
        },
        "best settings": best,
        "frameworks with a setting, best to worst": {
            setting: apart(cells)
            for setting, cells in everywhere.items()
            if no_run_fails(*cells.values())
        },
        "best settings exchanged": list(exchanged(top1, best)),
    }


def chosen(settings: Mapping[str, BySeed]) -> str:
    """Return the setting with the best mean of the seeds that choose."""
    means = {
        name: statistics.fmean(cell[seed] for seed in range(1, CHOOSING + 1))
        for name, cell in settings.items()
    }
    return max(means, key=lambda name: means[name])


def exchanged(
    top1: Mapping[str, Mapping[str, BySeed]], best: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield what each framework has with the best setting of each other one, beside its own."""
    noise = noise_of(none_fails(cell for found in top1.values() for cell in found.values()))
    pairs = list(permutations(top1, 2))
    for best_of, used_on in pairs:
        value, own = (top1[used_on][best[name]] for name in (best_of, used_on))
        compared = best[best_of] != best[used_on] and no_run_fails(value, own)
        terms: Sequence[tuple[float, BySeed]] = ((1.0, value), (-1.0, own))
        points = contrast(terms, noise, together=len(pairs)).scaled(100) if compared else None
        yield {
            "best of": best_of,
            "used on": used_on,
            "setting": best[best_of],
            "runs that fail": sum(one < FAILS for one in value.values()),
            "runs that fail with the own best": sum(one < FAILS for one in own.values()),
            "minus the own best": points and points._asdict(),
        }


def train(data: str, work: Path, folder: Path | None, asked: Asked) -> Any:  # noqa: ANN401 -- JSON
    """Return the record of a run, from its file if it has ended with this definition."""
    out = work / data / asked.framework / asked.setting / f"seed-{asked.seed}"
    record, setting = out.with_suffix(".json"), settings_for(data)[asked.setting]
    name, own = RECIPES[data]
    definition = json.loads(json.dumps([asdict(setting), name, COMMON | own]))
    if record.is_file() and (found := json.loads(record.read_bytes()))["definition"] == definition:
        return found
    begun = time.process_time()
    top1 = FRAMEWORKS[asked.framework](data, folder, setting, asked.seed, out)
    content = {
        "framework": asked.framework,
        "setting": asked.setting,
        "seed": asked.seed,
        "top1": 1 / CLASSES if top1 is None else round(top1, 5),
        "diverged": top1 is None,
        "cpu_seconds": round(time.process_time() - begun, 2),
        "definition": definition,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(content), encoding="utf-8")
    return content


def base_recipe(data: str) -> Recipe:
    """Return the recipe that all settings of a data set change."""
    name, own = RECIPES[data]
    return load_recipe(name, _words(COMMON | own))


def _words(changes: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


@cache
def pixels(data: str, folder: Path | None) -> Data:
    """Return the images and labels as largebatch reads them, and the number of epochs."""
    recipe = base_recipe(data)
    images = open_images(recipe, make_plan(recipe, workers=1), Serial(), folder=folder)
    batches = (
        images.clean("train", _parts(len(images.train_index))),
        images.clean("val", _parts(len(images.val_index))),
    )
    found = [torch.cat(it).contiguous() for each in batches for it in zip(*each, strict=True)]
    images.close()
    assert recipe.duration.epochs is not None
    return Data(int(recipe.duration.epochs), *found)


def _parts(number: int) -> Iterator[IntArray]:
    return iter(np.array_split(np.arange(number), math.ceil(number / 1_000)))


def _elsewhere(
    loop: Loop, data: str, folder: Path | None, setting: Setting, seed: int, _: Path
) -> float | None:
    """Return top-1 of another framework's run; None if it diverged."""
    given, recipe = pixels(data, folder), base_recipe(data)
    torch.manual_seed(seed)
    model = build(recipe.model.name, num_classes=CLASSES)
    try:
        loop(model, given, setting)
    except FloatingPointError:
        return None
    model.eval()
    with torch.no_grad():
        logits = model(given.val_images)
    if not torch.isfinite(logits).all():
        return None
    return float((logits.argmax(1) == given.val_labels).float().mean())


def train_ours(
    data: str, folder: Path | None, setting: Setting, seed: int, out: Path
) -> float | None:
    """Return top-1 of a run of the recipe with a setting; None if it diverged."""
    name, own = RECIPES[data]
    epochs = own["duration.epochs"]
    decay: dict[str, object] = {"kind": setting.decay}
    if setting.decay == "steps":
        decay["at"] = [{"epochs": epochs * part} for part in setting.at]
    sgd = {"kind": "sgd", "momentum": 0.9, "weight_decay": setting.weight_decay}
    warmup = {"epochs": setting.warmup} if setting.warmup else None
    changes = {
        "batch.global_batch": setting.batch,
        "optimizer": sgd if setting.optimizer == "sgd" else {"kind": "adamw", "weight_decay": 0.0},
        "schedule": {"peak_lr": setting.rate, "warmup": warmup, "decay": decay},
        "loss.label_smoothing": setting.smoothing,
        "seed": seed,
    }
    recipe = load_recipe(name, _words(COMMON | own | changes))
    try:
        return run(recipe, out=out, resume="auto", report=False, data=folder).top1
    except DivergedError:
        return None


FRAMEWORKS: dict[str, Callable[[str, Path | None, Setting, int, Path], float | None]] = {
    "torch": partial(_elsewhere, train_torch),
    "timm": partial(_elsewhere, train_timm),
    LIGHTNING: partial(_elsewhere, train_lightning),
    "largebatch": train_ours,
}

if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
