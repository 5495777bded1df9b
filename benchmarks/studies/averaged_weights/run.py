"""Averaged weights: their accuracy as the libraries leave them, and after each kind of pass.

    python -m benchmarks.studies.averaged_weights.run [--data NAME ...] [--seeds N]

Needs LARGEBATCH_DATA, the folder of Fashion-MNIST and CIFAR-10, and schedulefree. Adds to the
newest benchmarks/results/averaged_weights_<machine>_<date>.json, which tables.py draws, the seeds
that it lacks. The results are frozen, of commit 666319fc, whose script also searched the rates in
RATES: the best of three in two epochs on 10,000 images, judged on 5,000 other training images.

Training is plain PyTorch: ResNet-9 of a quarter of the original's width, batches of 128, padding,
random crops and flips, label smoothing, float32. A seed makes these runs:
- SGD with Nesterov momentum: one epoch of warm-up, the peak rate up to three quarters of the run,
  a straight decay to zero. Its averages are taken twice, at the end of the peak rate ("peak") and
  after the decay ("end"): the exponential moving average (EMA) of the weights with decays 0.99 and
  0.999 (torch's AveragedModel), and LAWA, the mean of the last five weights 100 updates apart
  (arXiv:2209.14981). SWA, the mean of eight weights a quarter of an epoch apart
  (arXiv:1803.05407), is taken at the peak rate.
- Its last quarter twice more in other orders of the images; the mean of the three ends is a model
  soup (arXiv:2203.05482).
- Schedule-Free SGD and AdamW (arXiv:2405.15682) with the library's warm-up and no decay.

Passes over the weights: see passes.py. The test images choose nothing.
"""

import argparse
import copy
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from itertools import product
from pathlib import Path
from typing import Any

import schedulefree
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.speed.measuring import (
    RESULTS,
    circumstances,
    few_processes,
    hardware,
    newest,
    today,
)
from benchmarks.studies.averaged_weights.passes import (
    PASS_BATCH,
    SHARES,
    Images,
    State,
    States,
    augmented,
    new_model,
    normalised,
    on_workers,
)
from benchmarks.studies.images import load

NAME = "averaged_weights"
BATCH = 128
WARMUP_EPOCHS = 1
PEAK_PART = 0.75
"""Part of a run up to which the rate stays at its peak."""

SMOOTHING = 0.1
DECAY = 5e-4
EMA = (0.99, 0.999)
LAWA_NUMBER, LAWA_UPDATES = 5, 100
SWA_NUMBER, SWA_EPOCHS = 8, 0.25

RATES = {
    "fashion_mnist": {"SGD": 0.45, "Schedule-Free SGD": 5.0, "Schedule-Free AdamW": 0.01},
    "cifar10": {"SGD": 0.15, "Schedule-Free SGD": 5.0, "Schedule-Free AdamW": 0.01},
}

EPOCHS = {"fashion_mnist": 4, "cifar10": 6}
"""Length of the runs of every data set."""

SEEDS_ON_WORKERS = 2
"""Seeds whose passes are made on several workers too, which takes half as long as training."""


def schedule(rate: float, *, updates: int, warmup: int) -> Callable[[int], float]:
    """Return warm-up, constant rate and straight decay to zero, by update."""
    end = round(PEAK_PART * updates)

    def at(update: int) -> float:
        rising = min(1.0, (update + 1) / warmup)
        return rate * rising * min(1.0, (updates - update) / (updates - end))

    return at


