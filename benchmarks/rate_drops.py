"""Accuracy and loss through drops of the learning rate, on one host and on two; batch and speed.

    python benchmarks/rate_drops.py RUNS
    python benchmarks/rate_drops.py RUNS --throughput [--rounds 5]

Dell EMC (C4140, 2019, section 7.4.2) train ResNet-50 at 0.4 for 10 epochs, 0.04 until 60 and 0.004
until 90, and saw that a change of the rate is not reflected at once in every processor of two
servers. The same rates here, for a small ResNet with BatchNorm on the digits, on two workers:

    one host    as `largebatch train`, all workers in one host
    two hosts   a host for each worker, behind links of 1 Gbit/s (network namespaces)
    late        two hosts, and worker 1 keeps the rate before for an epoch after each drop;
                largebatch compares the weights of workers at a checkpoint, and ends the run
    carried     two hosts, and the momentum holds the rate: it goes on with the rate before for
                about 1 / (1 - momentum) updates, as Keras' SGD does, which Horovod's callback
                LearningRateScheduleCallback corrects with momentum_correction (its default)
    horovod     one host and two, over Horovod, where it is installed

torch.optim.SGD multiplies by the rate after the momentum, so it has nothing to correct: `carried`
scales its momentum by the rate before over the rate after at each drop, and the correction divides
by the same.

`--throughput` measures updates of LeNet-5 by batch and device batch on one worker, in images per
second of processor time, which other programs on the machine change least.

A run that has ended is not made again.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measuring import RESULTS, spread, write
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from largebatch import load_recipe, run
from largebatch.errors import DesynchronizedError
from largebatch.lab.studies.hosts.measure import Placement, environment
from largebatch.lab.studies.hosts.namespaces import Command, addresses, run_on_hosts
from largebatch.recipe.recipe import Recipe
from largebatch.report.style import COLOURS, INK, MUTED, save_png
from largebatch.runs.build import open_trainer
from largebatch.runs.options import Options
from largebatch.training.stages import STAGES

if TYPE_CHECKING:
    from largebatch.report.style import Figure

NAME = "rate_drops"
EPOCHS, DROPS, RATE = 90, (10, 60), 0.4
MEGABITS = 1000.0
CELLS = {
    "one host": ("torch", (2,)),
    "two hosts": ("torch", (1, 1)),
    "late": ("torch", (1, 1)),
    "carried": ("torch", (1, 1)),
    "horovod, one host": ("horovod", (2,)),
    "horovod, two hosts": ("horovod", (1, 1)),
}
"""Backend and workers of each host."""

BATCHES, DEVICE_BATCHES = (64, 256, 1024), (16, 64, 256)


def recipe(epochs: int = EPOCHS) -> Recipe:
    """Return the run through both drops, evaluated after every epoch."""
    at = ", ".join(f"{{epochs: {epochs * drop / EPOCHS:g}}}" for drop in DROPS)
    decay = f"{{kind: steps, at: [{at}], gamma: 0.1}}"
    return load_recipe(
        "digits_96",
        [
            f"duration={{epochs: {epochs}}}",
            f"schedule={{peak_lr: {RATE}, warmup: null, decay: {decay}}}",
            "optimizer={kind: sgd, momentum: 0.9, weight_decay: 1e-4}",
            "model.arguments={layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}",
            *("data.image_size=16", "execution.cache=memory"),
            *("polish=null", "evaluation.every_epochs=1"),
        ],
    )


def main() -> None:
    """Train what is left, and write the result and its figure; or measure the throughput."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        be_worker(args.runs, args.worker, recipe(args.epochs))
        return
    command = "python benchmarks/rate_drops.py RUNS"
    if args.throughput:
        words = f"{command} --throughput --rounds {args.rounds}"
        print(write("batch_throughput", words, throughput(args.runs, args.rounds)))
        return
    cells = [
        name for name, (backend, _) in CELLS.items() if backend == "torch" or find_spec(backend)
    ]
    for name in cells:
        if not (args.runs / name / "digest.json").exists():
            start(args.runs / name, name, epochs=args.epochs)
            print(f"{name}: done", flush=True)
    found = {name: course(args.runs / name) for name in cells}
    print("\n".join(result := list(findings(found))))
    words = f"{command} --epochs {args.epochs}"
    print(write(NAME, words, {"epochs": args.epochs, "findings": result, "cells": found}))
    path = RESULTS / f"{NAME}.png"
    save_png(path, lambda figure: draw(figure, found), size=(560, 420), pixels=1120)


