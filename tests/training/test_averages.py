"""The moving average of a model against one written by hand in float64."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_multi_avg_fn,
    get_swa_multi_avg_fn,
)

from largebatch.distributed.serial import Serial
from largebatch.models.batchnorm import Spans, with_span
from largebatch.training.averages import EMA, SWA, averaged
from largebatch.training.state import TrainState

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


def a_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    layers(torch.zeros(2, 3, 6, 6))
    return with_span(layers, 2)


def drift(model: nn.Module) -> None:
    """Change everything that an update changes."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))
            else:
                tensor.add_(1)


def follow(average: EMA | SWA, step: int = 0) -> None:
    average.move(None)
    average.count(step)


def test_the_average_is_the_recursion_in_float64() -> None:
    model = a_model()
    Spans(model, Serial(torch.device("cpu")))  # a layer with workers cannot be copied
    average = EMA(model, decay=0.9)
    by_hand: dict[str, Tensor] = {}
    for _ in range(25):
        drift(model)
        follow(average)
        now = {name: value.double() for name, value in model.state_dict().items()}
        by_hand = {n: 0.9 * by_hand.get(n, v) + (1 - 0.9) * v for n, v in now.items()}
    tracked = model.state_dict()["1.num_batches_tracked"].clone()
    average.store()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), by_hand[name], rtol=1e-5, atol=1e-6)
        else:
            assert value.equal(tracked)


def test_a_skipped_update_is_not_averaged() -> None:
    """Whether the first is one or a later one: the average is bit for bit that of the others."""
    model = a_model()
    scaler, updater = GradScaler("cpu", enabled=False), cast("Any", None)
    state = TrainState(model=model, updater=updater, scaler=scaler, average=EMA(model, decay=0.7))
    expected = EMA(model, decay=0.7)
    for step in range(6):
        skipped = step in {0, 3, 4}
        if not skipped:
            drift(model)
            follow(expected, step)
        state.move_average(torch.tensor(skipped))
        state.count(step, images=1, seconds=0.0)
        if skipped:
            state.count_skipped()
    assert state.average is not None
    ours, theirs = state.average.state_dict(), expected.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert (state.average.num_models, state.progress.skipped) == (3, 3)


@pytest.mark.parametrize("steps", [3, 70])
def test_averages_are_bit_for_bit_those_of_pytorch(steps: int) -> None:
    """Checkpoints too, so that those of older versions go on."""
    model = a_model()
    ours: list[EMA | SWA] = [EMA(model, decay=0.7), SWA(model, after=range(1, steps + 1))]
    live = nn.ParameterList(averaged(model))
    theirs = [
        AveragedModel(live, multi_avg_fn=function)
        for function in (get_ema_multi_avg_fn(0.7), get_swa_multi_avg_fn())
    ]
    for step in range(steps):
        drift(model)
        for one, other in zip(ours, theirs, strict=True):
            follow(one, step)
            other.update_parameters(live)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
