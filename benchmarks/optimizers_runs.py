"""One run of the study of optimizers: its recipe, and what is kept of it.

The rate rises over WARMUP_PART of a run, stays at its peak up to PEAK_PART and falls straight to
zero, so most of a run does not depend on its length. The polished arm shares the updates up to its
clean epochs.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polishing_cells import part

from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.polish import Polish, Statistics
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Duration, kinds_of, sections_of
from largebatch.report.noise import measured, over
from largebatch.report.run import Run, read_run
from largebatch.tracking.events import RECIPE, Summary

WARMUP_PART, PEAK_PART = 1 / 12, 3 / 4

RESNET, VIT = "resnet9", "vit"
TRANSFORMER = {
    "name": "vit_tiny_patch16_224",
    "arguments": {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4},
}
NETWORKS: dict[str, tuple[str, ...]] = {
    RESNET: (),
    VIT: (f"model={json.dumps(TRANSFORMER)}", "batch.bn_span=null"),
}
"""Changes of the recipe: a ResNet-9 with BatchNorm, and a vision transformer with LayerNorm."""

SECTIONS: dict[str, dict[str, Any]] = {
    "nesterov": {"kind": "sgd", "momentum": 0.9, "nesterov": True},
    "lars": {"kind": "lars", "convention": "reference", "momentum": 0.9, "eta": 0.02},
    "lamb": {"kind": "lamb"},
    "adamw": {"kind": "adamw"},
    "muon": {"kind": "muon"},
}
"""Section `optimizer` without the weight decay."""

STARTS: dict[str, dict[str, tuple[float, float]]] = {
    RESNET: {
        "nesterov": (0.4, 5e-4),
        "lars": (2.0, 5e-4),
        "lamb": (0.01, 0.02),
        "adamw": (4e-3, 0.05),
        "muon": (0.01, 0.05),
    },
    VIT: {
        "nesterov": (0.1, 5e-4),
        "lars": (1.0, 5e-4),
        "lamb": (0.01, 0.02),
        "adamw": (2e-3, 0.05),
        "muon": (4e-3, 0.05),
    },
}
"""First peak rate of a search, at a batch of BASE, and first weight decay."""

BASE = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all runs of a study have in common."""

    recipe: Path
    data: Path | None
    """Folder of the images; None for the digits."""

    epochs: float
    held_out: int
    """Number of training images that judge a search."""

    every_epochs: float
    """Epochs between evaluations."""

    clean_epochs: float
    """Last epochs of the polished arm, on clean images."""

    statistics: int
    """Number of images of the statistics pass of the polished arm."""

    work: Path


