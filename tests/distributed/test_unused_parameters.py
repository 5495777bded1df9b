"""A model with parameters that the loss does not depend on: the error names them."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from on_forked_workers import on_forked_workers
from short_runs import DIGITS
from torch import nn

from largebatch.cli.main import USER, main
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.models.of_recipe import build_model
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import Options
from largebatch.runs.run import run_worker
from largebatch.tracking.events import Summary


def model_with_an_idle_layer(recipe: Recipe, device: torch.device) -> nn.Module:
    model = build_model(recipe, device)
    model.add_module("idle", nn.Linear(2, 2))
    return model


def train_with_an_idle_layer(recipe: Recipe, options: Options) -> Summary:
    with mock.patch("largebatch.runs.build.build_model", model_with_an_idle_layer):
        return run_worker(recipe, options)


def test_unused_parameters_end_a_run_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("largebatch.runs.run.run_worker", train_with_an_idle_layer)
    assert main(["train", str(DIGITS), "--out", str(tmp_path / "run")]) == USER
    shown = capsys.readouterr().err
    assert shown.startswith("largebatch: ")
    for name in ("idle.bias", "idle.weight", "model.arguments"):
        assert name in shown
    assert "Traceback" not in shown


def leave_a_layer_out_on_one_worker() -> None:
    """Worker 0 sends every group; worker 1 never sends the last one, which worker 0 waits for."""
    backend = TorchDistributed()
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])  # groups of 3 and 5 tensors
    used = layers[backend.rank :]
    with Reducer(layers.named_parameters(), backend) as reducer:
        reducer.arm()
        nn.Sequential(*used)(torch.ones(1, 2)).sum().backward()
        reducer.wait()


def test_a_layer_unused_on_one_worker_is_named_without_a_hang() -> None:
    named = r"largebatch\.errors\.\w+: [^\n]*0\.bias, 0\.weight"
    with pytest.raises(RuntimeError, match=named):  # of what the workers wrote
        on_forked_workers(leave_a_layer_out_on_one_worker, workers=2)
