"""Compare train() on ResNet-50 at 224 pixels in bf16 with timm's training loop and a plain one.

    python -m benchmarks.speed.resnet50 [--rounds 20] [--steps 10] [--batch 256] [--seconds 300]
        [--modes default] [--prepares 90]

    ours     train() with LARS, a BatchNorm span of the whole batch, in pairs with what follows it;
             compiled in each of the modes; each of these also as one CUDA graph an update
    timm     the loop of timm's train.py with its model, loss and Lars; compiled in the first mode
    plain    nn.BatchNorm2d and SGD(fused=True): no norms; also in a graph captured by hand
    floor    plain without BatchNorm and ReLU: convolutions, pooling and the update

All are channels last, under autocast, with label smoothing 0.1 and convolutions chosen by trial, on
a batch on the device. timm's loop reads the loss every 50 updates, as it does by default,
and waits for nothing else. The memory is the most that a rival takes of the device by itself in its
first updates: weights, gradients, momentum and activations. The share of the peak is counted in
operations of the model, forward and backward, against a matrix product measured in the same rounds.
Of each rival, the time of the device in an update, its launches and its slowest kernels are
recorded. A rival that cannot run is named with its error, and the command fails when the others are
measured; none is prepared later than --prepares seconds after the start. Without a GPU nothing is
captured: graphs are then the steps themselves.
Writes benchmarks/results/<name>_<hardware>_<date>.json.
"""

import argparse
import functools
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.measuring import (
    WARM_UP,
    Step,
    add_seconds,
    in_graph,
    on_device,
    paired_ratio,
    rehearse_kernels,
    spread,
    take_turns,
    write,
)
from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.models import build, param_groups
from largebatch.models.batchnorm import Spans, with_span
from largebatch.models.compiled import compile_model
from largebatch.models.fusion import pair
from largebatch.optim.lars import LARS
from largebatch.optional import require_timm
from largebatch.recipe.choices import Compile
from largebatch.training.graph import GraphedStep
from largebatch.training.loop import EagerStep, cross_entropy, step_seeds, train

LR = 0.1
MOMENTUM = 0.9
DECAY = 5e-5
SMOOTHING = 0.1
LOG_INTERVAL = 50
"""Number of updates between two readings of the loss in timm's loop."""

IMAGE_BYTES = 2**28
"""Device memory per image, over-allocated: about 90 MB are needed."""

PRODUCT = "matrix product"

Data = tuple[Tensor, Tensor]


