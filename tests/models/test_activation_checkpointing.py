"""Statistics count each forward pass once, even if backward recomputes layers.

Activation checkpointing (torch.utils.checkpoint; Chen et al. 2016, arXiv:1604.06174) recomputes
layers in the backward pass, while the step's moments are already being summed over the workers.
"""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from interpreted import run_kernels
from threads import Thread, on_threads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.models import kernels
from largebatch.models.batchnorm import Spans, with_span
from largebatch.models.fusion import pair

__all__ = ["run_kernels"]

CPU = Serial(torch.device("cpu"))
Forward = Callable[[nn.Module, Tensor], Tensor]


def plainly(model: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = model(images)
    return out


def recomputed(model: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = checkpoint(model, images, use_reentrant=False)
    return out


def recomputed_by_reentry(model: nn.Module, images: Tensor) -> Tensor:
    out: Tensor = checkpoint(model, images.requires_grad_(), use_reentrant=True)
    return out


every_mode = pytest.mark.parametrize("forward", [recomputed, recomputed_by_reentry])


def net(span: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.BatchNorm2d(5)]
    return with_span(nn.Sequential(*layers).double(), span)


def images(num: int, *, seed: int = 0, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, size, size, dtype=torch.float64, generator=generator) * 3 + 1


def step(
    model: nn.Module,
    backend: Backend,
    batches: list[Tensor],
    forward: Forward,
    *,
    sync_workers: int = 1,
) -> None:
    """Update the statistics like an optimizer step: the sum starts before the last backward."""
    spans = Spans(model, backend, sync_workers=sync_workers)
    for number, batch in enumerate(batches):
        loss = forward(model, batch.clone()).square().sum()
        if number == len(batches) - 1:
            spans.reduce()
        loss.backward()
    spans.update()


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers())


@pytest.mark.parametrize(
    ("forward", "uses_kernels"),
    [
        (recomputed, False),
        (recomputed_by_reentry, False),
        (recomputed, True),
        pytest.param(recomputed_by_reentry, True, marks=pytest.mark.long),
    ],
)
def test_recomputed_layers_count_once_on_one_worker(
    forward: Forward, uses_kernels: bool, request: pytest.FixtureRequest
) -> None:
    ours, expected = net(), net()
    batches = [images(8, seed=seed) for seed in range(3)]
    if uses_kernels:
        request.getfixturevalue("kernels_run")
        batches = [it[..., :3, :4].float() for it in batches[:2]]
        batches = [it.contiguous(memory_format=torch.channels_last) for it in batches]
        assert [pair(it.float()) for it in (ours, expected)] == [(1, 2)] * 2
        assert kernels.take(ours[0](batches[0]))
    step(ours, CPU, batches, forward)
    step(expected, CPU, batches, plainly)
    torch.testing.assert_close(buffers(ours), buffers(expected), rtol=0, atol=0)
    for mine, theirs in zip(ours.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@every_mode
@pytest.mark.parametrize("sync_workers", [1, 2], ids=["own spans", "a span over both"])
def test_recomputed_layers_count_once_on_two_workers(forward: Forward, sync_workers: int) -> None:
    """Each would add its own moments to the sum over both, and keep other statistics."""

    def found(forward: Forward) -> list[dict[str, Tensor]]:
        models = [net(8 * sync_workers) for _ in range(2)]  # one by one: threads share a seed

        def work(worker: Thread) -> dict[str, Tensor]:
            model, backend = models[worker.rank], cast("Backend", worker)
            batches = [images(8, seed=2 * micro + worker.rank) for micro in range(2)]
            step(model, backend, batches, forward, sync_workers=sync_workers)
            return buffers(model)

        return on_threads(work, workers=2)

    ours, expected = found(forward), found(plainly)
    torch.testing.assert_close(ours[0], ours[1], rtol=0, atol=0)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-12, atol=1e-12)


def test_a_forward_pass_after_the_sum_started_counts_for_the_next_step() -> None:
    ours, expected = net(), net()
    first, second = images(8), images(8, seed=1)
    spans = Spans(ours, CPU)
    ours(first)
    spans.reduce()
    ours(second)
    spans.update()
    spans.reduce()
    spans.update()
    for batch in (first, second):
        step(expected, CPU, [batch], plainly)
    torch.testing.assert_close(buffers(ours), buffers(expected), rtol=1e-12, atol=1e-12)
