"""Whatever changes while a run trains is in its checkpoint."""

import copy
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import AFFINE, CLEAN, HALF, JUDGED, STATISTICS, a_recipe

from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session
from largebatch.runs.options import Options
from largebatch.training.checkpoint import load_checkpoint
from largebatch.training.stages import run_stages
from largebatch.training.state import TrainState, Updater

SINGLE = "protocol={kind: asynchronous, learners: 1, modulation: n}"
OF_TODAY = (
    "loss={kind: bce, target_threshold: 0.2, class_weights: balanced}",
    "optimizer.clip_norm=0.1",
    "optimizer.layer_decay=0.8",
    "model.arguments.drop_path_rate=0.2",
)
EVERYTHING = a_recipe(CLEAN, "ema: 0.5", AFFINE, STATISTICS, JUDGED, changes=OF_TODAY)
AVERAGED = a_recipe(CLEAN, "swa: {over: {steps: 3}, every: {steps: 1}}", STATISTICS)
ASYNCHRONOUS = a_recipe(changes=("polish=null", SINGLE))
HALVES = a_recipe(CLEAN, "ema: 0.5", changes=HALF)


def content(value: Any) -> Any:  # noqa: ANN401 -- any field of a state
    """Return a field as tensors and plain values that can be compared."""
    if isinstance(value, Updater):
        return value.optimizer.state_dict()
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, list):
        return [content(item) for item in value]
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {key: item for key, item in asdict(value).items() if key != "seconds"}
    return value


def equal(ours: Any, other: Any) -> bool:  # noqa: ANN401 -- as above
    """Compare bit by bit."""
    if isinstance(ours, dict) and isinstance(other, dict):
        return ours.keys() == other.keys() and all(equal(ours[key], other[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(other) and all(map(equal, ours, other))
    if isinstance(ours, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(ours, other)
    return bool(ours == other)


def contents(state: TrainState) -> dict[str, Any]:
    named = {each.name for each in fields(TrainState) if not each.name.startswith("_")}
    named -= {"build_affine"}  # a function
    return {name: copy.deepcopy(content(getattr(state, name))) for name in named}


@pytest.mark.parametrize(
    ("recipe", "until", "changed"),
    [
        (EVERYTHING, 4, {"model", "updater", "average", "progress"}),
        (EVERYTHING, 7, {"model", "updater", "average", "progress", "stages", "snapshot"}),
        (EVERYTHING, 10, {"model", "updater", "average", "progress", "stages", "snapshot"}),
        (EVERYTHING, 99, {"model", "updater", "average", "progress", "stages"}),
        (AVERAGED, 7, {"model", "updater", "average", "progress", "stages"}),
        (ASYNCHRONOUS, 4, {"model", "updater", "progress"}),
        (HALVES, 7, {"model", "updater", "scaler", "average", "progress", "stages"}),
    ],
)
def test_every_field_that_changes_is_restored(
    recipe: Recipe, until: int, changed: set[str], tmp_path: Path
) -> None:
    options = Options(out=tmp_path)
    with open_session(recipe, options, {}) as session:
        fresh = contents(session.state)
        run_stages(session, until=until)
        session.saver.save()
        trained = contents(session.state)
    with open_session(recipe, options, {}) as session:
        session.saver.restore(load_checkpoint(max((tmp_path / "checkpoints").iterdir())))
        restored = contents(session.state)
    assert {name for name in trained if not equal(trained[name], fresh[name])} == changed
    for name, value in trained.items():
        assert equal(restored[name], value), name
