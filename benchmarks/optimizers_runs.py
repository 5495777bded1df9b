"""One run of the study of optimizers: its recipe, and what is kept of it.

The rate rises over WARMUP_PART of a run, stays at its peak up to PEAK_PART and falls straight to
zero, so most of a run does not depend on its length. A network with BatchNorm is evaluated twice
each time: as it is, and with statistics that one `polish` pass measures on clean images. Running
statistics remember about ten updates, which are three epochs at a batch of 16,000.
"""

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from largebatch import load_recipe
from largebatch.errors import DataError, DivergedError
from largebatch.optional import require_torchvision
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import kinds_of, sections_of
from largebatch.runs.build import open_trainer
from largebatch.runs.options import Options
from largebatch.tracking.events import Event, Step
from largebatch.tracking.noise_scale import Squares, estimate
from largebatch.training.trainer import Trainer
from largebatch.training.updates import make_updates

WARMUP_PART, PEAK_PART = 1 / 12, 3 / 4
POINTS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
"""Epochs after which a network is evaluated, besides at the end."""

AS_IS, POLISHED = 1, 2
"""Columns of a curve; the first one has the epochs."""

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

BETA2 = 0.95
"""beta2 of LAMB, AdamW and Muon's AdamW: ten epochs are 30 updates at a batch of 16,000."""

SECTIONS: dict[str, dict[str, Any]] = {
    "nesterov": {"kind": "sgd", "momentum": 0.9, "nesterov": True},
    "lars": {"kind": "lars", "convention": "reference", "momentum": 0.9, "eta": 0.02},
    "lamb": {"kind": "lamb", "beta2": BETA2},
    "adamw": {"kind": "adamw", "beta2": BETA2},
    "muon": {"kind": "muon"},
}
"""Section `optimizer` without the weight decay."""

LABELS = dict(zip(SECTIONS, ("Nesterov SGD", "LARS", "LAMB", "AdamW", "Muon"), strict=True))
"""Names of the optimizers in tables and figures."""

STARTS: dict[str, dict[str, tuple[float, float]]] = {
    RESNET: {
        "nesterov": (0.4, 5e-4),
        "lars": (2.0, 5e-4),
        "lamb": (0.01, 0.2),
        "adamw": (4e-3, 0.2),
        "muon": (0.01, 0.2),
    },
    VIT: {
        "nesterov": (0.1, 5e-4),
        "lars": (1.0, 5e-4),
        "lamb": (0.01, 0.2),
        "adamw": (2e-3, 0.2),
        "muon": (4e-3, 0.2),
    },
}
"""First peak rate and weight decay of a search, at a batch of BASE."""

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

    statistics: int
    """Number of images of a statistics pass."""


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
        """First setting of the search.

        Rates go with the square root of the batch, and so do decays: then rate times decay times
        the number of updates is the same at every batch.
        """
        factor = math.sqrt(self.batch / BASE)
        rate, decay = STARTS[self.network][self.optimizer]
        return Setting(rate, decay).times(rate=factor, decay=factor)


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

    target: float = field(default=math.inf, compare=False)
    """Top-1 at which a trial ends."""

    bound: float = field(default=math.inf, compare=False)
    """Epochs after which a trial ends, because another one has reached the target sooner."""

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
    if optimizer["kind"] == "muon":  # the others decay the first layer and the classifier too
        optimizer["others"] = {"kind": "adamw", "weight_decay": setting.decay}
    warmup, peak = WARMUP_PART * epochs, (PEAK_PART - WARMUP_PART) * epochs
    pieces = [
        {"length": {"epochs": peak}, "peak_lr": setting.rate, "decay": {"kind": "constant"}},
        {"length": None, "peak_lr": setting.rate, "decay": {"kind": "polynomial", "power": 1.0}},
    ]
    decay = {"kind": "piecewise", "pieces": pieces}
    schedule = {
        "peak_lr": setting.rate, "warmup": {"epochs": warmup}, "decay": decay, "first_step": 1,
    }  # fmt: skip
    changes = [
        *NETWORKS[job.cell.network],
        f"seed={job.seed or 0}",
        f"duration={{epochs: {epochs}}}",
        f"batch.global_batch={job.cell.batch}",
        f"execution.device_batch={min(500, job.cell.batch // 2)}",  # the noise scale compares two
        f"optimizer={json.dumps(optimizer)}",
        f"schedule={json.dumps(schedule)}",
    ]
    if job.seed is None:
        changes.append(f"data.held_out={{samples: {setup.held_out}}}")
    return load_recipe(setup.recipe, changes)


