"""Stochastic weight averaging on the digits: the mean against snapshots averaged by hand."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from plain_images import GREY, load, shuffled, training_files
from polish_reference import assert_right, one_pass
from short_runs import BEFORE, BROAD, CLEAN, JUDGED, a_recipe, content, log, timms, weights
from torch import Tensor

from largebatch import run
from largebatch.data.datasets import digits
from largebatch.runs.checkpoints import polish_checkpoint
from largebatch.runs.options import Options
from largebatch.tracking.events import Accuracy
from largebatch.training.checkpoint import load_checkpoint

SWA = "swa: {over: {steps: 5}, every: {steps: 2}}"
MEASURED = "statistics: {samples: 97}"
EVERY_UPDATE = ("evaluation.every_epochs=0.066", "execution.checkpoints.keep_last=100")


def mean_of_checkpoints(folder: Path, numbers: set[int]) -> dict[str, Tensor]:
    """Return the mean of the states after these numbers of updates, in float64."""
    found = [load_checkpoint(path) for path in (folder / "checkpoints").iterdir()]
    states = [each.state["model"] for each in found if each.progress.step in numbers]
    assert len(states) == len(numbers)
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]
    }


def test_the_mean_and_its_statistics_are_those_computed_by_hand(tmp_path: Path) -> None:
    """Averaged from checkpoints, put into timm's model, and shown images read by Pillow."""
    run(a_recipe(CLEAN, changes=EVERY_UPDATE), out=tmp_path / "live")
    mean = mean_of_checkpoints(tmp_path / "live", {4, 6, BEFORE})
    recipe = a_recipe(CLEAN, SWA, MEASURED)
    summary = run(recipe.with_execution(device_batch=96), out=tmp_path / "run")
    ours = weights(tmp_path / "run")
    model = timms(recipe).double()
    for name, _ in model.named_parameters():
        torch.testing.assert_close(ours[name].double(), mean[name], rtol=1e-5, atol=1e-6)
    files = training_files(digits.write_digits())
    order = shuffled(len(files), seed=recipe.seed)[:97]
    images, labels = load([files[row] for row in order], colours=GREY, size=16)
    model.load_state_dict(mean)
    right = one_pass(model, [(part.double(), labels) for part in images.split(48)])
    model.load_state_dict(ours)
    assert_right(model, right, rel=1e-4)

    assert [stage.name for stage in summary.stages] == ["train", "clean", "swa", "statistics"]
    for before, after in pairwise(summary.stages):
        assert after.before == Accuracy(top1=before.top1, top5=before.top5, loss=before.loss)
        assert after.loss != before.loss


TRANSFORMER = (
    "model={name: big_vision_vit_s16, arguments: {patch: 4, width: 16, depth: 1, heads: 2}}",
    "batch.bn_span=null",
    "optimizer={kind: adamw}",
    "schedule.peak_lr=0.01",
)


@pytest.mark.parametrize("stage", ["ema", pytest.param("swa", marks=pytest.mark.long)])
def test_a_model_without_batchnorm_has_averages(stage: str, tmp_path: Path) -> None:
    """The average of all updates, or of some, computed from their checkpoints in float64."""
    changes = (*TRANSFORMER, *EVERY_UPDATE)
    run(a_recipe(CLEAN, changes=changes), out=tmp_path / "live")
    if stage == "swa":
        average = mean_of_checkpoints(tmp_path / "live", {4, 6, BEFORE})
    else:
        average = mean_of_checkpoints(tmp_path / "live", {1})
        for number in range(2, BEFORE + 1):
            model = mean_of_checkpoints(tmp_path / "live", {number})
            average = {name: 0.5 * average[name] + 0.5 * model[name] for name in model}
    section = {"ema": "ema: 0.5", "swa": SWA}[stage]
    summary = run(a_recipe(CLEAN, section, changes=changes), out=tmp_path / "run")
    assert [result.name for result in summary.stages] == ["train", "clean", stage]
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight.double(), average[name], rtol=1e-5, atol=1e-6)


def test_a_mean_is_judged_by_its_own_statistics(tmp_path: Path) -> None:
    """With those of other weights it would be rolled back before they are measured."""
    summary = run(a_recipe(SWA, MEASURED, JUDGED, changes=(BROAD,)), out=tmp_path / "run")
    assert [stage.name for stage in summary.stages] == ["train", "swa"]
    (drift,) = log(tmp_path / "run", "drift")
    assert (drift["stage"], drift["samples"]) == ("swa", 97)
    polished = polish_checkpoint(tmp_path / "run", Options(out=tmp_path / "again"), samples=97)
    assert [stage.name for stage in polished.stages] == ["swa", "statistics"]
    for stage in polished.stages:  # measured again, they are the same
        assert stage.loss == pytest.approx(summary.stages[-1].loss, rel=1e-6)


@pytest.mark.parametrize("judged", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_run_stopped_while_it_averages_ends_with_identical_weights(
    tmp_path: Path, judged: bool
) -> None:
    recipe = a_recipe(CLEAN, SWA, MEASURED, *(JUDGED,) * judged)
    whole = run(recipe, out=tmp_path / "whole")
    for stop in (5, 7):
        run(recipe, out=tmp_path / "parts", max_steps=stop, resume=stop > 5)
        assert int(content(tmp_path / "parts")["ema"]["n_averaged"]) == stop // 2 - 1
    parts = run(recipe, out=tmp_path / "parts", resume=True)
    torch.testing.assert_close(
        weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=0, atol=0
    )
    timeless = [[replace(stage, seconds=0.0) for stage in end.stages] for end in (parts, whole)]
    assert timeless[0] == timeless[1]


def test_a_mean_of_updates_that_were_all_rolled_back_is_left_out(tmp_path: Path) -> None:
    """The clean updates overflow, and the mean was to be of them alone."""
    jump = (
        "schedule={peak_lr: 1e4, warmup: null, decay: {kind: piecewise, pieces: ["
        "{length: {steps: 6}, peak_lr: 0.5, decay: {kind: constant}}, "
        "{length: null, peak_lr: 1e4, decay: {kind: constant}}]}}"
    )
    two = "swa: {over: {steps: 2}, every: {steps: 1}}"
    recipe = a_recipe(CLEAN, two, MEASURED, JUDGED, changes=(jump,))
    summary = run(recipe, out=tmp_path / "run")
    assert [stage.name for stage in summary.stages] == ["train", "clean", "statistics"]
    notes = [note["text"] for note in log(tmp_path / "run", "note") if note["stage"] == "swa"]
    assert len(notes) == 1
    assert "SWA skipped" in notes[0]
