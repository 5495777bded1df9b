"""Compare one LARS update of ResNet-50's 161 tensors with its rivals, in turns.

    python -m benchmarks.speed.lars [--rounds 100] [--threads 2] [--seconds 60]

    ours     optim.lars.LARS, as a recipe uses it; on CUDA also with apex, where it is installed,
             and SGD without norms by the same table
    timm     timm.optim.lars.Lars
    sgd      torch.optim.SGD(fused=True): no norms
    copy     on a GPU: a copy that moves 28 bytes a parameter, as an update must: the norms read
             weights and gradients, then these and the momentum are read, and two are written

All have float32 weights of timm's ResNet-50, random gradients, momentum and weight decay. On a GPU
(where there is one) the time is until the device has finished. Writes
benchmarks/results/lars_<hardware>_<date>.json.
"""

import argparse
import functools
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.speed.measuring import (
    WARM_UP,
    Step,
    add_seconds,
    on_device,
    paired_ratio,
    spread,
    take_turns,
    write,
)
from largebatch import accelerator
from largebatch.models import build, param_groups
from largebatch.optim.lars import LARS
from largebatch.optim.sgd import TabledSGD, build_sgd
from largebatch.optional import require_torchvision

LR = 0.1
MOMENTUM = 0.9
DECAY = 5e-5
ETA = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    add_seconds(parser)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = accelerator.current()
    rivals = make_rivals(device)
    if accelerator.is_remote(device):
        rivals["copy"] = copy_of(
            28 * sum(w.numel() for group in groups(device) for w in group["params"]), device
        )
    times = measure(rivals, rounds=args.rounds, seconds=args.seconds)
    result: dict[str, Any] = {
        "n": len(times["ours"]),
        "warm_up": WARM_UP,
        "threads": args.threads,
        "device": str(device),
        "milliseconds": {name: spread(values) for name, values in times.items()},
        "ratios": {
            f"{ours} / {theirs}": paired_ratio(times[ours], times[theirs])
            for ours in times
            for theirs in times
            if ours.startswith("ours") and not theirs.startswith("ours")
        },
    }
    if accelerator.is_remote(device):
        measured = {name: on_device(step, device) for name, step in rivals.items()}
        result["device"] = measured
        result["share of the bandwidth"] = {
            name: paired_ratio([measured["copy"]["milliseconds"]], [of_rival["milliseconds"]])
            for name, of_rival in measured.items()
            if of_rival and measured["copy"]
        }
    if has_apex():
        result["apex"] = Path(os.environ.get("APEX_SOURCES", "installed")).name
    else:
        result["not installed"] = ["apex"]
    print(write("lars", result))
    medians = {name: values["median"] for name, values in result["milliseconds"].items()}
    print(json.dumps({"milliseconds": medians, "ratios": result["ratios"]}, indent=2))


def make_rivals(device: torch.device) -> dict[str, Step]:
    """Return each rival's step, on its own model."""
    require_torchvision()
    from timm.optim.lars import Lars

    ours = functools.partial(LARS, lr=LR, momentum=MOMENTUM, eta=ETA, convention="reference")
    rivals: dict[str, Step] = {
        "ours": ours(groups(device)).step,
        "timm": Lars(groups(device), lr=LR, momentum=MOMENTUM, trust_coeff=ETA).step,
        "sgd": torch.optim.SGD(groups(device), lr=LR, momentum=MOMENTUM, fused=True).step,
    }
    sgd = build_sgd(groups(device), lr=LR, momentum=MOMENTUM, nesterov=False, scaled=False)
    if isinstance(sgd, TabledSGD):
        rivals["ours, SGD"] = sgd.step
    if device.type == "cuda" and has_apex():
        rivals["ours, apex"] = ours(groups(device), kernels="apex").step
    return rivals


def has_apex() -> bool:
    return importlib.util.find_spec("amp_C") is not None


def groups(device: torch.device) -> list[dict[str, Any]]:
    """Return ResNet-50's parameters with gradients, decayed as our recipes do."""
    torch.manual_seed(0)
    model: nn.Module = build("resnet50", num_classes=1000)
    for weight in model.to(device).parameters():
        weight.grad = torch.randn_like(weight) * 1e-3
    return param_groups(model, weight_decay=DECAY)


def measure(
    rivals: dict[str, Step], *, rounds: int, seconds: float = math.inf
) -> dict[str, list[float]]:
    """Return the milliseconds of each rival's steps; each makes one in a round."""
    times = take_turns(rivals, rounds=rounds, steps=1, seconds=seconds)
    return {name: [1e3 * value for value in seconds] for name, seconds in times.items()}


def copy_of(moved: int, device: torch.device) -> Step:
    """Return a copy that reads and writes `moved` bytes together."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


if __name__ == "__main__":
    main()
