"""Compare BatchNorm's layers with PyTorch's, others, and a copy that moves the same bytes.

    python -m benchmarks.speed.roofline [--batches 256 28] [--spans 32 8] [--sweep 40]

A step is a forward and a backward pass in bf16, channels last, of BatchNorm alone, with ReLU, and
with a sum and ReLU, as at the end of a block. In turns:

    ours       the kernels for spans, with one span and with smaller ones
    PyTorch    nn.BatchNorm2d, the sum and F.relu
    compiled   the same by torch.compile, on the first layer only: compiling takes seconds
    cuDNN      its fused graph, where nvidia-cudnn-frontend is installed
    copy       as many bytes as a layer must move where nothing stays in a cache: 8 times the batch,
               11 with the sum

Shares of the bandwidth are the copy's time over a rival's. With --sweep, the kernels' parts, tiles
and warps are tried for that many seconds, and only that. A rival that cannot run is named with its
error. Writes benchmarks/results/roofline_<hardware>_<date>.json, with --sweep sweep_...
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.lars import copy_of
from benchmarks.speed.measuring import (
    Step,
    add_seconds,
    on_device,
    paired_ratio,
    rehearse_kernels,
    spread,
    take_turns,
    write,
)
from benchmarks.speed.resnet50 import prepare
from largebatch import accelerator
from largebatch.distributed.serial import Serial
from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm, Spans, with_span
from largebatch.models.fusion import norm_relu

KINDS = {"BatchNorm": (False, False), "+ ReLU": (True, False), "+ sum + ReLU": (True, True)}
"""True for a ReLU, and for a sum before it."""

LAYERS = ("256x56", "64x112", "512x28", "2048x7")
"""Layers of ResNet-50 at 224 pixels: channels x height, which equals the width."""


class Layer:
    """The tensors of a layer: images, what is added to the result, and the result's gradient."""

    def __init__(self, batch: int, words: str, kind: str, device: torch.device) -> None:
        self.channels, pixels = map(int, words.split("x"))
        self.device, (self.relu, adds) = device, KINDS[kind]
        shape = (3, batch, self.channels, pixels, pixels)
        images, other, self.slope = (
            values.to(memory_format=torch.channels_last)
            for values in torch.randn(shape, device=device, dtype=torch.bfloat16)
        )
        self.images = images.requires_grad_()
        self.other = other.requires_grad_() if adds else None
        self.bytes = (11 if adds else 8) * 2 * images.numel()

    def ours(self, span: int) -> Step:
        """Return a step of a layer with spans."""
        norm: nn.Module = with_span(nn.BatchNorm2d(self.channels), span).to(self.device)
        assert isinstance(norm, SpanBatchNorm)
        spans = Spans(norm, Serial(self.device))  # moments are added up, as in training

        def forward(images: Tensor, other: Tensor | None, owner: Spans = spans) -> Tensor:  # noqa: ARG001 -- kept alive
            result: Tensor = norm_relu(norm, images, other) if self.relu else norm(images)
            return result

        return self._passes(forward)

    def pytorch(self, *, compiled: bool = False) -> Step:
        """Return a step of PyTorch's layer."""
        norm = nn.BatchNorm2d(self.channels).to(self.device)

        def forward(images: Tensor, other: Tensor | None) -> Tensor:
            out: Tensor = norm(images)
            out = out if other is None else out + other
            return F.relu(out, inplace=True) if self.relu else out

        return self._passes(torch.compile(forward, dynamic=False) if compiled else forward)

    def _passes(self, forward: Any) -> Step:  # noqa: ANN401 -- torch.compile's result
        def step() -> None:
            self.images.grad = None
            if self.other is not None:
                self.other.grad = None
            forward(self.images, self.other).backward(self.slope)

        return step

    def cudnn(self) -> Step:
        """Return cuDNN's two fused graphs; the first one keeps the mask of the ReLU."""
        import cudnn

        handle = cudnn.create_handle()
        types = cudnn.data_type
        like = torch.empty_like
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        images = self.images.detach()
        other = self.other
        one = torch.ones(1, self.channels, 1, 1, device=self.device)
        moments = [like(one) for _ in range(4)]
        mask = like(images, dtype=torch.bool)
        number = torch.full((1, 1, 1, 1), 0.1)

        def compiled(build: Callable[..., dict[Any, Tensor]], **inputs: Tensor) -> Step:
            graph = cudnn.pygraph(
                io_data_type=types.BFLOAT16,
                intermediate_data_type=types.FLOAT,
                compute_data_type=types.FLOAT,
                handle=handle,
            )
            names = {name: graph.tensor_like(value) for name, value in inputs.items()}
            pack = {names[name]: value for name, value in inputs.items()}
            for tensor, value in build(graph, names).items():
                kinds = {torch.bool: types.BOOLEAN, torch.float32: types.FLOAT}
                tensor.set_output(True).set_data_type(kinds.get(value.dtype, types.BFLOAT16))
                pack[tensor] = value
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
            size = graph.get_workspace_size() + 1
            space = torch.empty(size, dtype=torch.uint8, device=self.device)
            return lambda: graph.execute(pack, space, handle=handle)

        def forward(graph: Any, names: dict[str, Any]) -> dict[Any, Tensor]:  # noqa: ANN401 -- cuDNN's, untyped
            zero = names.pop("zero")
            added = names.pop("added", None)
            out, *outs = graph.batchnorm(name="norm", **names)
            out = out if added is None else graph.add(name="add", a=out, b=added)
            out = graph.relu(name="relu", input=out)
            positive = graph.cmp_gt(name="mask", input=out, comparison=zero)
            return {**dict(zip(outs, moments, strict=True)), out: like(images), positive: mask}

        def backward(graph: Any, names: dict[str, Any]) -> dict[Any, Tensor]:  # noqa: ANN401 -- as above
            grad = graph.scale(name="drelu", input=names.pop("grad"), scale=names.pop("mask"))
            grad.set_data_type(types.BFLOAT16)
            outs = graph.batchnorm_backward(name="dbn", grad=grad, **names)
            of_added = {} if other is None else {grad: like(images)}
            return of_added | dict(zip(outs, (like(images), like(one), like(one)), strict=True))

        norm = {"input": images, "scale": one, "bias": like(one), "epsilon": number}
        norm |= {"in_running_mean": like(one), "in_running_var": like(one), "momentum": number}
        added = {} if other is None else {"added": other.detach()}
        first = compiled(forward, **norm, zero=torch.zeros_like(images), **added)
        kept = {"mean": moments[0], "inv_variance": moments[1], "scale": one}
        second = compiled(backward, grad=self.slope, mask=mask, input=images, **kept)
        return lambda: (first(), second())