class Run:
    """A training run in plain PyTorch; `update` counts its updates."""

    def __init__(
        self, data: str, images: Images, optimizer: str, rate: float, *, seed: int, epochs: int
    ) -> None:
        torch.manual_seed(seed)
        self.data, self.images = data, images
        self.model = new_model()
        self.per_epoch = len(images.labels) // BATCH
        self.updates = epochs * self.per_epoch
        self.update = 0
        warmup = WARMUP_EPOCHS * self.per_epoch
        parameters = self.model.parameters()
        self.rate: Callable[[int], float] | None = None
        self.optimizer: Optimizer
        if optimizer == "SGD":
            self.optimizer = SGD(parameters, rate, 0.9, weight_decay=DECAY, nesterov=True)
            self.rate = schedule(rate, updates=self.updates, warmup=warmup)
        elif optimizer == "Schedule-Free SGD":
            self.optimizer = schedulefree.SGDScheduleFree(
                parameters, rate, momentum=0.9, weight_decay=DECAY, warmup_steps=warmup
            )
        else:
            self.optimizer = schedulefree.AdamWScheduleFree(
                parameters, rate, weight_decay=0.05, warmup_steps=warmup
            )
        self.draw = torch.Generator().manual_seed(seed)
        self.order: Iterator[Tensor] = iter(())

    def train(self, until: int, after: Callable[[], None] = lambda: None) -> None:
        """Train up to an update and call `after` after every one."""
        self.model.train()
        if self.rate is None:
            self.optimizer.train()  # type: ignore[attr-defined]  # Schedule-Free's
        while self.update < until:
            chosen = next(self.order, None)
            if chosen is None or len(chosen) < BATCH:
                count = len(self.images.labels)
                self.order = iter(torch.randperm(count, generator=self.draw).split(BATCH))
                continue
            if self.rate is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate(self.update)
            pixels = augmented(self.images.pixels[chosen], self.data, self.draw)
            loss = F.cross_entropy(
                self.model(normalised(pixels, self.data)),
                self.images.labels[chosen],
                label_smoothing=SMOOTHING,
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.update += 1
            after()


class Averages:
    """EMA, SWA and LAWA of a model's weights, with and without its buffers."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ema = {
            decay: AveragedModel(
                run.model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True
            )
            for decay in EMA
        }
        self.swa = AveragedModel(run.model, use_buffers=True)
        self.latest: deque[State] = deque(maxlen=LAWA_NUMBER)
        self.peak_end = round(PEAK_PART * run.updates)

    def follow(self) -> None:
        """Take the weights after an update into the averages that it belongs to."""
        update, model = self.run.update, self.run.model
        for average in self.ema.values():
            average.update_parameters(model)
        left = self.peak_end - update
        every = round(SWA_EPOCHS * self.run.per_epoch)
        if 0 <= left < SWA_NUMBER * every and left % every == 0:
            self.swa.update_parameters(model)
        if update % LAWA_UPDATES == 0:
            self.latest.append(snapshot(model))

    def states(self, when: str) -> dict[str, States]:
        """Return every average, `as left` with the buffers of the newest weights."""
        model = self.run.model
        found = {f"EMA {decay}": average.module for decay, average in self.ema.items()}
        if when == "peak":
            found["SWA"] = self.swa.module
        states = {name: both(model, snapshot(average)) for name, average in found.items()}
        states["LAWA"] = both(model, mean_of(list(self.latest)))
        return {f"{name}, {when}": each for name, each in states.items()} | {
            f"last weights, {when}": {"as left": snapshot(model)}
        }


def snapshot(model: nn.Module) -> State:
    """Return a copy of a model's weights and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def mean_of(states: list[State]) -> State:
    """Return the mean of weights and buffers; counters are those of the last."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in states[-1].items()
    }


def both(model: nn.Module, average: State) -> States:
    """Return an average as left, with the buffers of `model`, and with averaged buffers."""
    buffers = {name for name, _ in model.named_buffers()}
    own = snapshot(model)
    left = {name: own[name] if name in buffers else value for name, value in average.items()}
    return {"as left": left, "averaged": average}


def train_sgd(run: Run, *, seed: int) -> dict[str, States]:
    """Train with SGD; return its averages at the peak rate and at the end, and the soup."""
    averages = Averages(run)
    run.train(averages.peak_end, averages.follow)
    states = averages.states("peak")
    start = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.train(run.updates, averages.follow)
    states |= averages.states("end")
    ends = [snapshot(run.model)]
    for number in (1, 2):
        run.model.load_state_dict(start[0])
        run.optimizer.load_state_dict(copy.deepcopy(start[1]))
        run.update, run.order = averages.peak_end, iter(())
        run.draw.manual_seed(1000 * number + seed)
        run.train(run.updates)
        ends.append(snapshot(run.model))
    run.model.load_state_dict(ends[0])
    return states | {"soup of 3, end": both(run.model, mean_of(ends))}


def train_schedule_free(run: Run, name: str) -> dict[str, States]:
    """Train with a Schedule-Free optimizer; return its average with the buffers of training."""
    run.train(run.updates)
    run.optimizer.eval()  # type: ignore[attr-defined]  # Schedule-Free's
    return {f"{name}, end": {"as left": snapshot(run.model)}}


def measure_seed(data: str, *, seed: int, work: Path) -> dict[str, Any]:
    """Train a seed, make every pass over its weights, and return what was found."""
    images, test = (
        Images(torch.from_numpy(pixels), torch.from_numpy(labels)) for pixels, labels in load(data)
    )
    folder = work / data / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    seconds = {}
    for name, rate in RATES[data].items():
        start = time.perf_counter()
        run = Run(data, images, name, rate, seed=seed, epochs=EPOCHS[data])
        made = train_sgd(run, seed=seed) if name == "SGD" else train_schedule_free(run, name)
        for weights, states in made.items():
            torch.save(states, folder / f"{weights}.pt")
        seconds[name] = time.perf_counter() - start
    shared = folder / "images"
    torch.save((images.part(slice(PASS_BATCH * SHARES[1][0])), test), shared)
    found: dict[str, Any] = {}
    for workers in SHARES if seed <= SEEDS_ON_WORKERS else (1,):
        for weights, passes in on_workers(workers, folder, shared, data).items():
            found.setdefault(weights, {})[str(workers)] = passes
    return {
        "data": data, "seed": seed, "rates": RATES[data], "epochs": EPOCHS[data],
        "train_seconds": seconds, "weights": found, "date": today(),
    }  # fmt: skip


def main() -> None:
    """Measure the seeds that the newest results lack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", nargs="+", default=list(EPOCHS), choices=list(EPOCHS), metavar="NAME")
    add("--seeds", type=int, default=5)
    add("--processes", type=int, default=2, metavar="N", help="of one thread each")
    add("--work", type=Path, default=Path("build") / NAME, metavar="DIR", help="for the weights")
    args = parser.parse_args()
    path = newest(NAME, RESULTS) or RESULTS / f"{NAME}_{hardware()}_{today()}.json"
    seeds = json.loads(path.read_text(encoding="utf-8"))["seeds"] if path.exists() else {}
    with few_processes(args.processes) as pool:
        jobs = {
            pool.submit(measure_seed, data, seed=seed, work=args.work): key
            for seed, data in product(range(1, args.seeds + 1), args.data)
            if (key := f"{data}, seed {seed}") not in seeds
        }
        for done in as_completed(jobs):
            seeds[jobs[done]] = done.result()
            print(f"{jobs[done]}: done", flush=True)
            content = {**circumstances(NAME), "seeds": seeds}
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(path)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
