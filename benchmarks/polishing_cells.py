"""One cell of the polishing study: one data set, batch, optimizer, crop area and seed, and its
arms.

The arms of a cell share the updates that they have in common. A trunk trains on augmented images
to the end; where an arm parts from it, the arm goes on in a folder of its own from the trunk's
checkpoint, under the same recipe with its polishing stages. Nothing but the step decides what an
update sees, so an arm ends with the weights, bit for bit, that a run of its own would have.
"""

import contextlib
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.polish import Affine, Polish, Statistics
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Duration
from largebatch.recipe.writing import dump_recipe
from largebatch.tracking.events import CHECKPOINTS, RECIPE, StageResult
from largebatch.training.checkpoint import load_checkpoint, newest_checkpoint, write_checkpoint

Arms = dict[str, dict[str, float | None]]
"""Top-1 and loss of each arm."""

RECIPES = Path(__file__).parent / "recipes"
RATIO = 32
"""Ratio of the large batch to the small one."""

STEPS_PER_EPOCH = 16
"""Updates per epoch at the large batch; MLPerf's ResNet-50 at 81,920 makes 15.6."""

WARMUP_EPOCHS = 2
AFFINE_EPOCHS = 2
SPANS_AT_ONCE = 4
"""Number of BatchNorm spans in a device batch at the large batch; a core is fastest with about 100
images of this network."""

AFFINE_RATES = {"large": 0.1, "small": 0.01}
"""Learning rate of the affine stage, not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a cell; the same for all cells of a study."""

    images: int
    """Number of training images, the same ones for every seed."""

    epochs: int

    @property
    def large_batch(self) -> int:
        """Large global batch."""
        return self.images // STEPS_PER_EPOCH

    @property
    def small_batch(self) -> int:
        """Small global batch, which is also the BatchNorm span of both."""
        return self.large_batch // RATIO

    def __post_init__(self) -> None:
        smallest = STEPS_PER_EPOCH * RATIO * 2
        if self.images % (smallest // 2) or self.images < smallest:
            raise ValueError(
                f"images must be a multiple of {smallest // 2}, {smallest} or more, so that both "
                f"batches are whole; got {self.images}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell: its training, and the stages after it."""

    data: str
    batch: str
    """`large` or `small`."""

    area: float
    """Smallest fraction of an image in a crop."""

    seed: int
    rate: float
    """Peak learning rate."""

    optimizer: str = "lars"
    end: float = 0.0
    """Ratio of the last learning rate to the peak."""

    clean: tuple[int, ...] = (2,)
    """Arms, by the number of last epochs on clean images."""

    affine: bool = False

    @property
    def group(self) -> str:
        """Name of the cell without its seed."""
        words = [self.data, self.optimizer, self.batch, f"area {self.area:g}"]
        words += [f"end {self.end:g}"] * (self.end > 0)
        return ", ".join(words)

    @property
    def key(self) -> str:
        """Name of the cell in the results."""
        return f"{self.group}, seed {self.seed}"

    @property
    def arms(self) -> set[str]:
        """Arms of a cell that does not diverge."""
        stages = [f"clean {epochs}" for epochs in self.clean] + ["affine"] * self.affine
        return {"control", "statistics", *stages, *(f"{stage} + statistics" for stage in stages)}

    def passes(self, epochs: int) -> float:
        """Return the approximate cost of the cell in training epochs; a forward pass is a third."""
        return (
            epochs
            + 1 / 3
            + sum(k + 1 / 3 for k in self.clean)
            + self.affine * (AFFINE_EPOCHS + 1 / 3)
        )


def recipe_of(cell: Cell, size: Size, *, val_samples: int) -> Recipe:
    """Return the recipe of a cell's trunk, which has no polishing."""
    large, sgd = cell.batch == "large", cell.optimizer == "sgd"
    warmup = f"{{epochs: {min(WARMUP_EPOCHS, size.epochs / 2)}}}" if large or not sgd else "null"
    changes = [
        f"seed={cell.seed}",
        f"duration.epochs={size.epochs}",
        f"data.train_samples={size.images}",
        f"data.val_samples={val_samples}",
        f"data.crop_area=[{cell.area}, 1.0]",
        f"batch.global_batch={size.large_batch if large else size.small_batch}",
        f"batch.bn_span={size.small_batch}",
        f"schedule.peak_lr={cell.rate}",
        f"schedule.decay.end_lr={cell.end * cell.rate}",
        f"schedule.warmup={warmup}",
    ]
    if sgd:
        changes += ["optimizer={kind: sgd}", "loss.label_smoothing=0.0"]
    return load_recipe(RECIPES / f"polishing_{cell.data}.yaml", changes)


def carry_out(
    cell: Cell, size: Size, *, data: Path, val_samples: int, work: Path
) -> dict[str, Any]:
    """Train all arms of a cell; return what train_logged does."""
    recipe = recipe_of(cell, size, val_samples=val_samples)
    return train_logged(cell, recipe, work, data=data)


def train_logged(cell: Cell, recipe: Recipe, work: Path, *, data: Path | None) -> dict[str, Any]:
    """Train all arms with their output in `work`; return top-1 and loss of each, and the seconds.

    A cell that diverges has but a control, as good as chance.
    """
    start = time.perf_counter()
    work.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=work) as folder,
        (work / "output.log").open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
    ):
        try:
            arms = train_arms(cell, recipe, Path(folder), data=data)
        except DivergedError:
            arms = {"control": {"top1": 1 / recipe.data.classes, "loss": None}}
    return {"arms": arms, "seconds": time.perf_counter() - start}


