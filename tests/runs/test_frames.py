"""How far it is from `run` to the model, for who reads the code or a traceback."""

import traceback
from pathlib import Path
from typing import Any

import pytest
from short_runs import CLEAN, a_recipe
from torch import nn

import largebatch
from largebatch import run
from largebatch.models.of_recipe import build_model

PACKAGE = Path(largebatch.__file__).parent


def test_from_run_to_the_model_are_six_calls_and_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []

    def note(model: nn.Module, _: object) -> None:
        if model.training:
            frames = traceback.extract_stack()
            ours = [it.name for it in frames if Path(it.filename).is_relative_to(PACKAGE)]
            ours = [name for name in ours if name != "train_pieces"]
            stacks.append(ours[ours.index("run") :])

    def hooked(*arguments: Any) -> nn.Module:  # noqa: ANN401 -- as build_model's
        model = build_model(*arguments)
        model.register_forward_pre_hook(note)
        return model

    monkeypatch.setattr("largebatch.runs.build.build_model", hooked)
    run(a_recipe(CLEAN), out=tmp_path / "run", max_steps=1, report=False)
    assert stacks
    for calls in stacks:
        assert calls[0] == "run"
        assert len(calls) <= 6 + 1, calls
