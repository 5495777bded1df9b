"""Measure the cost of BatchNorm spans: forward and backward of a network with and without them.

    python -m benchmarks.speed.norm [--model resnet50] [--batch 64] [--spans 64 32 16 8]

In every round each kind of normalisation goes once; the ratios are of the same round. For --layers
(channels x height) with ReLU, one launch of our kernels is compared with two, and the choice that
they would make, forward and backward, is recorded: WHOLE of
largebatch/models/kernels/batchnorm_launches.py.
"""

import argparse
import copy
import time
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.measuring import (
    Step,
    add_seconds,
    paired_ratio,
    rehearse_kernels,
    spread,
    take_turns,
    write,
)
from benchmarks.speed.roofline import Layer
from largebatch import accelerator
from largebatch.models import build, kernels
from largebatch.models.batchnorm import with_span

TARGET = 1.10


def passes(model: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """Return one forward and backward pass."""

    def once() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(images), labels).backward()

    return once


def launches(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the ratio of one launch to two for each layer and span, and what the rule chooses."""
    rehearse_kernels()
    fused: Any = kernels.batchnorm()
    cases = list(product(args.layers, args.layer_spans))
    end = time.monotonic() + args.seconds
    found = {}

    def step(*, whole: bool) -> Step:
        own = layer.ours(span)

        def once() -> None:
            fused.WHOLE = whole
            own()

        return once

    for number, (words, span) in enumerate(cases):
        left = (end - time.monotonic()) / (len(cases) - number)
        layer = Layer(args.batch, words, "+ ReLU", device)
        rivals = {"one launch": step(whole=True), "two launches": step(whole=False)}
        times = take_turns(rivals, rounds=args.rounds, steps=5, seconds=left)
        fused.WHOLE = None
        found[f"{words}, span {span}"] = case = {
            "milliseconds": {name: 1000 * spread(times[name])["median"] for name in times},
            "one launch / two launches": paired_ratio(*times.values()),
            "chosen": [
                fused._Shape.of(layer.images, span, tensors=tensors).whole for tensors in (1, 2)
            ],
        }
        print(f"{words}, span {span}: {case}", flush=True)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--spans", type=int, nargs="+", default=[64, 32, 16, 8])
    parser.add_argument("--layers", nargs="*", default=[], metavar="CHANNELSxHEIGHT")
    parser.add_argument("--layer-spans", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    add_seconds(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table and write the result."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = accelerator.current()
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    plain = build(args.model, num_classes=1000).to(device)
    plain.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs
    images = torch.randn(args.batch, 3, args.size, args.size, device=device)
    images = images.to(memory_format=layout)
    labels = torch.randint(1000, (args.batch,), device=device)
    models = {"nn.BatchNorm2d": plain}
    models |= {f"span {span}": with_span(copy.deepcopy(plain), span) for span in args.spans}
    rivals: dict[str, Step] = {
        name: passes(model, images, labels) for name, model in models.items()
    }
    with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        seconds = take_turns(rivals, rounds=args.rounds, steps=1, seconds=args.seconds)

    baseline = seconds.pop("nn.BatchNorm2d")
    result = {
        "settings": {**vars(args), "device": str(device)},
        "target": f"span / nn.BatchNorm2d at most {TARGET}",
        "nn.BatchNorm2d": {"seconds": spread(baseline)},
    }
    print(f"{'nn.BatchNorm2d':>15}  {spread(baseline)['median']:.3f} s")
    for name, times in seconds.items():
        ratio = paired_ratio(times, baseline)
        result[name] = {"seconds": spread(times), "to nn.BatchNorm2d": ratio}
        print(
            f"{name:>15}  {spread(times)['median']:.3f} s  x {ratio['median']:.3f} "
            f"({ratio['low']:.3f} to {ratio['high']:.3f}, n = {ratio['n']})"
        )
    result["layers"] = launches(args, device) if args.layers else {}
    print(write("norm", result))


if __name__ == "__main__":
    main()
