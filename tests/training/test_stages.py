"""The stages of polishing on the digits: what each changes, and what comes back where it harms.

Runs are a few updates long. Where a result can be had without this package it is: momentum SGD from
torch.optim on the model of timm, and a moving average in float64.
"""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_forked_workers import on_forked_workers
from plain_images import GREY, load, shuffled, training_files
from polish_reference import assert_right, one_pass
from short_runs import (
    AFFINE,
    BEFORE,
    CLEAN,
    JUDGED,
    LEARNED,
    STATISTICS,
    a_recipe,
    content,
    log,
    timms,
    weights,
)
from torch import Tensor
from torch.optim import SGD

from largebatch import run
from largebatch.data.datasets import digits
from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.report import write_report
from largebatch.tracking.events import Accuracy, Summary
from largebatch.training.checkpoint import load_checkpoint


def assert_same(ours: object, other: object) -> None:
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


def test_affine_moves_batchnorm_and_the_classifier_and_no_other_bit(tmp_path: Path) -> None:
    recipe = a_recipe(CLEAN, AFFINE)
    run(recipe, out=tmp_path / "run", max_steps=BEFORE)
    before = weights(tmp_path / "run")
    summary = run(recipe, out=tmp_path / "run", resume=True)
    after = weights(tmp_path / "run")
    changed = {name for name in before if not after[name].equal(before[name])}
    norms = {name for name in before if ".bn" in f".{name}" or "downsample.1" in name}
    assert changed == norms | {"fc.weight", "fc.bias"}
    assert (summary.status, summary.steps) == ("finished", BEFORE + 3)
    assert [stage.name for stage in summary.stages] == ["train", "clean", "affine"]
    assert [stage.steps for stage in summary.stages] == [6, 2, 3]
    last = summary.stages[-1]
    assert last.before is not None
    assert last.before.loss == summary.stages[1].loss != last.loss == summary.loss


def test_affine_is_momentum_sgd_on_clean_images_at_a_rate_that_falls_to_zero(
    tmp_path: Path,
) -> None:
    """Written with torch.optim and timm: three steps on the batches that follow the schedule's."""
    changes = ("batch.bn_span=96", "model.arguments.drop_rate=0", "optimizer.weight_decay=0.01")
    recipe = a_recipe(CLEAN, AFFINE, changes=changes)
    run(recipe, out=tmp_path / "run", max_steps=BEFORE)
    model = timms(recipe).train()
    model.load_state_dict(weights(tmp_path / "run"))
    named = dict(model.named_parameters())
    moving = {name for name in named if ".bn" in f".{name}" or "downsample.1" in name}
    for name, weight in named.items():
        weight.requires_grad_(name in moving or name.startswith("fc."))
    plain = [
        weight for name, weight in named.items() if weight.requires_grad and name != "fc.weight"
    ]
    head: dict[str, Any] = {"params": [named["fc.weight"]], "weight_decay": 0.01}
    optimizer = SGD([head, {"params": plain}], lr=1, momentum=0.9)
    pipeline = open_images(
        recipe, make_plan(recipe, workers=1), Serial(torch.device("cpu")), folder=None
    )
    batches = pipeline.training(range(BEFORE, BEFORE + 3), clean=True)
    for step, (images, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * step / 3)) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()

    run(recipe, out=tmp_path / "run", resume=True)
    torch.testing.assert_close(weights(tmp_path / "run"), model.state_dict(), rtol=1e-4, atol=1e-5)
    rates = [step["lr"] for step in log(tmp_path / "run", "step")[BEFORE:]]
    assert rates == pytest.approx([0.05, 0.0375, 0.0125])


def go_on(recipe: Recipe, folder: Path) -> Summary:
    return run(recipe, out=folder, resume=True)


