"""What a recipe may say of its optimizer, and what is missing where a library is not installed."""

import pytest
import torch
from short_runs import DIGITS

from largebatch import load_recipe
from largebatch.errors import RecipeError
from largebatch.optim import LARS
from largebatch.recipe import optimizers as sections

FREE = (
    *("optimizer.kind=schedule-free", "optimizer.statistics_samples=96"),
    "schedule.decay.kind=constant",
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            (*FREE[:2], "schedule.decay.kind=cosine"),
            r"schedule.decay must be {kind: constant}, got cosine",
        ),
        ((*FREE, "polish.ema=0.9"), "polish.ema: "),
        (
            (*FREE, "polish.swa={over: {steps: 40}, every: {steps: 10}}"),
            "polish.swa: ",
        ),
        (
            (*FREE, "polish={clean: {steps: 2}, keep: better, held_out: 100}"),
            "polish.clean cannot be rolled back",
        ),
        ((FREE[0], FREE[2]), "optimizer.statistics_samples is for models with BatchNorm"),
        (
            (*FREE, "optimizer.statistics_samples=1438"),
            r"optimizer.statistics_samples \(1438\) must not exceed the training images \(1437\)",
        ),
        (
            (*FREE, "optimizer.momentum=0"),
            "optimizer.momentum: input should be greater than 0",
        ),
        (
            ("optimizer.kind=sgd", "optimizer.nesterov=true", "optimizer.momentum=0"),
            "nesterov: true needs a momentum above 0",
        ),
        (("optimizer.kind=shampoo", "optimizer.block_size=1"), "optimizer.block_size: "),
        (("optimizer.kind=shampoo", "optimizer.graft=adam"), "optimizer.graft: "),
        (("optimizer.kind=lamb", "optimizer.max_grad_norm=0"), "optimizer.max_grad_norm: "),
        (
            ("optimizer={kind: muon, adjust_lr: original}",),
            "adjust_lr: original needs others.lr: schedule.peak_lr is Muon's",
        ),
        (("optimizer={kind: muon, others: {kind: sgd}}",), "optimizer.others.lr: missing"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(changes: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(DIGITS, changes)


def test_the_convention_of_lars_is_that_of_python_unless_it_is_given() -> None:
    recipe = load_recipe("cifar10_resnet9_128", ["optimizer={kind: lars}"])
    assert isinstance(recipe.optimizer, sections.LARS)
    assert recipe.optimizer.convention == LARS([torch.zeros(1)]).param_groups[0]["convention"]
