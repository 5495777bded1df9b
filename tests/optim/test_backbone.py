"""The rates of a backbone, with every optimizer and on the whole way of a recipe."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import a_recipe, content, timms, weights
from torch import Tensor, nn

from largebatch import load_recipe, run
from largebatch.errors import RecipeError
from largebatch.models import classifier
from largebatch.optim.lars import LARS
from largebatch.optim.rates import (
    frozen_weights,
    hidden_gradients,
    own_groups,
    set_rates,
)

FROZEN = "model.backbone={lr_factor: 0.25, frozen: {steps: 2}}"
OPTIMIZERS = {
    "sgd": "{kind: sgd, bias_lr: 0.3}",
    "lars": "{kind: lars}",
    "adamw": "{kind: adamw}",
    "muon": "{kind: muon}",
    "schedule-free": "{kind: schedule-free, statistics_samples: 96}",
}


def begun(tmp_path: Path) -> tuple[nn.Module, Path]:
    """Return a model of the recipe, and a file of its weights."""
    torch.manual_seed(5)
    model = timms(a_recipe("statistics: {samples: 96}"))
    torch.save(model.state_dict(), tmp_path / "first.pth")
    return model, tmp_path / "first.pth"


def moved(first: nn.Module, found: dict[str, Tensor]) -> dict[bool, set[str]]:
    """Return the names of weights that changed, of the classifier (True) and of the others."""
    names = {id(weight): name for name, weight in first.named_parameters()}
    head = {names[id(weight)] for weight in classifier(first).parameters()}
    changed = {name for name, old in first.named_parameters() if not old.equal(found[name])}
    return {True: changed & head, False: changed - head}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_frozen_backbone_does_not_move_and_its_classifier_does(kind: str, tmp_path: Path) -> None:
    first, path = begun(tmp_path)
    constant = "schedule={peak_lr: 0.1, warmup: null, decay: {kind: constant}}"
    optimizer = f"optimizer={OPTIMIZERS[kind]}"
    recipe = a_recipe(changes=("polish=null", f"model.weights={path}", FROZEN, constant, optimizer))
    folder = tmp_path / "run"
    run(recipe, out=folder, report=False, max_steps=2)
    assert moved(first, weights(folder)) == {True: {"fc.weight", "fc.bias"}, False: set()}
    assert sum(map(bool, content(folder)["optimizer"]["state"].values())) == 2
    run(recipe, out=folder, report=False, max_steps=3, resume=True)
    assert len(moved(first, weights(folder))[False]) > 20


def test_a_group_is_divided_and_its_settings_stay() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups: list[dict[str, Any]] = [
        {"params": weights[:2], "lr_factor": 3.0, "momentum": 0.5},
        {"params": weights[2:]},
    ]
    sgd = torch.optim.SGD(groups, lr=1.0)
    found = own_groups(sgd, weights[1:])
    assert [group["params"] for group in found] == [[weights[1]], [weights[2]]]
    for group in found:
        group |= {"lr_factor": 0.5 * group.get("lr_factor", 1.0), "after": 4}
    rates = []
    for step in (3, 4):
        set_rates(sgd, 0.1, step=step)
        rates.append({id(w): g["lr"] for g in sgd.param_groups for w in g["params"]})
    assert [rates[0][id(weight)] for weight in weights] == pytest.approx([0.3, 0, 0])
    assert [rates[1][id(weight)] for weight in weights] == pytest.approx([0.3, 0.15, 0.05])
    assert sgd.param_groups[2]["momentum"] == 0.5


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(partial(torch.optim.SGD, momentum=0.9), id="SGD"),
        pytest.param(torch.optim.AdamW, id="AdamW"),
        pytest.param(LARS, id="LARS"),
    ],
)
def test_gradients_before_a_group_is_trained_leave_no_momentum(
    build: Callable[..., torch.optim.Optimizer],
) -> None:
    ours, other = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = build([{"params": [ours], "after": 3}, {"params": [other]}], weight_decay=0.0)
    for step in range(6):
        for weight in (ours, other):
            weight.grad = torch.full_like(weight, float(step < 3))
        set_rates(optimizer, 0.1, step=step)
        with hidden_gradients(frozen_weights(optimizer, step=step)):
            optimizer.step()
        assert ours.grad is not None
        assert ours.tolist() == [1, 1]
        assert step >= 3 or not optimizer.state[ours]
    assert other[0] < 1


def test_a_frozen_backbone_needs_weights() -> None:
    with pytest.raises(RecipeError, match=r"model\.weights"):
        load_recipe("digits_96", [FROZEN])