def main() -> None:
    """Measure, print and write the result."""
    args = arguments()
    rehearse_kernels()
    device = accelerator.current()
    if args.sweep:
        result: dict[str, Any] = {"milliseconds": sweep(device, args)}
        name = "sweep"
    else:
        name = "roofline"
        cases = list(product(args.batches, args.layers, KINDS))
        end = time.monotonic() + args.seconds
        result = {"kernels": None}
        for number, (batch, words, kind) in enumerate(cases):
            left = (end - time.monotonic()) / (len(cases) - number)
            layer = Layer(batch, words, kind, device)
            result[f"{batch}x{words} {kind}"] = measured = compare(layer, words, left, args)
            print(f"{batch}x{words} {kind}: {json.dumps(measured['milliseconds'])}", flush=True)
        result["kernels"] = kernels.works(device)
    result["settings"] = vars(args)
    print(json.dumps(result, indent=1))
    print(write(name, result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 28])
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="CHANNELSxHEIGHT")
    parser.add_argument("--spans", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps of each rival in a round")
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile")
    parser.add_argument("--sweep", type=float, default=0, metavar="SECONDS")
    add_seconds(parser)
    return parser.parse_args()


def compare(layer: Layer, words: str, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the rivals on one layer, in turns."""
    batch = len(layer.images)
    made: dict[str, Callable[[], Step]] = {"PyTorch": layer.pytorch}
    for span in (batch, *(span for span in args.spans if span < batch)):
        made["ours" if span == batch else f"ours, span {span}"] = partial(layer.ours, span)
    if args.compiled and words == args.layers[0] and layer.relu:
        made["compiled"] = partial(layer.pytorch, compiled=True)
    if layer.relu and layer.device.type == "cuda" and importlib.util.find_spec("cudnn"):
        made["cuDNN"] = layer.cudnn
    steps, _, failed = prepare(made, layer.device)
    steps["copy"] = copy_of(layer.bytes, layer.device)
    times = take_turns(steps, rounds=args.rounds, steps=args.steps, seconds=seconds)
    pairs = [("ours", name) for name in ("PyTorch", "compiled", "cuDNN")]
    pairs += [(name, "ours") for name in times if name.startswith("ours, ")]
    return {
        "milliseconds": {
            name: round(1000 * spread(values)["median"], 4) for name, values in times.items()
        },
        "ratios": {
            f"{a} / {b}": paired_ratio(times[a], times[b])
            for a, b in pairs
            if a in times and b in times
        },
        "share of the bandwidth": {
            name: paired_ratio(times["copy"], values) for name, values in times.items()
        },
        "device": {
            name: on_device(steps[name], layer.device)
            for name in ("PyTorch", "ours")
            if name in steps
        },
        "failed": failed,
    }


def sweep(device: torch.device, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return milliseconds of the kernels by their numbers of warps, tiles and parts."""
    fused: Any = kernels.batchnorm()
    end = time.monotonic() + args.sweep
    layers = {
        f"{batch}x{words}": Layer(batch, words, "+ sum + ReLU", device)
        for batch in args.batches
        for words in args.layers
    }
    found: dict[str, dict[str, float]] = {name: {} for name in layers}

    def launch(kernel: Any, grid: tuple[int, ...], *given: object, **constants: object) -> None:  # noqa: ANN401 -- Triton is untyped
        kernel[grid](*given, num_warps=warps, **constants)

    accelerator.launch = launch
    for warps, tile in product((8, 4, 16), (2**15, 2**14, 2**16)):
        for parts, (name, layer) in product((264, 132, 528, 1056), layers.items()):
            if time.monotonic() > end:
                return found
            fused.PARTS = parts
            fused.TILE = tile
            step = {"": layer.ours(len(layer.images))}
            times = take_turns(step, rounds=args.rounds, steps=args.steps, seconds=1)[""]
            found[name][f"{warps} warps, tile {tile}, parts {parts}"] = 1000 * min(times)
    return found


if __name__ == "__main__":
    main()
