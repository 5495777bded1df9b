"""What only a GPU can show: the same numbers as on the CPU, and no wait for the device.

`make bench-gpu` runs these before it measures anything.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch import load_recipe, run
from largebatch.backends.groups import constant
from largebatch.backends.reducer import Reducer
from largebatch.backends.serial import Serial
from largebatch.lars import LARS
from largebatch.norm import with_span

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA GPU; make bench-gpu runs these on one"
)

DIGITS = Path(__file__).parent.parent / "recipes" / "digits_96.yaml"
SHORT = ["duration.epochs=8", "schedule.warmup.epochs=1", "polish=null", "evaluation={}"]
CONVENTIONS = ("reference", "scaled-momentum", "outside", "fujitsu")
SHAPES = ((64, 3, 7, 7), (64,), (512, 64, 3, 3), (1000, 512), (1,), (3, 5))


def weights_and_gradients(device: str, dtype: torch.dtype) -> tuple[list[nn.Parameter], list[Any]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]

    weights = [nn.Parameter(value.to(device, dtype)) for value in draw()]
    return weights, [[value.to(device, dtype) for value in draw()] for _ in range(5)]


def lars(device: str, dtype: torch.dtype, convention: Any) -> list[nn.Parameter]:  # noqa: ANN401 -- a Literal
    """Make five steps at five rates without one wait for the device."""
    weights, gradients = weights_and_gradients(device, dtype)
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.05},
        {"params": [w for w in weights if w.ndim <= 1], "adapt": False},
    ]
    optimizer = LARS(groups, lr=2.0, momentum=0.9, eta=0.02, convention=convention)
    for number, (step, lr) in enumerate(zip(gradients, (0.4, 2.0, 1.1, 0.0, 0.3), strict=True)):
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = lr
        watched = device == "cuda" and number > 0  # the first step copies a table to the device
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return weights


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"]
)
def test_lars_on_the_gpu_is_lars_on_the_cpu(
    convention: str, dtype: torch.dtype, tolerance: float
) -> None:
    ours = [weight.detach().cpu() for weight in lars("cuda", dtype, convention)]
    expected = [weight.detach() for weight in lars("cpu", dtype, convention)]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ghost_groups_on_the_gpu_are_batchnorm_group_by_group(
    layout: torch.memory_format, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(24, 16, 9, 9, generator=generator) * 3 + 1).to("cuda", dtype)
    x = x.contiguous(memory_format=layout)
    slope = torch.randn(x.shape, generator=generator).to("cuda", dtype)
    plain = nn.BatchNorm2d(16).cuda()
    ghost = with_span(nn.Sequential(nn.BatchNorm2d(16)).cuda(), 8)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    out = ghost(ours)
    expected = torch.cat([plain(part) for part in theirs.split(8)])
    (out * slope).sum().backward()
    (expected * slope).sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)


class Twice(Serial):
    """One of two workers that hold the same."""

    world_size = 2

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- as Serial's
        tensor.mul_(2)
        return super().all_reduce(tensor)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_channels_last_gradients_are_summed_in_their_layout(dtype: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).cuda()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    x = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    model(x).square().mean().backward()
    alone = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    workers = Twice(torch.device("cuda"))
    with Reducer(model.named_parameters(), workers, grouping=constant(2), dtype=dtype) as reducer:
        for _ in range(2):
            reducer.zero()
            reducer.arm()
            model(x).square().mean().backward()
            reducer.wait()
        for weight, expected in zip(model.parameters(), alone, strict=True):
            assert weight.grad is not None
            assert expected is not None
            assert weight.grad.stride() == weight.stride()
            rounding = 1e-5 if dtype is None else torch.finfo(dtype).eps
            torch.testing.assert_close(weight.grad, 2 * expected, rtol=rounding, atol=1e-6)


def test_workers_that_share_a_span_on_the_gpu_normalise_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(12, 4, 5, 5, generator=generator) * 3 + 100).cuda()

    def part(worker: Thread) -> Tensor:
        model = with_span(nn.Sequential(nn.BatchNorm2d(4)).cuda(), 12)
        model[0].group = worker  # type: ignore[assignment]  # a Group
        out: Tensor = model(x.chunk(2)[worker.rank])
        return out

    ours = torch.cat(on_threads(part, workers=2))
    torch.testing.assert_close(ours, nn.BatchNorm2d(4).cuda()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_digits_are_learned_in_every_precision(precision: str, tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS, [*SHORT, f"precision={precision}"])
    summary = run(recipe, out=tmp_path / "run")
    assert summary.top1 is not None
    assert summary.top1 > 0.8
    assert summary.skipped_steps < 10
