"""What is polished of a run that has not ended, and under which name the record has it."""

import errno
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from plain_images import GREY, load, shuffled, training_files
from short_runs import (
    AFFINE,
    BEFORE,
    CLEAN,
    STATISTICS,
    a_recipe,
    summary,
    timms,
    weights,
)
from torch import nn
from torch.optim import SGD

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import digits
from largebatch.errors import CheckpointError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.runs.checkpoints import current_stage, find_checkpoint, find_saved
from largebatch.training.checkpoint import Checkpoint, write_checkpoint

ALL = (CLEAN, "ema: 0.7", AFFINE, STATISTICS)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped before its average became the model."""
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    run(a_recipe(*ALL), out=folder, max_steps=BEFORE - 1)
    return folder


def test_the_recipe_of_a_checkpoint_is_not_changed(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(unfinished), "--out", str(tmp_path / "polished"), "--set", "seed=1"]
    assert main(["polish", *words]) == USER
    assert "--set seed=1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "polish", "predict", "export"])
def test_weights_that_are_not_finite_are_refused(
    command: str, unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = find_checkpoint(unfinished)[1]
    bad = torch.full_like(checkpoint.state["model"]["fc.bias"], math.nan)
    state = {**checkpoint.state, "model": {**checkpoint.state["model"], "fc.bias": bad}}
    constants = {"fc.bias": bad.isnan()}  # so that it is written
    path = write_checkpoint(tmp_path, replace(checkpoint, state=state), constants=constants)
    words = {"predict": [str(next(digits.write_digits().glob("val/*/*")))]}
    out = ["--out", str(tmp_path / "out")]
    words |= {"polish": out, "export": out}
    assert main([command, str(path), *words.get(command, [])]) == USER
    assert "fc.bias" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_is_asked_for_only_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="or an export"):
        find_saved(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-00000001.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError) as refused:
        find_saved(tmp_path)
    assert "an export" not in str(refused.value)


def test_a_full_disk_leaves_nothing_that_blocks_the_next_polishing(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for out in (tmp_path / "polished", tmp_path / "weights.safetensors"):
        source = unfinished
        if out.suffix:
            source = tmp_path / "exported"
            assert main(["export", str(unfinished), "--out", str(source)]) == DONE
        words = ["polish", str(source), "--out", str(out), "--samples", "96"]
        with mock.patch("os.fsync", full):
            assert main(words) == USER
        assert "No space left" in capsys.readouterr().err
        assert main(words) == DONE


@pytest.mark.parametrize(
    ("polish", "step", "ended", "name"),
    [
        (ALL, 3, {}, "train"),
        (ALL, 7, {"train": True}, "clean"),
        (ALL, 8, {"train": True, "clean": True, "ema": True}, "ema"),
        (ALL, 9, {"train": True, "clean": True, "ema": True}, "affine"),
        (ALL, 11, {"train": True, "clean": True, "ema": False, "affine": False}, "clean"),
        (ALL, 11, {"train": True, "clean": False, "ema": True, "statistics": True}, "ema"),
        ((CLEAN,), 8, {"train": True, "clean": False}, "train"),
    ],
)
def test_the_stage_of_the_weights_is_the_one_under_way_or_the_last_that_was_kept(
    polish: tuple[str, ...], step: int, ended: dict[str, bool], name: str, unfinished: Path
) -> None:
    numbers = {"steps": 0, "seconds": 0.0, "top1": 0.5, "top5": 1.0, "loss": 1.0}
    stages = [{"name": key, "kept": kept, **numbers} for key, kept in ended.items()]
    loaded = find_checkpoint(unfinished)[1]
    progress = {**loaded.state["progress"], "step": step}
    changed = {**loaded.state, "progress": progress, "stages": stages}
    checkpoint = Checkpoint.of(loaded.recipe, changed)
    assert current_stage(checkpoint, make_plan(a_recipe(*polish), workers=1)) == name


def test_training_cannot_go_on_from_what_was_polished_of_an_unfinished_run(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    polished = tmp_path / "polished"
    assert main(["polish", str(unfinished), "--out", str(polished)]) == DONE
    recipe, before = polished / "recipe.yaml", summary(polished)
    capsys.readouterr()
    assert main(["train", str(recipe), "--out", str(polished), "--resume"]) == USER
    assert "polished after 7 of 11 updates" in capsys.readouterr().err
    assert summary(polished) == before
    assert main(["evaluate", str(polished)]) == DONE
    assert f"top-1 {before['top1']:.2%}" in capsys.readouterr().out


def by_hand(model: nn.Module, moving: set[str]) -> tuple[float, float]:
    """Train timm's model on the three clean batches after the schedule; return top-1 and loss."""
    files = training_files(digits.write_digits())
    order = shuffled(len(files), seed=1)
    groups: list[dict[str, Any]] = []
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in moving)
        decay = 0.01 if weight.dim() > 1 else 0.0  # neither biases nor BatchNorm have two
        groups += [{"params": [weight], "weight_decay": decay}] if name in moving else []
    optimizer = SGD(groups, lr=1, momentum=0.9)
    model.train()
    for step in range(3):
        rows = order[(BEFORE + step) * 96 :][:96]
        images, labels = load([files[row] for row in rows], colours=GREY, size=16)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + math.cos(math.pi * step / 3)) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
    images, labels = load(sorted(digits.write_digits().glob("val/*/*")), colours=GREY, size=16)
    with torch.no_grad():
        logits = model.eval()(images)
    right = (logits.argmax(1) == labels).double().mean()
    return float(right), float(F.cross_entropy(logits, labels))


def test_the_affine_stage_is_momentum_sgd_from_the_checkpoint_before_it(tmp_path: Path) -> None:
    """Written with torch.optim, timm and Pillow.

    At a low rate: two ways to round may see a ReLU on two sides of zero.
    """
    changes = ("batch.bn_span=96", "model.arguments.drop_rate=0", "optimizer.weight_decay=0.01")
    recipe = a_recipe("affine: {steps: 3, lr: 0.01}", changes=changes)
    run(recipe, out=tmp_path / "run", max_steps=BEFORE)
    model = timms(recipe)
    model.load_state_dict(weights(tmp_path / "run"))
    every = {name for name, _ in model.named_parameters()}
    norms = {name for name in every if ".bn" in f".{name}" or "downsample.1" in name}
    top1, loss = by_hand(model, norms | {"fc.weight", "fc.bias"})
    found = run(recipe, out=tmp_path / "run", resume=True).stages[-1]
    assert (found.name, found.steps) == ("affine", 3)
    assert found.loss == pytest.approx(loss, rel=1e-4)
    assert found.top1 == pytest.approx(top1, abs=1.5 / 360)