@dataclass(frozen=True, slots=True)
class Cell:
    """A network, an optimizer and a batch."""

    network: str
    optimizer: str
    batch: int

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.network}, {self.batch}, {self.optimizer}"

    @property
    def start(self) -> "Setting":
        """First setting of the search; rates go with the square root of the batch."""
        rate, decay = STARTS[self.network][self.optimizer]
        return Setting(_rounded(rate * math.sqrt(self.batch / BASE)), decay)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is searched."""

    rate: float
    """Peak learning rate."""

    decay: float
    """Weight decay."""

    def times(self, *, rate: float = 1.0, decay: float = 1.0) -> "Setting":
        """Return a setting with other values by these factors."""
        return Setting(_rounded(self.rate * rate), _rounded(self.decay * decay))


@dataclass(frozen=True, slots=True)
class Job:
    """A run of a cell: a trial of the search, or a seed."""

    cell: Cell
    setting: Setting
    seed: int | None = None
    """None for a trial."""

    @property
    def key(self) -> str:
        """Name in the results."""
        what = "trial" if self.seed is None else f"seed {self.seed}"
        return f"{self.cell.key}, rate {self.setting.rate:g}, decay {self.setting.decay:g}, {what}"


def offered() -> tuple[str, ...]:
    """Return the optimizers of the study that this version of the package has."""
    sections = sections_of(Recipe.model_fields["optimizer"].annotation)
    kinds = {kind for section in sections for kind in kinds_of(section)}
    return tuple(name for name, section in SECTIONS.items() if section["kind"] in kinds)


def recipe_of(job: Job, setup: Setup) -> Recipe:
    """Return the recipe of a run without its polishing."""
    setting, epochs = job.setting, setup.epochs
    optimizer = SECTIONS[job.cell.optimizer] | {"weight_decay": setting.decay}
    warmup, peak = WARMUP_PART * epochs, (PEAK_PART - WARMUP_PART) * epochs
    pieces = [
        {"length": {"epochs": peak}, "peak_lr": setting.rate, "decay": {"kind": "constant"}},
        {"length": None, "peak_lr": setting.rate, "decay": {"kind": "polynomial", "power": 1.0}},
    ]
    decay = {"kind": "piecewise", "pieces": pieces}
    schedule = {"peak_lr": setting.rate, "warmup": {"epochs": warmup}, "decay": decay}
    changes = [
        *NETWORKS[job.cell.network],
        f"seed={job.seed or 0}",
        f"duration={{epochs: {epochs}}}",
        f"batch.global_batch={job.cell.batch}",
        f"execution.device_batch={min(500, job.cell.batch // 2)}",  # the noise scale compares two
        f"optimizer={json.dumps(optimizer)}",
        f"schedule={json.dumps(schedule)}",
        f"evaluation.every_epochs={setup.every_epochs}",
    ]
    if job.seed is None:
        changes.append(f"data.held_out={{samples: {setup.held_out}}}")
    return load_recipe(setup.recipe, changes)


def carry_out(job: Job, setup: Setup) -> dict[str, Any]:
    """Train a run, and the polished arm of a seed with BatchNorm; return what is kept of it."""
    folder = setup.work / job.key.replace(", ", "/").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    recipe, polished = recipe_of(job, setup), None
    with (
        (folder / "output.log").open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
    ):
        try:
            if job.seed is not None and recipe.batch.bn_span is not None:
                polished = train_polished(recipe, setup, folder)
            _train(recipe, setup, folder / "run")
        except DivergedError:
            polished = None
    result = {**about(job), **record(read_run(folder / "run"), recipe), "polished": polished}
    shutil.rmtree(folder)
    return result


def train_polished(recipe: Recipe, setup: Setup, folder: Path) -> float:
    """Train up to the clean epochs, then the polished arm; return its top-1."""
    statistics = Statistics(samples=setup.statistics)
    polish = Polish(clean=Duration(epochs=setup.clean_epochs), statistics=statistics)
    own = Recipe.model_validate(recipe.model_dump() | {"polish": polish.model_dump()})
    out = folder / "polished"
    if not (out / RECIPE).exists():
        _train(recipe, setup, folder / "run", until=make_plan(own, workers=1).train_steps)
        part(folder / "run", own, out)
    return _train(own, setup, out).stages[-1].top1


def _train(recipe: Recipe, setup: Setup, out: Path, until: int | None = None) -> Summary:
    """Train a run, or go on with it, without the report, which takes seconds."""
    return run(recipe, out=out, data=setup.data, resume="auto", max_steps=until, report=False)


def about(job: Job) -> dict[str, Any]:
    """Return what was asked of a run."""
    cell, setting = job.cell, job.setting
    return {
        "network": cell.network, "optimizer": cell.optimizer, "batch": cell.batch,
        "rate": setting.rate, "decay": setting.decay, "seed": job.seed,
    }  # fmt: skip


def record(found: Run, recipe: Recipe) -> dict[str, Any]:
    """Return the evaluations, the final top-1, the noise scale at the peak rate and the seconds.

    A run that diverged has the top-1 of chance, and the evaluations before.
    """
    curve = [[round(one.epoch, 3), round(one.top1, 5)] for one in found.evaluations]
    diverged = found.summary is None or found.summary.status != "finished"
    seconds = sum(step.step_seconds for step in found.steps)
    return {
        "top1": 1 / recipe.data.classes if diverged else curve[-1][1],
        "diverged": diverged,
        "curve": curve,
        "noise": noise_at_peak(found),
        "update_seconds": round(seconds, 1),
    }


def noise_at_peak(found: Run) -> dict[str, float | None] | None:
    """Return the noise scale over the updates at the peak rate; None for an unbounded number."""
    first, last = found.plan.warmup_steps, PEAK_PART * found.plan.steps
    steps = [step for step in measured(found) if first < step.step <= last]
    if len(steps) < 2:
        return None
    noise = over(found, steps)
    values = {"value": noise.value, "low": noise.low, "high": noise.high}
    return {key: round(one, 1) if math.isfinite(one) else None for key, one in values.items()}


def epochs_to(target: float, curve: Sequence[Sequence[float]]) -> float | None:
    """Return the epoch of the first evaluation at or above a top-1; None without one.

    >>> epochs_to(0.5, [(1.0, 0.4), (2.0, 0.5), (3.0, 0.45)])
    2.0
    """
    return next((epoch for epoch, top1 in curve if top1 >= target), None)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
