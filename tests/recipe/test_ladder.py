"""Every number of the published recipes for ImageNet, against tables copied from their sources.

The tables were written from the sources and not from the recipes: MLPerf's reference convergence
points (mlperf-logging, rcps_resnet.json), the entries of training_results_v0.6, v0.7, v1.0 and
v3.1, NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch, and the papers that a row names.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.installed import origin
from largebatch.recipe.loading import load_recipe

ELSEWHERE = {
    *("resnet50_32768_nesterov", "resnet50_32768_shampoo", "resnet50_65536_shampoo"),
    *("resnet50_32768_lamb", "resnet50_1024_schedule_free", "resnet50_34816_batch_schedule"),
    *("resnet50_8192_muon", "resnet50_32768_muon"),
    *json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8")),
}
"""Recipes that test_optimizer_recipes.py and test_published.py hold against their tables."""

FILES = {
    path.stem: path
    for path in sorted((Path(__file__).parents[2] / "recipes" / "imagenet").glob("*.yaml"))
    if path.stem not in ELSEWHERE
}
FREE = ("name", "seed", "evaluation.", "execution.")
"""No numbers of a source: when accuracy is measured, and the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a source gives, by the keys of a recipe."""

    settings: dict[str, object]
    published: str
    """A part of the header."""


IMAGENET: dict[str, object] = {
    "data.source": "folder",
    "data.classes": 1000,
    "data.train_samples": 1_281_167,
    "data.val_samples": 50_000,
    "data.image_size": 224,
    "data.crop_area": (0.08, 1.0),
    "data.crop_aspect": (0.75, 1.3333333),
    "data.flip": True,
    "data.eval_resize": 256,
    "model.name": "resnet50",
}

MLPERF_RULES = IMAGENET | {
    "data.crop_area": (0.05, 1.0),
    "model.head_std": 0.01,
    "optimizer.kind": "lars",
    "optimizer.convention": "reference",
    "optimizer.eta": 1e-3,
    "optimizer.eps": 0.0,
    "schedule.decay.kind": "polynomial",
    "schedule.decay.power": 2.0,
    "schedule.decay.end_lr": 1e-4,
    "schedule.first_step": 1,
    "loss.label_smoothing": 0.1,
}
"""Training policies of MLCommons, closed division, and the reference implementation in TF2."""

POINTS = """
 batch |     lr | warmup | momentum |    wd | epochs | span |  mean | runs | decay steps
  1632 |    7.4 |      2 |       .9 |  5e-5 |     35 |  204 |  35.0 |   17 | 27476
  3264 |   10.5 |      2 |       .9 |  5e-5 |     37 |  204 |35.154 |   15 | 14523
  4096 |     10 |      5 |       .9 |  2e-4 |     42 |   64 |39.875 |   10 | 13137
  8192 |     17 |      5 |       .9 |  2e-4 |     44 |   64 |41.875 |   10 |  6095
 13056 |   12.8 |      9 |       .9 |2.5e-5 |     48 |  204 |  45.5 |   10 |  4710
 32768 |   21.2 |     16 |      .94 |2.5e-5 |     58 |  128 |  56.0 |   10 |  2267
 49152 | 19.405 |     24 |  .951807 |  1e-4 |     71 |  256 |  68.0 |   10 |  1846
 58880 | 23.246 |     29 |  .951807 |  1e-4 |     82 |  230 |  80.0 |   10 |  1785
 65536 | 24.699 |     31 |  .951807 |  1e-4 |     89 |  128 |  84.5 |   10 |  1133
 67840 | 24.699 |     31 |  .951807 |  1e-4 |     89 |  424 |85.846 |   28 |  1133
"""
"""Reference convergence points; `mean` of epochs to 75.9 % top-1."""


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()[1:]]


def point(row: list[str]) -> Row:
    batch, lr, warmup, momentum, decay, epochs, span, mean, runs, _ = row
    return Row(
        settings=MLPERF_RULES
        | {
            "duration.epochs": float(epochs),
            "batch.global_batch": int(batch),
            "batch.bn_span": int(span),
            "optimizer.momentum": float(momentum),
            "optimizer.weight_decay": float(decay),
            "schedule.peak_lr": float(lr),
            "schedule.warmup.epochs": float(warmup),
        },
        published=f"75.9 % top-1 after {mean} epochs (mean of {runs} runs",
    )


ENTRIES = """
 recipe               | batch |                 lr | warmup   |           momentum |     wd | length | span
 resnet50_8192_google |  8192 |                 17 | 5 epochs |                 .9 |   2e-4 | 6875 steps | 64
 resnet50_32768_google| 32768 |                 29 | 18 epochs|               .929 |   1e-4 | 2355 steps | 64
 resnet50_55296_google| 55296 |              25.67 | 29 epochs|             .94053 |   1e-4 | 1860 steps | 64
 resnet50_65536_google| 65536 | 23.080977304670448 | 652 steps| .9537213777059405  |   1e-4 | 1817 steps | 64
 resnet50_57344_nvidia| 57344 |                 23 | 32 epochs|                .95 | 2.5e-5 |  78 epochs | 32
