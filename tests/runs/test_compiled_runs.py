"""Runs with `execution.compile`: their checkpoints are those of any run, and resume to the bit."""

from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace models, and run PyTorch's kernels in place of inductor's, which is quick."""

    def traces(
        model: Callable[..., Tensor], *, dynamic: bool, **_: object
    ) -> Callable[..., Tensor]:
        return compiles(model, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traces)
    monkeypatch.setitem(models._OURS, "tiny", (Tiny, {}))
    torch._dynamo.reset()
    torch.compiler.set_stance("default")  # workers that were threads of a test may leave another


def recipe(*changes: str) -> Recipe:
    """Return a recipe with two spans in a device batch and two micro-batches in an update."""
    stages = CLEAN, "ema: 0.5", AFFINE, STATISTICS
    sizes = "batch={global_batch: 48, bn_span: 12}", "execution.device_batch=24"
    fixed = "model={name: tiny}", *sizes
    return a_recipe(*stages, changes=(*fixed, *changes))


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_compiled_run_makes_the_updates_of_any_run(tmp_path: Path) -> None:
    """Averages, the affine stage, evaluations and statistics included."""
    before = graphs()
    ours = run(recipe(COMPILED), out=tmp_path / "ours")
    # torch 2.13 makes one for the fewer gradients of the affine stage; nothing else is compiled.
    assert 1 <= graphs() - before <= 2
    plain = run(recipe(), out=tmp_path / "plain")
    assert [stage.name for stage in ours.stages] == [stage.name for stage in plain.stages]
    ours_state, plain_state = (content(tmp_path / name) for name in ("ours", "plain"))
    torch.testing.assert_close(ours_state["model"], plain_state["model"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((COMPILED,), (COMPILED,), id="compiled both times"),
        pytest.param((), (COMPILED,), id="compiled then"),
    ],
)
def test_a_run_is_resumed_whether_it_was_compiled_or_not(
    first: tuple[str, ...], second: tuple[str, ...], tmp_path: Path
) -> None:
    run(recipe(*first), out=tmp_path / "run", max_steps=STEPS)
    run(recipe(*second), out=tmp_path / "run", resume=True)
    run(recipe(*first), out=tmp_path / "whole")
    resumed, whole = content(tmp_path / "run"), content(tmp_path / "whole")
    assert not any("_orig_mod" in name for name in resumed["model"])
    same = 0.0 if first == second else 1e-5
    torch.testing.assert_close(resumed["model"], whole["model"], rtol=0, atol=same)
