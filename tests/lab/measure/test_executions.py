"""The first updates of a recipe under each setting of execution, beside eager ones and float64."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import accelerator
import pytest
import short_runs
from on_forked_workers import on_forked_workers
from torch import Tensor, nn

import largebatch.accelerator
from largebatch.data.types import Batch
from largebatch.errors import AuditError, DeviceMemoryError, RecipeError
from largebatch.lab.measure import executions
from largebatch.lab.measure.executions import Row, compare_executions
from largebatch.models import kernels
from largebatch.optim.kernels.tabled import Tabled
from largebatch.optional import require_timm
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import Options
from largebatch.training.loop import EagerStep

require_timm()
from timm.models import register_model  # noqa: E402 -- timm needs torchvision's operators


class Smooth(nn.Module):
    """Three convolutions with BatchNorm, of 4, 6 and 8 channels, and a head.

    Without a ReLU no value falls on another side of it, so that a difference beyond rounding has
    a reason.
    """

    def __init__(self, num_classes: int, drop_rate: float) -> None:
        super().__init__()
        sizes = [3, 4, 6, 8]
        for number in range(3):
            conv = nn.Conv2d(sizes[number], sizes[number + 1], 3, stride=2, bias=False)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"norm{number}", nn.BatchNorm2d(sizes[number + 1]))
        self.drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for number in range(3):
            x = self.get_submodule(f"norm{number}")(self.get_submodule(f"conv{number}")(x))
            x = nn.functional.silu(x)
        # Twice, so that the order of the masks depends on the division of the samples.
        logits: Tensor = self.head(self.drop(self.drop(x).mean(dim=(2, 3))))
        return logits


@register_model  # type: ignore[untyped-decorator]  # timm's
def smooth_net(*, num_classes: int, drop_rate: float = 0.0, **_: object) -> nn.Module:
    return Smooth(num_classes, drop_rate)


def recipe_of(*changes: str) -> Recipe:
    return short_runs.a_recipe(
        short_runs.EMA,
        changes=(
            "model={name: smooth_net}",
            "batch={global_batch: 16, bn_span: 4}",
            "execution.device_batch=8",
            *changes,
        ),
    )


def require_compiler(_: object) -> None:
    raise RecipeError("execution.compile: a compiler takes longer than a test may")


def compared(
    recipe: Recipe, *settings: str, steps: int = 2, seeds: int = 2, compiles: bool = False
) -> dict[str, Row]:
    """Return the rows of some settings, or of all."""
    variants = executions._Comparing._variants

    def chosen(self: Any, plan: Any) -> Iterator[Any]:  # noqa: ANN401 -- private types
        for variant in variants(self, plan):
            if not settings or variant.setting in settings:
                yield variant

    has_compiler = mock.patch.object(executions, "require_compiler", require_compiler)
    with (
        mock.patch.object(executions._Comparing, "_variants", chosen),
        mock.patch.object(executions, "SEEDS", seeds),
        nullcontext() if compiles else has_compiler,
    ):
        comparison = compare_executions(recipe, Options(), steps=steps)
    lines = comparison.table().splitlines()
    assert max(map(len, lines)) <= 100
    assert 1e-8 < min(comparison.rounding) <= max(comparison.rounding) < 1e-4  # of float32
    return {row.setting: row for row in comparison.rows}


def wrong_in_one_layer() -> AbstractContextManager[object]:
    """Make BatchNorm's kernels wrong where there are 6 channels: in norm1."""
    real: Callable[..., tuple[Tensor, Tensor]] = kernels.batchnorm().normalise

    def normalise(x: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        y, moments = real(x, *args, **settings)
        return (y * 1.001 if x.shape[1] == 6 else y), moments

    return mock.patch.object(kernels.batchnorm(), "normalise", normalise)


def replays_stale_passes() -> AbstractContextManager[object]:
    """Replay every graph once only: what it has computed stays."""
    real = largebatch.accelerator.Graph.replay
    replayed: list[object] = []

    def replay(graph: largebatch.accelerator.Graph) -> None:
        if not any(graph is other for other in replayed):
            replayed.append(graph)
            real(graph)

    return mock.patch.object(largebatch.accelerator.Graph, "replay", replay)


def replays_a_stale_rate() -> AbstractContextManager[object]:
    """Keep the learning rate of the update that was recorded."""
    return mock.patch.object(Tabled, "refresh", return_value=None)


def with_kernels_of_models() -> tuple[Row, Row]:
    """Return the row of the kernels, right and wrong ones; Triton's interpreter computes them."""
    accelerator.simulate()
    accelerator.use_kernels()
    recipe = recipe_of("batch={global_batch: 8, bn_span: 4}")
    right = compared(recipe, "kernels", steps=1, seeds=1)["kernels"]
    with wrong_in_one_layer():
        wrong = compared(recipe, "kernels", steps=1, seeds=1)["kernels"]
    return right, wrong


def with_graphs() -> tuple[Row, Row]:
    """Return the row of graphs, of right and of stale ones."""
    accelerator.simulate()
    accelerator.use_graphs()
    recipe = recipe_of("batch={global_batch: 8, bn_span: 4}")
    right = compared(recipe, "graph", seeds=1)["graph"]
    with replays_stale_passes():
        stale = compared(recipe, "graph", seeds=1)["graph"]
    return right, stale


def with_kernels_in_graphs() -> tuple[Row, Row]:
    """Return the row of the recipe with the optimizer's kernels in graphs, right and stale ones."""
    accelerator.simulate()
    accelerator.use_graphs()
    accelerator.use_kernels(of_models=False)
    recipe = recipe_of("batch={global_batch: 8, bn_span: 4}")
    right = compared(recipe, "the recipe's", seeds=1)["the recipe's"]
    with replays_a_stale_rate():
        stale = compared(recipe, "the recipe's", seeds=1)["the recipe's"]
    return right, stale


def test_a_kernel_that_is_wrong_in_one_layer_is_a_fault_that_names_the_layer() -> None:
    pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
    right, wrong = on_forked_workers(with_kernels_of_models, workers=1)
    assert right.result == "rounding"
    assert "BatchNorm" in right.remark
    assert wrong.is_fault
    assert wrong.wrong_after == 1
    assert "norm2.running" in wrong.wrong  # the first that reads the result of norm1
    assert "norm1 before it is right" in wrong.wrong


def test_a_graph_that_replays_stale_numbers_is_a_fault() -> None:
    right, stale = on_forked_workers(with_graphs, workers=1)
    assert right.result == "bit for bit"
    assert len(right.differences) == 4  # two updates without a graph, and two replays
    assert stale.is_fault
    assert stale.wrong_after == 4  # the third is replayed as it was recorded


@pytest.mark.long
def test_a_graph_that_keeps_a_learning_rate_is_a_fault_in_the_optimizer() -> None:
    pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
    right, stale = on_forked_workers(with_kernels_in_graphs, workers=1)
    assert right.result == "rounding"
    assert "an update is one CUDA graph" in right.remark
    assert stale.is_fault
    assert "optimizer state" in stale.wrong


def test_settings_of_a_processor_differ_by_rounding() -> None:
    rows = compared(recipe_of())
    assert {name: row.result for name, row in rows.items()} == {
        "repeated": "bit for bit",
        "kernels": "not compared",
        "compile": "not compared",
        "graph": "not compared",
        "channels_last": "rounding",
        "device batch 4": "rounding",
        "other workers": "not compared",
        "the recipe's": "bit for bit",
    }
    assert "GPU" in str(rows["kernels"].absent)
    assert "GPU" in str(rows["graph"].absent)
    assert "execution.compile" in str(rows["compile"].absent)
    assert "--workers 2" in str(rows["other workers"].absent)


def alone(recipe: Recipe) -> dict[str, Row]:
    return compared(recipe, "1 worker", "device batch 2")


def test_one_worker_makes_the_updates_of_two_that_share_spans() -> None:
    """Each of the two holds half of a span; one holds the whole of it."""
    rows = on_forked_workers(alone, recipe_of("execution.device_batch=2"), workers=2)
    assert rows["1 worker"].result == "rounding"


def forgets_a_micro_batch() -> AbstractContextManager[object]:
    """Zero the gradients at every fourth micro-batch of an update."""
    real = EagerStep.forward_backward
    passes: list[int] = []

    def forward_backward(self: EagerStep, batch: Batch, *, first: bool, last: bool) -> None:
        passes[:] = [0] if first else [passes[0] + 1]
        if passes[0] == 3:
            self.reducer.zero()
        real(self, batch, first=first, last=last)

    return mock.patch.object(EagerStep, "forward_backward", forward_backward)


def test_accumulation_that_forgets_is_a_fault_in_the_gradients() -> None:
    with forgets_a_micro_batch():  # of four device batches of 4, and not of two of 8
        rows = compared(recipe_of(), "device batch 4", "channels_last")
    assert rows["channels_last"].result == "rounding"
    assert rows["device batch 4"].is_fault
    assert rows["device batch 4"].seeds == 2
    assert rows["device batch 4"].wrong.startswith("gradient of head")


def test_random_numbers_of_the_model_are_no_fault_where_samples_are_divided_otherwise() -> None:
    recipe = recipe_of("model.arguments={drop_rate: 0.5}")
    rows = compared(recipe, "device batch 4", "repeated")
    assert rows["repeated"].result == "bit for bit"
    assert rows["device batch 4"].result == "unknown"


def test_a_difference_that_another_seed_does_not_show_is_unknown() -> None:
    real = executions._compared
    first = iter([True])

    def once(variant: Any, reference: Any, made: Any) -> Row:  # noqa: ANN401 -- private types
        row = real(variant, reference, made)
        if not next(first, False):
            return row
        return replace(row, first=1, wrong_after=1, wrong="loss", roundings=(99.0, 1.0))

    with mock.patch.object(executions, "_compared", once):
        row = compared(recipe_of(), "channels_last")["channels_last"]
    assert row.result == "unknown"
    assert row.seeds == 2
    assert any("seed" in detail for detail in row.details)


def test_what_cannot_be_compared_is_one_line() -> None:
    with pytest.raises(AuditError, match="--steps"):
        compare_executions(recipe_of(), Options(), steps=1000)
    with mock.patch("os.sysconf", return_value=100), pytest.raises(DeviceMemoryError) as caught:
        compare_executions(recipe_of(), Options(), steps=1)
    assert "--set" in str(caught.value)


OPTIMIZERS = ("{kind: sgd}", "{kind: lamb}", "{kind: adamw}", "{kind: lars, eta: 0.02}")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_with_mixed_images_differs_by_rounding(optimizer: str) -> None:
    recipe = recipe_of(f"optimizer={optimizer}", "data.mix={mixup: 0.2}", "precision=bf16")
    rows = compared(recipe, compiles=True)
    assert not [name for name, row in rows.items() if row.is_fault]
    assert rows["compile"].result == "rounding"
    assert rows["device batch 4"].result == "rounding"