"""  # noqa: E501 -- a table
"""Command lines of training_results_v0.7 (65,536: its train.py, 92 epochs of 19.75 steps with
33 of warm-up), v1.0 and v3.1."""

MXNET: dict[str, object] = {
    "optimizer.convention": "scaled-momentum",
    "loss.off_target": "others",
}


def length(key: str, text: str) -> dict[str, object]:
    number, unit = text.split()
    return {f"{key}.{unit}": float(number) if unit == "epochs" else int(number)}


def entry(row: list[str]) -> Row:
    recipe, batch, lr, warmup, momentum, decay, total, span = row
    own = {
        "batch.global_batch": int(batch),
        "batch.bn_span": int(span),
        "optimizer.momentum": float(momentum),
        "optimizer.weight_decay": float(decay),
        "schedule.peak_lr": float(lr),
        **length("schedule.warmup", warmup),
        **length("duration", total),
    }
    nvidia = recipe.endswith("nvidia")
    return Row(
        settings=MLPERF_RULES | own | (MXNET if nvidia else {}),
        published="75.9 % top-1, the target of MLPerf" + (", in 10.98 s" if nvidia else ""),
    )


NUS = """
 batch | log2 lr | warmup    | eps  | span |  top-1
   512 |       2 | 10 / 64   | 1e-5 |  128 |  77.02
  1024 |     2.5 | 10 / 32   | 1e-5 |  128 |  76.96
  4096 |     3.5 | 10 / 8    | 1e-5 |  128 |  77.38
  8192 |       4 | 10 / 4    | 1e-5 |  128 |  77.14
 16384 |     4.5 | 5 / 1     | 1e-5 |  128 |  76.96
 32768 |       5 | 14 / 1    |  0.0 |   64 |  76.75
