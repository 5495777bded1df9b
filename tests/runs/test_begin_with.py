"""Training that begins with a file of weights: `model.weights`."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from on_forked_workers import on_forked_workers
from safetensors.torch import save_file
from short_runs import DIGITS, content, log, weights
from torch import Tensor

from largebatch import load_recipe, run
from largebatch.cli.main import main
from largebatch.errors import CheckpointError
from largebatch.models import zoo
from largebatch.recipe.recipe import Recipe

NET: dict[str, Any] = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}
NO_STEP = "schedule={peak_lr: 1e-30, warmup: null, decay: {kind: constant}}"
"""Updates that change no weight, so that what a run began with can be read where it ends."""


def a_recipe(*changes: str) -> Recipe:
    """Return the digits' recipe with a small network and a short schedule."""
    return load_recipe(
        DIGITS,
        [
            *("duration={steps: 3}", "schedule.warmup=null", "polish=null", "evaluation={}"),
            *(f"model.arguments={json.dumps(NET)}", "data.image_size=16", *changes),
        ],
    )


def theirs(path: Path, *, classes: int = 10) -> dict[str, Tensor]:
    """Write weights that no seed of ours draws; return them."""
    torch.manual_seed(99)
    state = zoo.build("resnet18", num_classes=classes, arguments=NET).state_dict()
    state = {name: value + (value.is_floating_point() * 0.01) for name, value in state.items()}
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state}, path)
    return state


def assert_weights(ours: dict[str, Tensor], expected: dict[str, Tensor], but: str = "!") -> None:
    """Compare all weights, not the running statistics, which training moves."""
    names = [name for name in ours if name.endswith(("weight", "bias")) and but not in name]
    assert len(names) > 10
    for name in names:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", ["theirs.pth", "theirs.safetensors"])
def test_training_begins_with_the_weights_of_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    state = theirs(path)
    summary = run(a_recipe(f"model.weights={path}", NO_STEP), out=tmp_path / "run")
    assert_weights(weights(tmp_path / "run"), state)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert summary.weights_sha256 == digest
    assert log(tmp_path / "run", "start")[0]["weights_sha256"] == digest


def train_where_worker_0_has_the_file(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        os.chdir(folder / "empty")
    run(a_recipe("model.weights=theirs.pth"), out=folder / "two")


def test_two_workers_train_from_a_file_as_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 does not have the file at all: worker 0 gives it the weights."""
    theirs(tmp_path / "theirs.pth")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    on_forked_workers(train_where_worker_0_has_the_file, tmp_path, workers=2)
    run(a_recipe("model.weights=theirs.pth"), out=tmp_path / "one")
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"))
    losses = [[step["loss"] for step in log(tmp_path / name, "step")] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_resumed_run_and_evaluation_need_the_file_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.pth"
    theirs(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    recipe = a_recipe(f"model.weights={path}")
    run(recipe, out=tmp_path / "whole")
    run(recipe, out=tmp_path / "parts", max_steps=1)
    path.write_bytes(b"another file now")
    resumed = run(recipe, out=tmp_path / "parts", resume=True)
    assert (resumed.status, resumed.weights_sha256) == ("finished", digest)
    assert [start["weights_sha256"] for start in log(tmp_path / "parts", "start")] == [digest] * 2
    torch.testing.assert_close(
        content(tmp_path / "parts")["model"], content(tmp_path / "whole")["model"], rtol=0, atol=0
    )
    path.unlink()
    assert main(["evaluate", str(tmp_path / "parts")]) == 0
    assert f"top-1 {resumed.top1:.2%}" in capsys.readouterr().out


def test_a_checkpoint_of_ours_is_a_file_of_weights_too(tmp_path: Path) -> None:
    run(a_recipe("schedule.peak_lr=0.5"), out=tmp_path / "first")
    (path,) = (tmp_path / "first/checkpoints").iterdir()
    run(a_recipe(f"model.weights={path}", NO_STEP), out=tmp_path / "second")
    assert_weights(weights(tmp_path / "second"), weights(tmp_path / "first"))


def test_a_classifier_of_other_classes_is_refused_and_can_be_reinitialised(tmp_path: Path) -> None:
    path = tmp_path / "theirs.pth"
    state = theirs(path, classes=3)
    with pytest.raises(CheckpointError) as caught:
        run(a_recipe(f"model.weights={path}"), out=tmp_path / "run")
    assert "fc.bias: 3, expected 10" in str(caught.value)
    assert "model.head_std" in str(caught.value)
    assert not (tmp_path / "run").exists()
    changes = (f"model.weights={path}", "model.head_std=0.01", NO_STEP)
    run(a_recipe(*changes), out=tmp_path / "run")
    found = weights(tmp_path / "run")
    assert_weights(found, state, but="fc.")
    assert found["fc.weight"].shape == (10, 16)
    assert 0.005 < found["fc.weight"].std().item() < 0.02


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none.pth"):
        run(a_recipe(f"model.weights={tmp_path / 'none.pth'}"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
