"""The first updates of a recipe under each setting of execution, beside eager ones and float64."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import accelerator
import late_group
import pytest
import short_runs
import torch
from on_forked_workers import on_forked_workers
from torch import Tensor, nn

from largebatch.lab.measure.executions import Comparison, Row, compare_executions
from largebatch.models import kernels
from largebatch.optional import require_timm
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import Options

require_timm()
from timm.models import register_model  # noqa: E402 -- timm needs torchvision's operators


class Small(nn.Module):
    """Three convolutions with BatchNorm, of 4, 6 and 8 channels, and a head."""

    def __init__(self, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        sizes = [3, 4, 6, 8]
        for number in range(3):
            before, after = sizes[number : number + 2]
            self.add_module(f"conv{number}", nn.Conv2d(before, after, 3, stride=2, bias=False))
            self.add_module(f"norm{number}", nn.BatchNorm2d(after))
        self.drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for number in range(3):
            x = getattr(self, f"norm{number}")(getattr(self, f"conv{number}")(x))
            x = nn.functional.silu(x)  # without a ReLU no value falls on another side
        logits: Tensor = self.head(self.drop(x.mean(dim=(2, 3))))
        return logits


@register_model  # type: ignore[untyped-decorator]  # timm's
def small_of_executions(*, num_classes: int, drop_rate: float = 0.0, **_: object) -> nn.Module:
    return Small(num_classes, drop_rate)


def recipe_of(*changes: str) -> Recipe:
    return short_runs.a_recipe(
        short_runs.EMA,
        changes=(
            "model={name: small_of_executions}",
            "batch={global_batch: 16, bn_span: 4}",
            *changes,
        )
    )


def on_simulated(fault: str | None) -> Comparison:
    accelerator.simulate()
    accelerator.use_graphs()
    accelerator.use_kernels()
    return compare_executions(
        recipe_of("execution.device_batch=8"), Options(), steps=2
    )


def test_x() -> None:
    found = on_forked_workers(on_simulated, None, workers=1)
    print(found.table())
    assert 0