def main() -> None:
    """Measure, print and write the result."""
    args = arguments()
    rehearse_kernels()
    torch.backends.cudnn.benchmark = True  # as in train.py of timm
    device = accelerator.current()
    data = synthetic(device, args)
    plain(args.model, data)()  # convolutions are chosen, and what that takes is no rival's memory
    steps, memory, failed = prepare(rivals(data, args), device, seconds=args.prepares)
    steps[PRODUCT] = matrix_product(device, args.matrix)
    times = take_turns(steps, rounds=args.rounds, steps=args.steps, seconds=args.seconds)
    product = times.pop(PRODUCT)
    peak = [2 * args.matrix**3 / seconds for seconds in product]
    work = args.batch * operations_per_image(network(args.model, device), data[0][:2])
    compared = pairs(args.modes)
    of_device = {name: on_device(steps[name], device) for name in times}
    result: dict[str, Any] = {
        "settings": vars(args),
        "images a second": {
            name: spread([args.batch / seconds for seconds in values])
            | paired_ratio([args.batch] * len(values), values)
            for name, values in times.items()
        },
        "ratios": {
            f"{ours} / {theirs}": paired_ratio(times[ours], times[theirs])
            for ours, theirs in compared
            if ours in times and theirs in times
        },
        "operations an image": work / args.batch,
        "operations a second of a matrix product": spread(peak),
        "share of the peak": {
            name: paired_ratio([work / seconds for seconds in values], peak)
            for name, values in times.items()
        },
        "peak memory in bytes": memory,
        "ratios of peak memory": {
            f"{ours} / {theirs}": paired_ratio([memory[ours]], [memory[theirs]])
            for ours, theirs in compared
            if memory.get(ours) and memory.get(theirs)
        },
        "device": of_device,
        "ratios of device time": {
            f"{ours} / {theirs}": paired_ratio([a["milliseconds"]], [b["milliseconds"]])
            for ours, theirs in compared
            if (a := of_device.get(ours)) and (b := of_device.get(theirs))
        },
        "failed": failed,
    }
    print(json.dumps(result, indent=1))
    print(write(args.name, result))
    if failed:
        sys.exit(f"could not run: {', '.join(failed)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="updates of each rival in a round")
    add_seconds(parser)
    parser.add_argument("--batch", type=int, default=default_batch())
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--modes", nargs="*", default=["default"])
    parser.add_argument("--prepares", type=float, default=math.inf, help="seconds to compile in")
    parser.add_argument("--matrix", type=int, default=8192, help="rows of the matrices")
    parser.add_argument("--name", default="resnet50", help="name of the result")
    return parser.parse_args()


def default_batch() -> int:
    """Return 256, or the largest power of two that fits the device's memory."""
    memory = accelerator.memory_bytes() if accelerator.count() else 2**34
    return min(256, 1 << max(0, (memory // IMAGE_BYTES).bit_length() - 1))


def pairs(modes: list[str]) -> list[tuple[str, str]]:
    """Return the names of the rivals."""
    found = [("ours", "timm"), ("ours", "plain"), ("timm", "plain")]
    found += [("ours, graph", other) for other in ("ours", "plain", "plain, graph")]
    for mode in modes:
        compiled = f"ours, compiled: {mode}"
        timms = f"timm, compiled: {modes[0]}"
        found += [(compiled, other) for other in ("ours", "timm", timms)]
        found += [(f"{compiled}, graph", other) for other in ("plain", "plain, graph", timms)]
    return found


def synthetic(device: torch.device, args: argparse.Namespace) -> Data:
    """Return a batch on the device."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.batch, 3, args.pixels, args.pixels, generator=generator)
    labels = torch.randint(1000, (args.batch,), generator=generator)
    return images.to(device, memory_format=torch.channels_last), labels.to(device)


def rivals(data: Data, args: argparse.Namespace) -> dict[str, Callable[[], Step]]:
    """Return a builder of each rival's step, on its own model."""
    made: dict[str, Callable[[], Step]] = {
        "plain": functools.partial(plain, args.model, data),
        "plain, graph": lambda: in_graph(plain(args.model, data), data[0].device),
        "floor": functools.partial(plain, args.model, data, bare=True),
        "timm": functools.partial(timms, args.model, data),
        "ours": functools.partial(ours, args.model, data),
        "ours, graph": functools.partial(ours, args.model, data, graph=True),
    }
    for mode in args.modes:
        name = f"ours, compiled: {mode}"
        build_step = functools.partial(ours, args.model, data, mode)
        made |= {name: build_step, f"{name}, graph": functools.partial(build_step, graph=True)}
    for mode in args.modes[:1]:
        made[f"timm, compiled: {mode}"] = functools.partial(timms, args.model, data, mode)
    return made


def prepare(
    made: dict[str, Callable[[], Step]], device: torch.device, *, seconds: float = math.inf
) -> tuple[dict[str, Step], dict[str, float], dict[str, str]]:
    """Return the working steps, their peak memory, and the errors of the others."""
    steps: dict[str, Step] = {}
    memory: dict[str, float] = {}
    failed: dict[str, str] = {}
    end = time.monotonic() + seconds
    for name, make in made.items():
        if time.monotonic() > end:
            failed[name] = f"not prepared in the first {seconds:g} seconds"
            continue
        gc.collect()  # what the rival before it has left
        before = allocated(device)
        try:
            step = make()
            for _ in range(WARM_UP):
                step()
            accelerator.synchronize(device)
        except Exception as error:  # compilers raise their own
            failed[name] = str(error).partition("\n")[0]
            continue
        steps[name] = step
        if accelerator.is_remote(device):
            memory[name] = accelerator.peak_memory_bytes(device) - before
    return steps, memory, failed


def allocated(device: torch.device) -> int:
    """Return the current memory of tensors on an accelerator, and reset its peak."""
    if not accelerator.is_remote(device):
        return 0
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def ours(name: str, data: Data, mode: str | None = None, *, graph: bool = False) -> Step:
    """Return an update of train(), as in a recipe."""
    images, labels = data
    backend = Serial(images.device)
    model = with_span(network(name, images.device), len(images))
    pair(model)
    model.forward = torch.autocast(images.device.type, torch.bfloat16)(model.forward)
    if mode is not None:
        chosen = cast("Compile", True if mode == "default" else mode)
        compile_model(model, chosen, images.device, shares_spans=False)
    groups = param_groups(model, weight_decay=DECAY)
    kind = GraphedStep if graph and images.device.type in accelerator.GRAPHS else EagerStep
    step = kind(
        model,
        LARS(groups, lr=LR, momentum=MOMENTUM),
        cross_entropy(smoothing=SMOOTHING, off_target="all"),
        Reducer(model.named_parameters(), backend),
        Spans(model, backend),
        global_batch=len(images),
    )
    updates = train(
        step,
        itertools.repeat(Batch(images, labels)),
        lambda _: LR,
        steps=range(10**9),
        accumulation=1,
        seed=step_seeds(0, 0),
    )
    return lambda: next(updates)


def timms(name: str, data: Data, mode: str | None = None) -> Step:
    """Return an update of the loop of timm's train.py: --amp-dtype bfloat16 --channels-last."""
    require_timm()
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter

    images, labels = data
    model = network(name, images.device).train()
    optimizer = create_optimizer_v2(model, opt="lars", lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    loss_fn = LabelSmoothingCrossEntropy(SMOOTHING)
    losses = AverageMeter()
    number = itertools.count(1)
    forward = model if mode is None else torch.compile(model, mode=mode)

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = loss_fn(forward(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if next(number) % LOG_INTERVAL == 0:
            losses.update(loss.item(), len(images))

    return step


def plain(name: str, data: Data, *, bare: bool = False) -> Step:
    """Return the training step of a PyTorch tutorial; `bare` without BatchNorm and ReLU."""
    images, labels = data
    model = network(name, images.device).train()
    if bare:
        remove_layers(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=True
    )

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)
        loss.backward()
        optimizer.step()

    return step


@torch.no_grad()
def remove_layers(model: nn.Module) -> None:
    """Remove BatchNorm and ReLU; smaller weights keep values from growing layer by layer."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d | nn.ReLU):
                setattr(module, name, nn.Identity())
    for weight in model.parameters():
        weight.mul_(0.5)


def matrix_product(device: torch.device, rows: int) -> Callable[[], object]:
    """Return a product of two square matrices in bf16, of random numbers as in training."""
    a, b = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product)


def network(name: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = build(name, num_classes=1000).to(device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    return model


def operations_per_image(model: nn.Module, images: Tensor) -> float:
    """Return the floating-point operations of convolutions and matrix products, both passes."""
    model.train()
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return float(counter.get_total_flops()) / len(images)


if __name__ == "__main__":
    main()
