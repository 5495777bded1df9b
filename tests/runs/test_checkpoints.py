"""What is polished of a run that has not ended, and under which name the record has it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_images import GREY, load, shuffled, training_files
from short_runs import (
    AFFINE,
    BEFORE,
    CLEAN,
    HALF,
    STATISTICS,
    a_recipe,
    content,
    timms,
    weights,
)
from torch import nn
from torch.optim import SGD

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import digits
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.runs.checkpoints import current_stage, find_checkpoint
from largebatch.training.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from largebatch.training.session import Session
from largebatch.training.updates import Part

ALL = (CLEAN, "ema: 0.7", AFFINE, STATISTICS)


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped before its average became the model."""
    folder = tmp_path_factory.mktemp("unfinished") / "run"
    run(a_recipe(*ALL), out=folder, max_steps=BEFORE - 1)
    return folder


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_average_of_an_unfinished_run_is_polished_where_it_is_asked_for(
    unfinished: Path, tmp_path: Path
) -> None:
    average = content(unfinished)["ema"]
    live = weights(unfinished)
    names = [name for name, value in live.items() if value.is_floating_point()]
    trained = [name for name in names if "running_" not in name]
    for words, expected in (
        ([], [live[name] for name in trained]),
        (["--ema"], [average[f"module.{place}"] for place in range(len(trained))]),
    ):
        out = tmp_path / f"polished{len(words)}"
        assert main(["polish", str(unfinished), *words, "--out", str(out)]) == DONE
        found = weights(out)
        torch.testing.assert_close([found[n] for n in trained], expected, rtol=0, atol=0)
        assert not found["bn1.running_mean"].equal(live["bn1.running_mean"])
        names = [stage["name"] for stage in summary(out)["stages"]]
        assert names == ["ema" if words else "clean", "statistics"]
    first, second = (summary(tmp_path / f"polished{n}")["stages"][0]["loss"] for n in (0, 1))
    assert first != second


def test_without_an_average_it_is_refused(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(a_recipe(CLEAN), out=tmp_path / "plain", max_steps=2)
    words = [str(tmp_path / "plain"), "--ema", "--out", str(tmp_path / "polished")]
    assert main(["polish", *words]) == USER
    assert "holds no EMA: " in capsys.readouterr().err
    assert not (tmp_path / "polished").exists()


def test_the_recipe_of_a_checkpoint_is_not_changed(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(unfinished), "--out", str(tmp_path / "polished"), "--set", "seed=1"]
    assert main(["polish", *words]) == USER
    assert (
        "--set seed=1: a checkpoint has its own recipe; only execution" in capsys.readouterr().err
    )


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
    assert main(["polish", str(unfinished), "--ema", "--out", str(polished)]) == DONE
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


def test_each_row_of_a_comparison_is_momentum_sgd_from_the_checkpoint(tmp_path: Path) -> None:
    """Written with torch.optim, timm and Pillow; nothing of one row reaches the next.

    At a low rate: two ways to round may see a ReLU on two sides of zero.
    """
    changes = ("batch.bn_span=96", "model.arguments.drop_rate=0", "optimizer.weight_decay=0.01")
    recipe = a_recipe(CLEAN, changes=changes)
    run(recipe, out=tmp_path / "run", max_steps=5)
    how = ["--epochs", "0.2", "--lr", "0.01", "--out", str(tmp_path / "table.json")]
    assert main(["polish", "--compare", str(tmp_path / "run"), *how]) == DONE
    rows = {row["mode"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    every = {name for name, _ in timms(recipe).named_parameters()}
    norms = {name for name in every if ".bn" in f".{name}" or "downsample.1" in name}
    for mode, moving in (("affine", norms | {"fc.weight", "fc.bias"}), ("clean", every)):
        model = timms(recipe)
        model.load_state_dict(weights(tmp_path / "run"))
        top1, loss = by_hand(model, moving)
        assert rows[mode]["loss"] == pytest.approx(loss, rel=1e-4)
        assert rows[mode]["top1"] == pytest.approx(top1, abs=1.5 / 360)
        assert (rows[mode]["updates"], rows[mode]["note"]) == (3, None)


def test_every_row_begins_with_the_loss_scale_of_the_checkpoint_and_shows_skipped_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at which everything overflows, so that no update changes anything."""
    run(a_recipe(STATISTICS, changes=HALF), out=tmp_path / "run", max_steps=1)
    (path,) = (tmp_path / "run/checkpoints").iterdir()
    checkpoint = load_checkpoint(path)
    checkpoint.state["scaler"]["scale"] = 2.0**60
    write_checkpoint(path.parent, checkpoint)
    begun: list[float] = []

    make_updates = Session.make_updates

    def noted(session: Session, part: Part) -> None:
        begun.append(session.state.scaler.get_scale())
        make_updates(session, part)

    monkeypatch.setattr(Session, "make_updates", noted)
    how = ["--samples", "48", "--epochs", "0.07", "--out", str(tmp_path / "table.json")]
    assert main(["polish", "--compare", str(tmp_path / "run"), *how]) == DONE
    assert begun == [2.0**60, 2.0**60]
    rows = {row["mode"]: row for row in json.loads((tmp_path / "table.json").read_text())["rows"]}
    for mode in ("affine", "clean"):
        assert rows[mode]["updates"] == 0
        assert rows[mode]["note"] == "2 of 2 updates skipped: gradients not finite"
        assert rows[mode]["loss"] == rows["none"]["loss"]
