"""The guard in whole runs: what it counts, ties, stages that diverge."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_images import GREY, load, shuffled, training_files
from short_runs import (
    AFFINE,
    BEFORE,
    CLEAN,
    HALF,
    JUDGED,
    LEARNED,
    a_recipe,
    content,
    log,
    timms,
    weights,
)

from largebatch import run
from largebatch.cli.main import DONE, main
from largebatch.data.datasets import digits
from largebatch.errors import DivergedError
from largebatch.report import write_report

ABSURD = "affine: {steps: 3, lr: 1e38}"
JUMP = (
    "schedule={peak_lr: 1e38, warmup: null, decay: {kind: piecewise, pieces: ["
    "{length: {steps: 3}, peak_lr: 0.5, decay: {kind: constant}}, "
    "{length: null, peak_lr: 1e38, decay: {kind: constant}}]}}"
)


def test_what_decides_is_top1_on_the_images_that_the_seed_holds_out(tmp_path: Path) -> None:
    """Counted with timm's model on images read by Pillow."""
    recipe = a_recipe(AFFINE, JUDGED, changes=LEARNED)
    (train,) = run(recipe, out=tmp_path / "run", max_steps=40).stages
    files = training_files(digits.write_digits())
    rows = shuffled(len(files), seed=recipe.seed, stream=5)[:200]
    images, labels = load([files[row] for row in rows], colours=GREY, size=16)
    model = timms(recipe)
    model.load_state_dict(weights(tmp_path / "run"))
    with torch.no_grad():
        right = int((model.eval()(images).argmax(1) == labels).sum())
    assert 40 < right < 200
    assert train.held_out is not None
    assert round(train.held_out * 200) == right


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_stage_that_diverges_is_undone_and_the_reason_is_in_the_record(
    tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(a_recipe(CLEAN, ABSURD, JUDGED), workers=workers, out=tmp_path / "with")
    run(a_recipe(CLEAN, JUDGED), workers=workers, out=tmp_path / "without")
    affine = summary.stages[-1]
    assert (summary.status, affine.name, affine.kept) == ("finished", "affine", False)
    assert affine.note is not None
    assert affine.note.startswith("the training loss became ")
    assert affine.note.endswith("lower polish.affine.lr")
    assert 0 < affine.steps <= 3
    torch.testing.assert_close(
        weights(tmp_path / "with"), weights(tmp_path / "without"), rtol=0, atol=0
    )
    assert summary.loss == summary.stages[-2].loss
    (note,) = log(tmp_path / "with", "note")
    assert (note["stage"], note["text"]) == ("affine", affine.note)
    if workers == 1:  # else another process prints
        assert affine.note in capsys.readouterr().out.replace("\n", "")
    text = (tmp_path / "with/summary.json").read_text()
    refuse: Any = pytest.fail  # a bare NaN is no JSON
    read = json.loads(text, parse_constant=refuse)
    assert read["stages"][-1]["note"] == affine.note
    assert write_report(tmp_path / "with").exists()


def test_stages_go_on_after_clean_updates_that_diverged(tmp_path: Path) -> None:
    """As if there had been none: the same average and the same affine updates."""
    recipe = a_recipe("clean: {steps: 5}", "ema: 0.5", AFFINE, JUDGED, changes=(JUMP,))
    summary = run(recipe, out=tmp_path / "run")
    stages = {stage.name: stage for stage in summary.stages}
    assert [stage.name for stage in summary.stages] == ["train", "clean", "ema", "affine"]
    assert not stages["clean"].kept
    assert "the training loss became" in str(stages["clean"].note)
    assert stages["clean"].steps == 2  # the loss of the second is no number
    assert (stages["affine"].steps, stages["affine"].note) == (3, None)
    flat = ("schedule={peak_lr: 0.5, warmup: null, decay: {kind: constant}}", "duration={steps: 3}")
    three = run(a_recipe("ema: 0.5", JUDGED, changes=flat), out=tmp_path / "three")
    assert stages["ema"].loss == three.stages[-1].loss
    assert all(math.isfinite(value.float().sum()) for value in weights(tmp_path / "run").values())
    assert content(tmp_path / "run")["progress"]["step"] == BEFORE + 3


@pytest.mark.long
def test_only_updates_that_were_made_are_counted_however_often_the_run_was_stopped(
    tmp_path: Path,
) -> None:
    """Three, then two until the loss is no number, then three; as the log has it."""
    recipe = a_recipe("clean: {steps: 5}", "ema: 0.5", AFFINE, JUDGED, changes=(JUMP,))
    whole = run(recipe, out=tmp_path / "whole")
    assert (whole.steps, whole.samples) == (8, 8 * 96)
    assert [stage.steps for stage in whole.stages] == [3, 2, 0, 3]
    for stop in (4, 5, 7):
        part = run(recipe, out=tmp_path / "parts", max_steps=stop, resume=stop > 4)
        assert (part.status, part.steps) == ("paused", stop)
    parts = run(recipe, out=tmp_path / "parts", resume=True)
    assert (parts.steps, parts.samples) == (whole.steps, whole.samples)
    assert [stage.steps for stage in parts.stages] == [3, 2, 0, 3]
    for name in ("whole", "parts"):
        assert len(log(tmp_path / name, "step")) == 8
    words = ["polish", str(tmp_path / "parts"), "--samples", "96"]
    assert main([*words, "--out", str(tmp_path / "polished")]) == DONE
    polished = json.loads((tmp_path / "polished/summary.json").read_text())
    assert (polished["steps"], polished["stages"][0]["steps"]) == (8, 8)


def test_a_stage_that_is_undone_leaves_no_loss_scale(tmp_path: Path) -> None:
    """The first affine update makes every weight infinite, and those that follow overflow."""
    recipe = a_recipe(ABSURD, JUDGED, changes=(*HALF, "duration={steps: 3}"))
    run(recipe, out=tmp_path / "run", max_steps=3)
    before = content(tmp_path / "run")["scaler"]
    summary = run(recipe, out=tmp_path / "run", resume=True)
    assert not summary.stages[-1].kept
    assert log(tmp_path / "run", "step")[-1]["loss_scale"] < before["scale"]
    assert content(tmp_path / "run")["scaler"] == before


@pytest.mark.parametrize(
    "polish", [(CLEAN, ABSURD), pytest.param((ABSURD, "keep: always"), marks=pytest.mark.long)]
)
def test_without_a_guard_a_stage_that_diverges_fails_the_run(
    tmp_path: Path, polish: tuple[str, ...]
) -> None:
    with pytest.raises(DivergedError, match="lower polish.affine.lr$"):
        run(a_recipe(*polish), out=tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed"
