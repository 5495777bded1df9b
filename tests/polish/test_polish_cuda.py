"""Polishing on a GPU: the moments of float64, and one wait per layer and pass.

`make bench-gpu` runs these before it measures anything.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from polish_reference import assert_right, moments_of, norms
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.models import build
from largebatch.polish.statistics import polish
from largebatch.training import evaluate

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA GPU; make bench-gpu runs these on one"
)

GPU = Serial(torch.device("cuda"))


def polish_and_compare(
    model: nn.Module, sizes: list[int], *, layout: torch.memory_format, rel: float
) -> None:
    """Compare with float64 moments of each layer's inputs."""
    torch.manual_seed(0)
    model.to(GPU.device, memory_format=layout)  # type: ignore[call-overload]  # torch's stubs
    parts = [torch.randn(size, 3, 64, 64, device=GPU.device) for size in sizes]
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in norms(model)}
    for name, layer in norms(model):
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: seen[name].append(inputs[0].cpu())
        )
    polish(model, [(part.to(memory_format=layout), part) for part in parts], GPU)
    assert_right(model.cpu(), {name: moments_of(values) for name, values in seen.items()}, rel=rel)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["float32", "autocast"])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_gpu_matches_float64_moments(
    kind: str, layout: torch.memory_format, offset: float
) -> None:
    model = build("resnet18", num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.full((module.out_channels,), offset))
    with torch.autocast("cuda", torch.float16, enabled=kind == "autocast"):
        polish_and_compare(model, [16, 7, 32], layout=layout, rel=1e-6)


@pytest.mark.parametrize("library", ["gloo", "cpu:gloo", "nccl"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_any_process_group_works_with_a_model_on_any_device(
    library: str, device: str, tmp_path: Path
) -> None:
    """Images come from the CPU; sums go to where the group can send them, and back."""
    images = torch.randn(8, 3, 4, 4)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()).to(device)
    dist.init_process_group(library, init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        polish(model, [images])
        metrics = evaluate(model, [{"image": images, "label": torch.arange(8)}], expected=8)
    finally:
        dist.destroy_process_group()
    assert metrics.samples == 8
    assert_right(model.cpu(), {"0": moments_of([images])}, rel=1e-6)


def test_only_the_first_batch_waits_for_a_gpu() -> None:
    model = build("resnet18", num_classes=10).to(GPU.device)
    images = torch.randn(8, 3, 64, 64, device=GPU.device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield images, images
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(40):  # after 31 of them batches are merged
            yield images, images
        torch.cuda.set_sync_debug_mode("default")

    try:
        polish(model, batches(), GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
