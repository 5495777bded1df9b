"""What is monitored is right, costs no other weights, and is there for the report and trackers."""

import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from short_runs import DIGITS, HALF, NARROW, SHALLOW, SMALL, log, weights
from test_optimizers import CHANGES
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from largebatch import load_recipe, run
from largebatch.optim.clipping import gradient_norm
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.environment import Sampler
from largebatch.tracking.events import SYSTEM
from largebatch.training.step_log import Monitors

NO_BIT = "gradient_norm, trust_ratios, system, generalization_gap"
ALL = f"monitor=[noise_scale, {NO_BIT}]"
SHORT = (
    *("duration={steps: 4}", "schedule.warmup=null", "evaluation={}"),
    *(*SMALL, NARROW, SHALLOW),
)
POLISH = "polish={clean: {steps: 1}, affine: {steps: 2, lr: 0.05}}"


def a_recipe(*changes: str) -> Recipe:
    return load_recipe(DIGITS, [*SHORT, POLISH, *changes])


def test_the_norm_of_the_gradients_is_that_of_float64() -> None:
    """Ten million equal numbers, which sums in float32 get wrong; and squares that overflow."""
    for value in (0.1, 1e25):
        model = nn.ParameterList([torch.zeros(10_000_000), torch.zeros(4, 6), torch.zeros(5)])
        model[0].grad = torch.full((10_000_000,), value)
        model[1].grad = torch.full((6, 4), -value).t()
        expected = np.float32(value).astype(np.float64) * math.sqrt(10_000_024)
        assert gradient_norm(model.parameters()).item() == pytest.approx(expected, rel=1e-6)


def test_monitors_change_no_bit_of_the_weights_and_leave_their_records(tmp_path: Path) -> None:
    run(a_recipe(), out=tmp_path / "without")
    run(a_recipe(ALL), out=tmp_path / "with")
    run(a_recipe("execution.device_batch=48"), out=tmp_path / "divided")  # as noise_scale divides
    run(a_recipe(f"monitor=[{NO_BIT}]"), out=tmp_path / "others")
    for one, two in (("with", "divided"), ("others", "without")):
        both = weights(tmp_path / one), weights(tmp_path / two)
        torch.testing.assert_close(*both, rtol=0, atol=0)
    for folder in ("without", "divided"):
        assert not log(tmp_path / folder, "system")
        for step in log(tmp_path / folder, "step"):
            assert step["gradient_norm"] is None
            assert step["trust_ratios"] == []
    gaps = log(tmp_path / "others", "generalization_gap")
    assert [gap["stage"] for gap in gaps] == ["train", "clean", "affine"]
    (start,) = log(tmp_path / "with", "start")
    steps = log(tmp_path / "with", "step")
    assert start["layers"][0] == "conv1.weight"
    assert "fc.weight" in start["layers"]
    assert not [name for name in start["layers"] if "bn" in name or "bias" in name]
    assert [step["stage"] for step in steps] == ["train"] * 3 + ["clean"] + ["affine"] * 2
    for step in steps:
        square = step["global_square"]
        if step["stage"] != "affine":
            assert step["gradient_norm"] == pytest.approx(math.sqrt(square), rel=1e-5)
            assert len(step["trust_ratios"]) == len(start["layers"])
            assert all(ratio > 0 for ratio in step["trust_ratios"])
        else:
            assert step["gradient_norm"] > 0
            assert step["trust_ratios"] == []