"""
"""README of LARS-ImageNet-PyTorch; the span is its batch on a GPU."""


def of_nus(row: list[str]) -> Row:
    batch, power, warmup, eps, span, top1 = row
    epochs, part = map(float, warmup.split("/"))
    return Row(
        settings=IMAGENET
        | {
            "duration.epochs": 90.0,
            "model.name": "torchvision/resnet50",
            "batch.global_batch": int(batch),
            "batch.bn_span": int(span),
            "optimizer.kind": "lars",
            "optimizer.convention": "outside",
            "optimizer.momentum": 0.9,
            "optimizer.weight_decay": 1e-4,
            "optimizer.eta": 1e-3,
            "optimizer.eps": float(eps),
            "optimizer.clip_ratio": 50.0,
            "optimizer.clip_gradient": 10.0,
            "schedule.peak_lr": 2.0 ** float(power),
            "schedule.warmup.epochs": epochs / part,
            "schedule.decay.kind": "polynomial",
            "schedule.decay.power": 2.0,
            "schedule.decay.end_lr": 0.0,
            "loss.label_smoothing": 0.1,
            "loss.off_target": "others",
        },
        published=f"{top1} % top-1",
    )


FUJITSU = IMAGENET | {
    "duration.steps": 1350,
    "data.crop_area": (0.05, 0.9),
    "data.crop_aspect": (0.6666667, 1.5),
    "model.arguments.zero_init_last": False,
    "batch.global_batch": 86_016,
    "batch.bn_span": 42,
    "optimizer.kind": "lars",
    "optimizer.convention": "fujitsu",
    "optimizer.momentum": 0.96,
    "optimizer.weight_decay": 5e-5,
    "optimizer.eta": 0.0025,
    "optimizer.eps": 1e-9,
    "schedule.peak_lr": 13.0,
    "schedule.warmup.steps": 540,
    "schedule.decay.kind": "polynomial",
    "schedule.decay.power": 2.2,
    "schedule.decay.end_lr": 13 * 0.0025,
    "schedule.decay.over.steps": 780,
    "schedule.first_step": 1,
    "loss.label_smoothing": 0.1,
    "loss.off_target": "others",
    "precision": "fp16",
    "reduction.dtype": "fp16",
    "polish.clean.steps": 75,
    "polish.statistics.samples": 86_016,
}
"""Code and logs of MLPerf Training v0.6, open division; 15 steps are its epoch."""


def of_hpdc(batch: int, gpus: int, published: str) -> Row:
    """Kasagi et al., HPDC 2020, gives batch, GPUs, accuracy and time; the rest is Fujitsu's."""
    updates = -(-1_281_167 // batch)
    settings = {
        key: value * updates // 15 if isinstance(value, int) and key.endswith("steps") else value
        for key, value in FUJITSU.items()
    }
    settings |= {"batch.global_batch": batch, "polish.statistics.samples": batch}
    settings |= {"batch.bn_span": batch // gpus}
    return Row(settings=settings, published=published)


STEPS: dict[str, object] = {
    "duration.epochs": 90.0,
    "optimizer.kind": "sgd",
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 1e-4,
    "schedule.decay.kind": "steps",
    "schedule.decay.gamma": 0.1,
}

LADDER = {
    **{f"resnet50_{row[0]}_mlperf": point(row) for row in cells(POINTS)},
    **{row[0]: entry(row) for row in cells(ENTRIES)},
    **{f"resnet50_{row[0]}_nus": of_nus(row) for row in cells(NUS)},
    "resnet50_86016_fujitsu": Row(settings=FUJITSU, published="75.93 to 76.11 % top-1"),
    "resnet50_81920_hpdc": of_hpdc(81_920, 2_048, "75.08 % top-1 in 74.7 s"),
    "resnet50_86016_hpdc": of_hpdc(86_016, 3_072, "75.97 % top-1 in 62.1 s"),
    # arXiv:1706.02677: the abstract, and programs that follow the paper
    "resnet50_8192_goyal": Row(
        settings=IMAGENET
        | STEPS
        | {
            "model.arguments.zero_init_last": True,
            "model.head_std": 0.01,
            "batch.global_batch": 8_192,
            "batch.bn_span": 32,
            "optimizer.nesterov": True,
            "schedule.peak_lr": 0.1 * 8_192 / 256,
            "schedule.warmup.epochs": 5.0,
            "schedule.start_lr": 0.1,
            "schedule.decay.at": (30.0, 60.0, 80.0),
        },
        published="76.26 % top-1 (from memory)",
    ),
    # Deep Learning Performance: Scale-up vs Scale-out, section 7.4.2
    "resnet50_1024_dell": Row(
        settings=IMAGENET
        | STEPS
        | {
            "batch.global_batch": 1_024,
            "batch.bn_span": 256,
            "schedule.peak_lr": 0.4,
            "schedule.warmup": None,
            "schedule.decay.at": (10.0, 60.0),
        },
        published="no accuracy",
    ),
}


def flat(value: object, key: str = "") -> dict[str, object]:
    """Return what a recipe sets, by dotted keys; the points of a stepwise decay as epochs."""
    if isinstance(value, dict):
        return {
            name: one
            for part, below in value.items()
            for name, one in flat(below, f"{key}.{part}" if key else part).items()
        }
    if isinstance(value, list | tuple):
        return {key: tuple(one["epochs"] if isinstance(one, dict) else one for one in value)}
    return {key: value}


@pytest.mark.parametrize("stem", FILES)
def test_every_number_of_a_published_recipe_is_its_sources(stem: str) -> None:
    """A recipe of this folder without a row fails: give it one, from its source."""
    row, text = LADDER[stem], FILES[stem].read_text()
    settings = flat(load_recipe(FILES[stem]).model_dump(exclude_unset=True))
    ours = {key: value for key, value in settings.items() if not key.startswith(FREE)}
    assert ours == {
        key: pytest.approx(value) if isinstance(value, float) else value
        for key, value in row.settings.items()
    }
    header = " ".join(text.partition("\nname:")[0].replace("#", " ").split())
    assert row.published in header.partition("Published: ")[2]
    assert origin(text)[0]
    assert "Measured here: not yet." in header


def test_every_row_is_a_recipe() -> None:
    assert set(LADDER) == set(FILES)


@pytest.mark.parametrize("row", cells(POINTS), ids=lambda row: row[0])
def test_steps_of_decay_are_those_of_the_reference_points(row: list[str]) -> None:
    """They count all steps, or those from the end of the warm-up on; 67,840 repeats 65,536's."""
    plan = make_plan(load_recipe(FILES[f"resnet50_{row[0]}_mlperf"]), workers=1)
    found = {plan.steps, plan.steps - plan.warmup_steps + 1}
    near = [steps for steps in found if abs(steps / int(row[-1]) - 1) < 0.005]
    assert bool(near) == (row[0] != "67840")