def train_arms(cell: Cell, recipe: Recipe, folder: Path, *, data: Path | None) -> Arms:
    """Train a trunk in `folder` and an arm for each way to polish; return the results."""
    trunk, recipe = folder / "trunk", recipe.with_execution(device_batch=device_batch(recipe))
    statistics = Statistics(samples=recipe.train_samples)
    arms: Arms = {}

    def follow(name: str, polish: Polish) -> None:
        """Branch off the trunk at its current update."""
        out = folder / name
        own = part(trunk, recipe.model_copy(update={"polish": polish}), out)
        summary = run(own, out=out, data=data, resume=True)
        _require(summary.status == "finished", own)
        for stage in summary.stages:
            if stage.name != "train":
                label = f"{name} + statistics" if stage.name == "statistics" else name
                arms[label if name != "statistics" else name] = _reached(stage)

    def train(until: int) -> tuple[StageResult, ...]:
        """Train the trunk up to some updates."""
        there = trunk.exists()
        summary = run(recipe, out=trunk, data=data, resume=there, max_steps=until)
        _require(summary.steps == until, recipe)
        return summary.stages

    for epochs in sorted(cell.clean, reverse=True):
        polish = Polish(clean=Duration(epochs=epochs), statistics=statistics)
        steps = make_plan(recipe.model_copy(update={"polish": polish}), workers=1).train_steps
        train(steps)
        follow(f"clean {epochs}", polish)
    arms["control"] = _reached(train(make_plan(recipe, workers=1).steps)[-1])
    follow("statistics", Polish(statistics=statistics))
    if cell.affine:
        affine = Affine(epochs=AFFINE_EPOCHS, lr=AFFINE_RATES[cell.batch])
        follow("affine", Polish(affine=affine, statistics=statistics))
    return arms


def device_batch(recipe: Recipe) -> int:
    """Return the device batch."""
    assert recipe.batch.bn_span is not None
    return min(SPANS_AT_ONCE * recipe.batch.bn_span, recipe.batch.global_batch)


def part(trunk: Path, recipe: Recipe, out: Path) -> Recipe:
    """Copy the trunk's newest checkpoint into `out`, as one of `recipe`; return that recipe."""
    found = newest_checkpoint(trunk / CHECKPOINTS)
    assert found is not None, "a run that ended or was stopped has saved"
    checkpoint = load_checkpoint(found.path)
    write_checkpoint(out / CHECKPOINTS, replace(checkpoint, recipe=recipe))
    (out / RECIPE).write_text(dump_recipe(recipe), encoding="utf-8")
    return recipe


def _require(complete: bool, recipe: Recipe) -> None:  # noqa: FBT001 -- what is asked for
    """Raise an error for an incomplete result of a run that was asked to stop."""
    if not complete:
        raise RuntimeError(f"{recipe.name} was stopped before its end; its cell has no result")


def _reached(stage: StageResult) -> dict[str, float | None]:
    return {"top1": stage.top1, "loss": stage.loss}
