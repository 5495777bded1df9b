"""Every kind of optimizer trains the digits, and a stopped run goes on with the same bits."""

import math
from pathlib import Path

import pytest
import torch
from short_runs import AFFINE, CLEAN, HALF, STATISTICS, a_recipe, content, log
from test_resume import equal

from largebatch import run
from largebatch.errors import CheckpointError
from largebatch.recipe.loading import differences
from largebatch.recipe.recipe import Recipe
from largebatch.training.checkpoint import Checkpoint, load_checkpoint

CHANGES = {
    "lars": ("optimizer.kind=lars",),
    "sgd": ("optimizer.kind=sgd", "optimizer.nesterov=true"),
    "shampoo": ("optimizer.kind=shampoo", "optimizer.start_step=2", "optimizer.block_size=32"),
    "schedule-free": (
        *("optimizer.kind=schedule-free", "optimizer.statistics_samples=96"),
        "schedule.decay.kind=constant",
    ),
    "lamb": ("optimizer.kind=lamb", "schedule.peak_lr=0.02", "schedule.decay.end_lr=0"),
    "adamw": ("optimizer.kind=adamw", "schedule.peak_lr=0.01", "schedule.decay.end_lr=0"),
    "muon": ("optimizer.kind=muon", "schedule.peak_lr=0.01", "schedule.decay.end_lr=0"),
    "muon with sgd": (
        "optimizer={kind: muon, ns_dtype: bf16, others: {kind: sgd, lr: 0.1}}",
        *("schedule.peak_lr=0.01", "schedule.decay.end_lr=0"),
    ),
}
LIBRARIES = ("shampoo", "schedule-free", "lamb", "adamw", "muon")
TINY = ("batch.global_batch=48",)
REPEATED = ("lars", "lamb", "muon with sgd")
"""Kinds whose state has the form of another one's: long tests."""


def recipe_of(kind: str, *polish: str, changes: tuple[str, ...] = ()) -> Recipe:
    return a_recipe(*(polish or (STATISTICS,)), changes=(*CHANGES[kind], *TINY, *changes))


def newest(folder: Path) -> Checkpoint:
    return load_checkpoint(max((folder / "checkpoints").iterdir()))


@pytest.mark.parametrize(
    "kind", [pytest.param(it, marks=[pytest.mark.long] * (it in REPEATED)) for it in CHANGES]
)
def test_a_stopped_run_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """Matrices, moments and counts included; dropout too."""
    recipe = recipe_of(kind)
    run(recipe, out=tmp_path / "whole")
    losses = [record["loss"] for record in log(tmp_path / "whole", "step")]
    assert len(losses) == 8
    assert all(math.isfinite(loss) for loss in losses)
    assert run(recipe, out=tmp_path / "parts", max_steps=3).status == "paused"
    assert run(recipe, out=tmp_path / "parts", max_steps=6, resume=True).steps == 6
    assert run(recipe, out=tmp_path / "parts", resume=True).status == "finished"
    assert [record["loss"] for record in log(tmp_path / "parts", "step")] == losses
    ours, other = content(tmp_path / "parts"), content(tmp_path / "whole")
    torch.testing.assert_close(ours["model"], other["model"], rtol=0, atol=0)
    assert equal(ours["optimizer"], other["optimizer"])


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(it, marks=pytest.mark.long) for it in ("shampoo", "lamb", "adamw")),
        *("schedule-free", "muon"),
    ],
)
def test_the_affine_stage_follows_and_goes_on(kind: str, tmp_path: Path) -> None:
    recipe = recipe_of(kind, CLEAN, AFFINE, STATISTICS)
    run(recipe, out=tmp_path / "run", max_steps=10)
    done = run(recipe, out=tmp_path / "run", resume=True)
    assert [stage.name for stage in done.stages] == ["train", "clean", "affine", "statistics"]
    assert all(math.isfinite(stage.loss) for stage in done.stages)


@pytest.mark.long
@pytest.mark.parametrize("kind", LIBRARIES)
def test_half_precision_trains_too(kind: str, tmp_path: Path) -> None:
    done = run(recipe_of(kind, changes=HALF), out=tmp_path / "run")
    assert done.status == "finished"
    assert done.loss is not None
    assert math.isfinite(done.loss)


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A block size that was changed, which a resumed run may not."""
    run(recipe_of("shampoo"), out=tmp_path / "run", max_steps=3)
    changed = recipe_of("shampoo", changes=("optimizer.block_size=16",))
    with pytest.raises(Exception, match="optimizer.block_size"):
        run(changed, out=tmp_path / "run", resume=True)
    with pytest.raises(Exception, match="Shampoo"):
        run(changed, out=tmp_path / "run", resume=True, allow=("optimizer.block_size",))


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("muon with sgd", "muon", "optimizer.others.kind"),
        ("muon", "muon with sgd", "optimizer.others.kind"),
        ("adamw", "muon", "optimizer.kind"),
        ("muon", "adamw", "optimizer.kind"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    before: str, after: str, key: str, tmp_path: Path
) -> None:
    """Also where all that differs is allowed."""
    run(recipe_of(before), out=tmp_path / "run", max_steps=2)
    old, new = (recipe_of(kind).mathematics.model_dump(mode="json") for kind in (before, after))
    allow = [name for name, *_ in differences(old, new)]
    with pytest.raises(CheckpointError, match=f"another optimizer: {key} "):
        run(recipe_of(after), out=tmp_path / "run", resume=True, allow=allow)