def test_two_workers_finish_a_run_as_one_does(tmp_path: Path) -> None:
    """Every stage after the schedule, from the same checkpoint."""
    changes = ("data.flip=true", "model.arguments.drop_rate=0")  # workers drop different units
    recipe = a_recipe(CLEAN, "ema: 0.5", AFFINE, STATISTICS, JUDGED, changes=changes)
    run(recipe, out=tmp_path / "1", max_steps=BEFORE - 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    ends = [
        run(recipe, out=tmp_path / "1", resume=True),
        on_forked_workers(go_on, recipe, tmp_path / "2", workers=2),
    ]
    alone, together = (log(tmp_path / name, "step")[BEFORE:] for name in ("1", "2"))
    assert [s["loss"] for s in together] == pytest.approx([s["loss"] for s in alone], abs=1e-5)
    verdicts = [[s.kept for s in end.stages] for end in ends]
    assert verdicts[0] == verdicts[1]
    for stage, other in zip(ends[0].stages, ends[1].stages, strict=True):
        assert stage.held_out == pytest.approx(other.held_out, abs=1.5 / 200)
    torch.testing.assert_close(
        weights(tmp_path / "2"), weights(tmp_path / "1"), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("workers", "judged", "stops"),
    [
        (1, True, (5, 7, 8, 10)),
        pytest.param(1, False, (5, 7, 8, 10), marks=pytest.mark.long),
        pytest.param(2, True, (10,), marks=pytest.mark.long),
    ],
)
def test_a_run_stopped_in_any_stage_ends_with_identical_weights(
    tmp_path: Path, workers: int, judged: bool, stops: tuple[int, ...]
) -> None:
    guard = (JUDGED,) if judged else ()
    recipe = a_recipe(CLEAN, "ema: 0.7", AFFINE, STATISTICS, *guard)
    whole = run(recipe, workers=workers, out=tmp_path / "whole")
    for stop in stops:
        resume = stop > stops[0]
        run(recipe, workers=workers, out=tmp_path / "parts", max_steps=stop, resume=resume)
        middle = content(tmp_path / "parts")
        assert bool(middle["ema"]) == (stop < 8)
        assert bool(middle["snapshot"]) == (judged and stop in {7, 10})
    parts = run(recipe, workers=workers, out=tmp_path / "parts", resume=True)
    assert_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    ours, other = (content(tmp_path / name)["optimizer"]["state"] for name in ("parts", "whole"))
    assert_same(ours, other)
    timeless = [[replace(stage, seconds=0.0) for stage in run.stages] for run in (parts, whole)]
    assert timeless[0] == timeless[1]
    assert [stage.name for stage in parts.stages] == [
        *("train", "clean", "ema", "affine", "statistics"),
    ]
    assert [step["step"] for step in log(tmp_path / "parts", "step")] == list(range(BEFORE + 3))


def test_the_average_of_a_run_is_the_one_computed_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From checkpoints after every update; running statistics are averaged like weights."""
    changes = ("evaluation.every_epochs=0.066", "execution.checkpoints.keep_last=100")
    run(a_recipe(CLEAN, changes=changes), out=tmp_path / "live")
    run(a_recipe(CLEAN, "ema: 0.7", changes=changes), out=tmp_path / "averaged")
    paths = sorted((tmp_path / "live/checkpoints").iterdir())
    assert len(paths) == BEFORE
    by_hand: dict[str, Tensor] = {}
    for path in paths:
        saved = load_checkpoint(path).state["model"]
        now = {name: value.double() for name, value in saved.items()}
        by_hand = {n: 0.7 * by_hand.get(n, v) + 0.3 * v for n, v in now.items()}
    for name, value in weights(tmp_path / "averaged").items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), by_hand[name], rtol=1e-5, atol=1e-6)
    stages = content(tmp_path / "averaged")["stages"]
    assert [stage["name"] for stage in stages] == ["train", "clean", "ema"]
    assert stages[1]["loss"] == content(tmp_path / "live")["stages"][-1]["loss"]


def test_statistics_are_those_of_the_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Averaged here, put into timm's model in float64, and shown images read by Pillow."""
    changes = ("evaluation.every_epochs=0.066", "execution.checkpoints.keep_last=100")
    run(a_recipe(CLEAN, changes=changes), out=tmp_path / "live")
    average: dict[str, Tensor] = {}
    for path in sorted((tmp_path / "live/checkpoints").iterdir()):
        now = load_checkpoint(path).state["model"].items()
        average = {n: 0.7 * average.get(n, v.double()) + 0.3 * v.double() for n, v in now}
    recipe = a_recipe(CLEAN, "ema: 0.7", "statistics: {samples: 97}")
    run(recipe.with_execution(device_batch=96), out=tmp_path / "run")
    files = training_files(digits.write_digits())
    order = shuffled(len(files), seed=recipe.seed)[:97]
    images, labels = load([files[row] for row in order], colours=GREY, size=16)
    spans = [(part.double(), labels) for part in images.split(48)]
    model = timms(recipe).double()
    model.load_state_dict(average)
    right = one_pass(model, spans)
    model.load_state_dict(weights(tmp_path / "run"))
    assert_right(model, right, rel=1e-4)


def test_a_stage_that_harms_is_undone_bit_by_bit(tmp_path: Path) -> None:
    """Forty updates learn something; three absurd ones after them lose it."""
    absurd = "affine: {steps: 3, lr: 500}"
    summary = run(a_recipe(CLEAN, absurd, JUDGED, changes=LEARNED), out=tmp_path / "with")
    run(a_recipe(CLEAN, JUDGED, changes=LEARNED), out=tmp_path / "without")
    kept, affine = [stage for stage in summary.stages if stage.kept][-1], summary.stages[-1]
    assert (affine.name, affine.kept) == ("affine", False)
    assert affine.held_out is not None
    assert kept.held_out is not None
    assert affine.held_out < 0.2 < kept.held_out
    assert_same(weights(tmp_path / "with"), weights(tmp_path / "without"))
    assert (summary.top1, summary.loss) == (kept.top1, kept.loss)
    assert affine.before == Accuracy(top1=kept.top1, top5=kept.top5, loss=kept.loss)
    assert log(tmp_path / "with", "decision")[-1] == {
        "event": "decision",
        "stage": "affine",
        "step": 43,
        "samples": 200,
        "before": kept.held_out,
        "after": affine.held_out,
        "kept": False,
    }
    page = write_report(tmp_path / "with").read_text()
    assert "affine (discarded)" in page
    assert "Held out: top-1 on 200 training images" in page


def test_clean_epochs_that_harm_are_undone_and_so_is_their_share_of_the_average(
    tmp_path: Path,
) -> None:
    """The rate jumps where the clean steps begin."""
    jump = (
        "schedule={peak_lr: 1e4, warmup: null, decay: {kind: piecewise, pieces: ["
        "{length: {steps: 6}, peak_lr: 0.5, decay: {kind: constant}}, "
        "{length: null, peak_lr: 1e4, decay: {kind: constant}}]}}"
    )
    recipe = a_recipe(CLEAN, "ema: 0.5", STATISTICS, JUDGED, changes=(jump,))
    summary = run(recipe, out=tmp_path / "run")
    stages = {stage.name: stage for stage in summary.stages}
    assert not stages["clean"].kept
    before = stages["ema"].before
    assert before is not None
    assert before.loss == stages["train"].loss
    flat = "schedule={peak_lr: 0.5, warmup: null, decay: {kind: constant}}"
    six = a_recipe("ema: 0.5", JUDGED, changes=(flat, "duration={steps: 6}"))
    expected = run(six, out=tmp_path / "six")  # the same six updates, and no others
    assert stages["ema"].loss == expected.stages[-1].loss != stages["train"].loss
    assert stages["ema"].kept == expected.stages[-1].kept
    assert_same(
        weights(tmp_path / "run")["conv1.weight"], weights(tmp_path / "six")["conv1.weight"]
    )
