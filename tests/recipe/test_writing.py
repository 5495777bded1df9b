"""Recipes as YAML to be edited."""

import pytest
from short_runs import DIGITS

from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.writing import dump_commented

PIECES = ", ".join(
    f"{{length: {{steps: {steps}}}, peak_lr: 0.25, decay: {{kind: exp, gamma: 0.999}}}}"
    for steps in (100, 90, 80, 70)
)
LAST = "{length: null, peak_lr: 0.5, decay: {kind: constant}}"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="usual"),
        pytest.param(["name='2024'", "model.name='null'", "tracking=[wandb]"], id="strings"),
        pytest.param(
            [f"schedule.decay={{kind: piecewise, pieces: [{PIECES}, {LAST}]}}"], id="long value"
        ),
        pytest.param(["data.resolution=[{until: null, image_size: 4}]"], id="lists"),
        pytest.param(["evaluation={}", "execution={}"], id="empty sections"),
    ],
)
def test_a_commented_recipe_is_read_as_it_was(changes: list[str]) -> None:
    recipe = load_recipe(DIGITS, changes)
    comments = {"seed": "one", "schedule": "two: three", "schedule.peak_lr": "# 4", "loss": "5"}
    text = dump_commented(recipe, comments, header=["name: none", ""])
    assert parse_recipe(text) == recipe
    assert all(len(line) <= 140 for line in text.splitlines())


def test_comments_stand_behind_their_keys_and_defaults_are_left_out() -> None:
    comments = {"seed": "any", "optimizer": "which", "optimizer.momentum": "usual"}
    lines = dump_commented(load_recipe(DIGITS), comments, header=["first"]).splitlines()
    assert lines[0] == "# first"
    commented = [line.split() for line in lines[1:] if "#" in line]
    assert [words[0] for words in commented] == ["seed:", "optimizer:", "momentum:"]
    assert len({line.index("#") for line in lines[1:] if "#" in line}) == 1
    assert not any(line.startswith(("execution", "nonfinite")) for line in lines)
