"""Schedule-Free SGD by the recipe's rates, beside the library with its own."""

import pytest
import torch
from schedulefree import SGDScheduleFree
from schedules_of import schedule_of
from short_runs import DIGITS
from torch import Tensor, nn

from largebatch import load_recipe
from largebatch.distributed.serial import Serial
from largebatch.optim.schedule_free import at_average, is_averaging, store_average
from largebatch.runs.optimizer_of_recipe import build_optimizer

WARMUP = 5
FREE = (
    "optimizer={kind: schedule-free, momentum: 0.8, weight_decay: 0.01, weight_power: 0.75, "
    "statistics_samples: 96}"
)
CONSTANT = "schedule={peak_lr: 0.7, warmup: {steps: 5}, decay: {kind: constant}, first_step: 1}"


def a_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(24, 6, dtype=torch.float64, generator=generator)
    model.zero_grad()
    model(images).square().mean().backward()


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_the_recipes_warm_up_matches_the_librarys() -> None:
    """The average weighs an update by the highest rate so far, which the recipe sets."""
    ours, theirs = a_model(), a_model()
    recipe = load_recipe(DIGITS, [FREE, CONSTANT])
    optimizer, rate = build_optimizer(recipe, ours, Serial()), schedule_of(recipe)
    decayed = {
        True: [p for p in theirs.parameters() if p.ndim > 1],
        False: [p for p in theirs.parameters() if p.ndim == 1],
    }
    groups = [{"params": decayed[key], "weight_decay": 0.01 * key} for key in (True, False)]
    library = SGDScheduleFree(groups, lr=0.7, momentum=0.8, warmup_steps=WARMUP, r=0.75)
    library.train()
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for model, one in ((ours, optimizer), (theirs, library)):
            backward(model, step)
            one.step()
        torch.testing.assert_close(vector(ours), vector(theirs), rtol=1e-12, atol=1e-12)
    store_average(optimizer)
    library.eval()
    torch.testing.assert_close(vector(ours), vector(theirs), rtol=1e-12, atol=1e-12)


def test_evaluating_the_average_changes_no_bit() -> None:
    """The library restores the weights only up to rounding."""
    model = a_model()
    optimizer = build_optimizer(load_recipe(DIGITS, [FREE, CONSTANT]), model, Serial())
    for step in range(4):
        backward(model, step)
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    counts = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    with pytest.raises(RuntimeError, match="in between"), at_average(model, optimizer):  # noqa: PT012
        assert not is_averaging(optimizer.param_groups)
        assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
        model.train()(torch.randn(8, 6, dtype=torch.float64))  # moves running statistics
        raise RuntimeError("in between")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert counts == [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