def carry_out(job: Job, setup: Setup) -> dict[str, Any]:
    """Train a run, and return what is kept of it."""
    require_torchvision()
    from timm.layers import set_fused_attn

    set_fused_attn(enable=False)  # for 17 tokens it takes twice as long on a CPU
    recipe, steps, curve = recipe_of(job, setup), _Steps(), []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_trainer(recipe, Options(out=Path(folder), data=setup.data), {}) as trainer,
    ):
        trainer.trackers.append(steps)
        diverged = False
        try:
            for row in evaluations(trainer, statistics=setup.statistics):
                curve.append(row)
                if judged(row) >= job.target or row[0] >= job.bound:
                    break
        except (DivergedError, DataError):  # DataError: statistics that are not finite
            diverged = True
        noise = noise_at_peak(steps.made, trainer.plan)
    chance = 1 / recipe.data.classes
    last = [None, chance, recipe.batch.bn_span and chance] if diverged else curve[-1]
    return {
        **about(job),
        "top1": last[AS_IS],
        "polished": last[POLISHED],
        "diverged": diverged,
        "curve": curve,
        "noise": noise,
        "update_seconds": round(sum(step.step_seconds for step in steps.made), 1),
    }


def evaluations(trainer: Trainer, *, statistics: int) -> Iterator[list[Any]]:
    """Train; yield the epoch, top-1 as is and top-1 polished (or None) after each of POINTS."""
    plan = trainer.plan
    updates = {round(epoch * plan.train_samples / plan.global_batch) for epoch in POINTS}
    done = 0
    for until in sorted({*updates, plan.steps} - {0}):
        if until > plan.steps:
            break
        make_updates(trainer, "train", range(done, plan.steps), until=until)
        done = until
        top1 = trainer.measure().top1
        yield [round(plan.epoch(done), 3), round(top1, 5), _polished(trainer, statistics)]


def _polished(trainer: Trainer, statistics: int) -> float | None:
    """Return top-1 after a statistics pass, which is undone; None for a network without any."""
    if trainer.recipe.batch.bn_span is None:
        return None
    buffers = dict(trainer.state.model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    trainer.measure_statistics(statistics)
    top1 = trainer.measure().top1
    for name, buffer in buffers.items():
        buffer.copy_(before[name])
    return round(top1, 5)


class _Steps:
    """A tracker that keeps the updates."""

    def __init__(self) -> None:
        self.made: list[Step] = []

    def record(self, event: Event) -> None:
        """Record an event."""
        if isinstance(event, Step):
            self.made.append(event)


def about(job: Job) -> dict[str, Any]:
    """Return what was asked of a run."""
    cell, setting = job.cell, job.setting
    return {
        "network": cell.network, "optimizer": cell.optimizer, "batch": cell.batch,
        "rate": setting.rate, "decay": setting.decay, "seed": job.seed,
    }  # fmt: skip


def noise_at_peak(steps: Sequence[Step], plan: Plan) -> dict[str, float | None] | None:
    """Return the noise scale over the updates at the peak rate; None for an unbounded number."""
    squares = [
        Squares(step.device_square, step.global_square, plan.device_batch, plan.global_batch)
        for step in steps
        if plan.warmup_steps < step.step <= PEAK_PART * plan.steps
        and math.isfinite(step.device_square + step.global_square)
    ]
    if len(squares) < 2:
        return None
    noise = estimate(squares)
    values = {"value": noise.value, "low": noise.low, "high": noise.high}
    return {key: round(one, 1) if math.isfinite(one) else None for key, one in values.items()}


def judged(row: Sequence[Any]) -> float:
    """Return the top-1 that counts in a search: polished if the network has BatchNorm."""
    return float(row[AS_IS] if row[POLISHED] is None else row[POLISHED])


def epochs_to(target: float, curve: Sequence[Sequence[float]], column: int = AS_IS) -> float | None:
    """Return the epochs to a top-1, straight between evaluations; None if it is not reached.

    >>> epochs_to(0.5, [(1.0, 0.4), (2.0, 0.6), (3.0, 0.45)])
    1.5
    """
    epoch, top1 = 0.0, 0.1
    for row in curve:
        if row[column] >= target:
            return epoch + (row[0] - epoch) * (target - top1) / (row[column] - top1)
        epoch, top1 = row[0], row[column]
    return None


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
