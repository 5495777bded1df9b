"""Runs with `execution.compile`: their checkpoints are those of any run, and resume to the bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import AFFINE, CLEAN, STATISTICS, a_recipe, content
from torch import Tensor, nn

from largebatch import models, run
from largebatch.recipe.recipe import Recipe

COMPILED = "execution.compile=true"
STEPS = 4

compiles = torch.compile

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


class Tiny(nn.Sequential):
    """Two convolutions with BatchNorm."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.extend([nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2)])
        self.extend([nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, num_classes)])


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    """Trace models, and run PyTorch's kernels in place of inductor's, which is quick."""

    def traces(
        model: Callable[..., Tensor], *, dynamic: bool, **_: object
    ) -> Callable[..., Tensor]:
        return compiles(model, dynamic=dynamic, backend="aot_eager")

    torch._dynamo.reset()
    torch.compiler.set_stance("default")  # workers that were threads of a test may leave another
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", traces)
        patch.setitem(models._OURS, "tiny", (Tiny, {}))
        yield


def recipe(*changes: str) -> Recipe:
    """Return a recipe with two spans in a device batch and two micro-batches in an update."""
    stages = CLEAN, "ema: 0.5", AFFINE, STATISTICS
    sizes = "batch={global_batch: 48, bn_span: 12}", "execution.device_batch=24"
    fixed = "model={name: tiny}", *sizes
    return a_recipe(*stages, changes=(*fixed, *changes))


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@dataclass(frozen=True)
class Whole:
    """A run that was not stopped."""

    stages: list[str]
    state: dict[str, Any]
    graphs: int


def train_whole(folder: Path, *changes: str) -> Whole:
    before = graphs()
    summary = run(recipe(*changes), out=folder)
    stages = [stage.name for stage in summary.stages]
    return Whole(stages, content(folder), graphs() - before)


@pytest.fixture(scope="module")
def compiled(traced: None, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return train_whole(tmp_path_factory.mktemp("compiled"), COMPILED)


@pytest.fixture(scope="module")
def plain(traced: None, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return train_whole(tmp_path_factory.mktemp("plain"))


def test_a_compiled_run_makes_the_updates_of_any_run(compiled: Whole, plain: Whole) -> None:
    """Averages, the affine stage, evaluations and statistics included."""
    # torch 2.13 makes one for the fewer gradients of the affine stage; nothing else is compiled.
    assert 1 <= compiled.graphs <= 2
    assert plain.graphs == 0
    assert compiled.stages == plain.stages
    torch.testing.assert_close(compiled.state["model"], plain.state["model"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "same"),
    [
        pytest.param((COMPILED,), 0.0, id="compiled both times"),
        pytest.param((), 1e-5, id="compiled then", marks=pytest.mark.long),
    ],
)
def test_a_run_is_resumed_whether_it_was_compiled_or_not(
    first: tuple[str, ...], same: float, compiled: Whole, plain: Whole, tmp_path: Path
) -> None:
    run(recipe(*first), out=tmp_path / "run", max_steps=STEPS)
    run(recipe(COMPILED), out=tmp_path / "run", resume=True)
    resumed = content(tmp_path / "run")
    whole = compiled if first else plain
    assert not any("_orig_mod" in name for name in resumed["model"])
    torch.testing.assert_close(resumed["model"], whole.state["model"], rtol=0, atol=same)
