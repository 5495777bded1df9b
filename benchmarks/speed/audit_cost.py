"""Measure how long an audit of ResNet-50 takes, in updates of the script's own loop.

    python -m benchmarks.speed.audit_cost [--rounds 5] [--batch 4] [--pixels 128]

Two workers train ResNet-50 in DistributedDataParallel with momentum SGD on random images. Each
round times three updates, then an audit of them: as at the start of a training, and again for a
model that has been trained, whose BatchNorm statistics are compared with exact ones.
"""

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.speed.measuring import on_two_workers, paired_ratio, spread, write
from largebatch.audit import audit
from largebatch.audit.norms import layers_of
from largebatch.audit.rules.norms import WARM
from largebatch.models import build
from largebatch.runs.launch import reporting_errors

NAME = "audit_cost"
STEPS = 3


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="how long an audit takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="samples on each worker")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def worker(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of updates and of audits, by round."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    images = torch.randn(8 * args.batch, 3, args.pixels, args.pixels)
    data = TensorDataset(images, torch.randint(0, 1000, (len(images),)))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    model = DistributedDataParallel(build("resnet50", num_classes=1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def updates() -> None:
        for _, batch in zip(range(STEPS), loader, strict=False):
            step(batch)

    def audited() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            findings = audit(
                model, loader, cross_entropy, optimizer, step, STEPS, set_epoch=sampler.set_epoch
            )
        assert findings.ok, findings.table()

    seconds: dict[str, list[float]] = {"updates": [], "audit": [], "audit of a trained model": []}
    updates()
    for _ in range(args.rounds):
        seconds["updates"].append(timed(updates))
        for moved, name in ((0, "audit"), (2 * WARM, "audit of a trained model")):
            for layer in layers_of(model):
                assert layer.num_batches_tracked is not None
                layer.num_batches_tracked.fill_(moved)
            seconds[name].append(timed(audited))
    dist.destroy_process_group()
    return seconds


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    args = parse(sys.argv[1:])
    if args.worker:
        with reporting_errors():
            Path(args.worker[1]).write_text(json.dumps(worker(args)))
        return
    seconds = on_two_workers("seconds")
    baseline = seconds.pop("updates")
    result = {
        "settings": {it: getattr(args, it) for it in ("rounds", "batch", "pixels")}
        | {"steps": STEPS},
        "updates": {"seconds": spread(baseline)},
    }
    for name, times in seconds.items():
        ratio = paired_ratio(times, baseline)
        result[name] = {"seconds": spread(times), "to the updates": ratio}
        print(
            f"{name}: {spread(times)['median']:.3g} s, {ratio['median']:.3g} times as long as "
            f"{STEPS} updates ({ratio['low']:.3g} to {ratio['high']:.3g}, n = {ratio['n']})"
        )
    print(write(NAME, result))


if __name__ == "__main__":
    main()