def test_a_run_reports_the_ratios_and_the_norm_of_its_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the formula gives for the weights and gradients that the update began with."""
    from largebatch.optim import lars

    seen: dict[str, Any] = {}
    original = lars.LARS.step

    def step(self: lars.LARS, closure: None = None) -> float | None:
        if not seen:
            groups = self.param_groups
            seen["all"] = [w.grad.double().numpy() for group in groups for w in group["params"]]
            seen["pairs"] = [
                (weight.detach().double().numpy().copy(), weight.grad.double().numpy().copy())
                for group in groups
                if group["adapt"]
                for weight in group["params"]
            ]
            seen["norm"] = math.sqrt(sum(float((grad**2).sum()) for grad in seen["all"]))
        return original(self, closure)

    monkeypatch.setattr(lars.LARS, "step", step)
    recipe = a_recipe("monitor=[gradient_norm, trust_ratios]", "duration={steps: 1}", "polish=null")
    run(recipe, out=tmp_path / "run")
    (record,) = log(tmp_path / "run", "step")
    section: Any = recipe.optimizer
    expected = []
    for weight, grad in seen["pairs"]:
        w, g = np.linalg.norm(weight), np.linalg.norm(grad)
        ratio = section.eta * w / (g + section.weight_decay * w + section.eps)
        expected.append(ratio if g > 0 else 1.0)  # where a block begins as the identity
    assert len(set(expected)) > 2
    assert record["trust_ratios"] == pytest.approx(expected, rel=1e-4)  # five digits
    assert record["gradient_norm"] == pytest.approx(seen["norm"], rel=1e-6)


def test_an_update_that_is_skipped_used_no_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from largebatch.distributed.reducer import Reducer

    finite, calls = Reducer.finite, iter(range(99))

    def once_not(self: Reducer, *_: object) -> torch.Tensor:
        return finite(self) & (next(calls) != 1)

    monkeypatch.setattr(Reducer, "finite", once_not)
    changes = ("monitor=[trust_ratios]", "nonfinite={action: skip}", "polish=null")
    run(a_recipe(*changes), out=tmp_path / "run")
    found = [len(step["trust_ratios"]) > 0 for step in log(tmp_path / "run", "step")]
    assert found == [True, False, True, True]


@pytest.mark.parametrize("changes", [*CHANGES.values(), HALF], ids=[*CHANGES, "fp16"])
def test_the_norm_is_that_of_the_gradient_that_the_optimizer_gets(
    changes: tuple[str, ...], tmp_path: Path
) -> None:
    """Whatever the optimizer then writes there, and without the scale of the loss."""
    seen: list[float] = []
    whole: list[int] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        every = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        whole.append(len(every))
        if len(every) < whole[0]:  # what an optimizer like Muon calls for some of its weights
            return
        squares = [float(grad.double().square().sum()) for grad in every if grad is not None]
        norm = math.sqrt(sum(squares))
        if norm not in seen:  # torch calls it twice where a class of optimizers was made before
            seen.append(norm)

    short = ("duration={steps: 3}", "polish=null", "batch.global_batch=48", *changes)
    decayed = "optimizer.weight_decay=0.1"
    hook = register_optimizer_step_pre_hook(look)
    try:
        run(a_recipe("monitor=gradient_norm", *short, decayed), out=tmp_path / "run")
    finally:
        hook.remove()
    found = [step["gradient_norm"] for step in log(tmp_path / "run", "step")]
    made = [norm for norm in found if norm is not None]  # not where fp16 overflowed
    assert len(made) == len(seen) >= 1
    assert made == pytest.approx(seen, rel=1e-6)


def test_every_worker_fills_its_own_row_of_the_sum() -> None:
    recipe = load_recipe(DIGITS, ["monitor=system", "duration={steps: 600}"])
    plan, state = make_plan(recipe, workers=3), SimpleNamespace()
    workers = [SimpleNamespace(rank=r, world_size=3, device=torch.device("cpu")) for r in range(3)]
    monitors: list[Any] = [Monitors(recipe.monitor, plan, worker, state) for worker in workers]  # type: ignore[arg-type]  # what it reads of them
    rows = np.array([one.sample(3) for one in monitors]).reshape(3, 3, len(SYSTEM))
    memory = rows[:, :, SYSTEM.index("memory_bytes")]
    assert (np.diag(memory) > 2**26).all()
    assert not (memory - np.diag(np.diag(memory))).any()
    assert [len(monitors[0].sample(step)) for step in range(1, 4)] == [0, 0, 3 * len(SYSTEM)]


def test_what_a_worker_uses_is_what_psutil_counts() -> None:
    sampler = Sampler(torch.device("cpu"))
    started = time.perf_counter()
    begun = psutil.Process().cpu_times()
    total = 0.0
    while psutil.Process().cpu_times().user - begun.user < 0.3:
        total += sum(range(10_000))
    found = dict(zip(SYSTEM, sampler.read(), strict=True))
    ended = psutil.Process().cpu_times()
    used = ended.user + ended.system - begun.user - begun.system
    # Both count the same work; other programs may make its time long.
    expected = 100 * used / (time.perf_counter() - started)
    assert found["cpu_percent"] == pytest.approx(expected, rel=0.3)
    assert found["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert math.isnan(found["gpu_percent"])