def start(folder: Path, name: str, *, epochs: int) -> None:
    """Train as one cell; SystemExit with the output of the worker that failed."""
    backend, workers = CELLS[name]
    folder.mkdir(parents=True, exist_ok=True)
    hosts = Placement(workers_per_host=workers, megabits=MEGABITS).hosts
    words = [sys.executable, __file__, str(folder), "--worker", name, "--epochs", str(epochs)]
    commands = [
        Command(host, words, environment(rank, hosts), folder / f"output-{rank}")
        for rank, host in enumerate(hosts)
    ]
    codes = run_on_hosts(
        commands,
        hosts=addresses(len(workers)),
        megabits=MEGABITS,
        horovod=backend == "horovod",
    )
    for rank, code in enumerate(codes):
        if code:
            raise SystemExit(f"{name}: {(folder / f'output-{rank}').read_text()[-2000:]}")


def be_worker(folder: Path, name: str, planned: Recipe) -> None:
    """Train as one of the workers; each writes a digest of its weights."""
    backend = CELLS[name][0]
    rank = int(os.environ["RANK"])
    change = {"carried": carry, "late": late if rank else nothing}.get(name, nothing)
    weights: list[torch.Tensor] = []
    refusal = ""
    with before_each_step(change, weights):
        try:
            run(planned, out=folder / "run", backend=backend, report=False)  # type: ignore[arg-type]  # one of two
        except DesynchronizedError as error:
            refusal = str(error)
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().numpy().tobytes())
    (folder / f"digest-{rank}.json").write_text(json.dumps(digest.hexdigest()))
    if rank == 0:
        (folder / "digest.json").write_text(json.dumps(refusal))
    sys.stdout.flush()
    os._exit(0)  # threads of libraries may wait for a worker that is gone


Change = Callable[[Optimizer, list[float]], None]
"""Changes an optimizer before its step; the rates of all steps so far, this one last."""


def nothing(optimizer: Optimizer, rates: list[float]) -> None:
    """Leave the optimizer as it is."""


def carry(optimizer: Optimizer, rates: list[float]) -> None:
    """Go on with the rate before in the momentum, as if it were inside."""
    if len(rates) > 1 and rates[-1] != rates[-2]:
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(rates[-2] / rates[-1])


def late(optimizer: Optimizer, rates: list[float]) -> None:
    """Step at the rate of an epoch before."""
    steps = recipe().data.train_samples // recipe().batch.global_batch
    for group in optimizer.param_groups:
        group["lr"] = rates[max(0, len(rates) - 1 - steps)]


@contextmanager
def before_each_step(change: Change, weights: list[torch.Tensor]) -> Iterator[None]:
    """Change every optimizer before its steps; collect the weights of the first one."""
    rates: list[float] = []

    def read(optimizer: Optimizer, *_: object) -> None:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        if not weights:
            weights.extend(weight for group in optimizer.param_groups for weight in group["params"])
        change(optimizer, rates)

    handle = register_optimizer_step_pre_hook(read)
    try:
        yield
    finally:
        handle.remove()


def course(folder: Path) -> dict[str, Any]:
    """Return the curves of a run, a digest of its losses, and of the weights of each worker."""
    lines = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    tests = [line for line in lines if line["event"] == "evaluation"]
    losses = [float(step["loss"]).hex() for step in steps]
    return {
        "updates": len(steps),
        "refusal": json.loads((folder / "digest.json").read_text()),
        "rates": sorted({step["lr"] for step in steps}, reverse=True),
        "losses": hashlib.sha256(" ".join(losses).encode()).hexdigest(),
        "weights": [json.loads(path.read_text()) for path in sorted(folder.glob("digest-*.json"))],
        "curve": [{name: test[name] for name in ("epoch", "top1", "loss")} for test in tests],
    }


