"""Compare the updates of LARS and BatchNorm with the memory bandwidth of this device.

    python benchmarks/roofline.py [--rounds 20] [--batch 256] [--seconds 30]

The bandwidth is that of a copy, the peak that of a matrix product in bf16, both measured here in
the same rounds; neither is a figure of a data sheet. The bytes are the least that an operation must
read and write where nothing stays in a cache:

    LARS        28 a parameter in float32: norms read weights and gradients, then these two and the
                momentum are read, and weights and momentum written
    SGD         20 a parameter: no norms
    BatchNorm   16 an element in bf16: forward reads twice (moments, result) and writes once,
                backward reads images and gradients twice (sums, result) and writes once

The layer is the first of ResNet-50 at 224 pixels, 64 channels of 112 x 112, channels last. Writes
benchmarks/results/roofline_<hardware>_<date>.json.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import lars
import torch
from measuring import Step, add_seconds, paired_ratio, spread, take_turns, write
from torch import nn

from largebatch import accelerator
from largebatch.models import build
from largebatch.models.batchnorm import with_span

CHANNELS = 64


def main() -> None:
    """Measure, print a table and write the result."""
    args = arguments()
    device = accelerator.current()
    work = operations(device, args)
    rivals = {name: step for name, (step, _) in work.items()}
    product = "matrix product, bf16"
    rivals[product] = matrix_product(device, args.matrix)
    times = take_turns(rivals, rounds=args.rounds, steps=args.steps, seconds=args.seconds)
    peak = [2 * args.matrix**3 / seconds for seconds in times.pop(product)]
    moved = {name: amount for name, (_, amount) in work.items()}
    bandwidth = [moved["copy"] / seconds for seconds in times["copy"]]
    result: dict[str, Any] = {
        "settings": vars(args),
        "operations a second of a matrix product": spread(peak),
        "bytes": moved,
        "bytes a second": {
            name: spread([moved[name] / seconds for seconds in values])
            for name, values in times.items()
        },
        "share of the bandwidth": {
            name: paired_ratio([moved[name] / seconds for seconds in values], bandwidth)
            for name, values in times.items()
        },
    }
    print(table(result))
    print(write("roofline", " ".join(["python", *sys.argv]), result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps of each rival in a round")
    add_seconds(parser)
    parser.add_argument("--copied", type=int, default=2**30, help="bytes that are copied")
    parser.add_argument("--matrix", type=int, default=8192, help="rows of the matrices")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pixels", type=int, default=112)
    return parser.parse_args()


def operations(device: torch.device, args: argparse.Namespace) -> dict[str, tuple[Step, int]]:
    """Return each operation and the bytes that it must move."""
    source = torch.zeros(args.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    parameters = sum(p.numel() for p in build("resnet50", num_classes=1000).parameters())
    rivals = lars.make_rivals(device)
    elements = args.batch * CHANNELS * args.pixels**2
    layers = {
        "nn.BatchNorm2d": nn.BatchNorm2d(CHANNELS),
        "BatchNorm, one span": spans(args.batch),
        "BatchNorm, two spans": spans(args.batch // 2),
    }
    return {
        "copy": (lambda: target.copy_(source), 2 * args.copied),
        "LARS": (rivals["ours"], 28 * parameters),
        "LARS of timm": (rivals["timm"], 28 * parameters),
        "SGD(fused=True)": (rivals["sgd"], 20 * parameters),
        **{
            name: (passes(layer.to(device), device, args), 16 * elements)
            for name, layer in layers.items()
        },
    }


def spans(span: int) -> nn.Module:
    return with_span(nn.Sequential(nn.BatchNorm2d(CHANNELS)), span)


def passes(layer: nn.Module, device: torch.device, args: argparse.Namespace) -> Step:
    """Return a forward and a backward pass of a layer."""
    shape = (args.batch, CHANNELS, args.pixels, args.pixels)
    images = torch.randn(shape, device=device, dtype=torch.bfloat16)
    images = images.to(memory_format=torch.channels_last).requires_grad_()
    slope = torch.randn_like(images)  # in the layout of the images

    def step() -> None:
        images.grad = None
        layer(images).backward(slope)

    return step


def matrix_product(device: torch.device, rows: int) -> Callable[[], object]:
    """Return a product of two square matrices in bf16, of random numbers as in training."""
    a, b = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def table(result: dict[str, Any]) -> str:
    peak = result["operations a second of a matrix product"]["median"]
    lines = [f"matrix product in bf16: {peak / 1e12:.4g} TFLOP/s"]
    for name, share in result["share of the bandwidth"].items():
        rate = result["bytes a second"][name]["median"] / 1e9
        lines.append(f"{name:>22}: {rate:8.1f} GB/s, {share['median']:.2f} of a copy")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