def findings(found: dict[str, Any]) -> Iterator[str]:
    """Yield in words what is the same bits, and what changes the course."""
    one = found["one host"]
    for name, cell in found.items():
        workers = "equal" if len(set(cell["weights"])) == 1 else "DIFFERENT"
        same = all(cell[part] == one[part] for part in ("losses", "curve", "weights"))
        bits = "are" if same else "are NOT"
        last, reference = cell["curve"][-1], one["curve"][-1]
        gap = max(
            abs(own["top1"] - other["top1"])
            for own, other in zip(cell["curve"], one["curve"], strict=False)
        )
        if cell["refusal"]:
            yield f"{name}: ended after {cell['updates']:,} updates: {cell['refusal']}"
            continue
        yield (
            f"{name}: {cell['updates']:,} updates; losses of all updates, accuracy and loss of all "
            f"{len(cell['curve'])} evaluations and the weights "
            f"{bits} the bits of one host; weights of its workers {workers}; "
            f"top-1 at the end {last['top1']:.2%}, one host {reference['top1']:.2%}, at most "
            f"{gap:.2%} apart"
        )


def draw(figure: "Figure", found: dict[str, Any]) -> None:
    """Draw accuracy and loss over the epochs; equal curves lie on each other."""
    looks = dict(zip(found, [INK, *COLOURS.values()], strict=False))
    axes = figure.subplots(2, 1, sharex=True)
    for row, (part, title, factor) in zip(
        axes, (("top1", "top-1, %", 100.0), ("loss", "validation loss", 1.0)), strict=True
    ):
        for place, (name, cell) in enumerate(found.items()):
            epochs = [test["epoch"] for test in cell["curve"]]
            values = [factor * test[part] for test in cell["curve"]]
            width = 3.5 if place == 0 else 1.2
            row.plot(epochs, values, label=name, color=looks[name], linewidth=width,
                     alpha=0.35 if place == 0 else 1.0)  # fmt: skip
        row.set_ylabel(title)
    last = round(found["one host"]["curve"][-1]["epoch"])
    for row in axes:
        for drop in DROPS:
            row.axvline(last * drop / EPOCHS, color=MUTED, linewidth=0.8, linestyle=":")
    axes[1].set_ylim(0, 2.5)
    axes[1].set_xlabel("epochs; dotted: the rate falls to a tenth")
    axes[0].legend(loc="lower right", frameon=False)


def throughput(folder: Path, rounds: int) -> dict[str, Any]:
    """Return images per second of processor time by batch and device batch."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for batch in BATCHES:
            for device_batch in (each for each in DEVICE_BATCHES if each <= batch):
                out = folder / f"{batch}-{device_batch}-{number}"
                rate = images_per_second(out, batch, device_batch)
                found.setdefault(f"{batch} x {device_batch}", []).append(rate)
    for name, rates in found.items():
        print(name, {key: round(value) for key, value in spread(rates).items()})
    return {"images per processor second": {name: spread(rates) for name, rates in found.items()},
            "each round": found}  # fmt: skip


def images_per_second(out: Path, batch: int, device_batch: int, updates: int = 4) -> float:
    """Train LeNet-5 for some updates, after one that does not count."""
    planned = load_recipe(
        "digits_96",
        [
            "model={name: lenet5}",
            f"batch={{global_batch: {batch}, bn_span: null}}",
            f"execution.device_batch={device_batch}",
            "optimizer={kind: sgd, momentum: 0.9, weight_decay: 5e-4}",
            "schedule={peak_lr: 0.01, warmup: null, decay: {kind: constant}}",
            *("data.image_size=28", "execution.cache=memory", "polish=null", "evaluation={}"),
        ],
    )
    options = Options(out=out, backend="auto", report=False)
    out.mkdir(parents=True, exist_ok=True)
    with open_trainer(planned, options, {"command": "benchmark"}) as trainer:
        plan = range(trainer.plan.train_steps)
        STAGES[0].run(trainer, plan, 1)
        begun = time.process_time()
        STAGES[0].run(trainer, plan, 1 + updates)
        return updates * batch / (time.process_time() - begun)


if __name__ == "__main__":
    main()
