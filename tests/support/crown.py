"""The problem of the crown test, solved by largebatch on whatever backend it is started on.

Run as a program it solves every case:  python crown.py BACKEND FILE OPTIMIZER ...
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from plain_mixing import CUTMIX, MIXUP, PROBABILITY, SWITCH
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from largebatch import load_recipe
from largebatch.data.mixing import draw_pairs, mix
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend, Group
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import BackendName
from largebatch.distributed.reducer import Reducer
from largebatch.models import param_groups
from largebatch.models.batchnorm import Spans, with_span
from largebatch.optim.lars import LARS
from largebatch.recipe.arithmetic.plan import BatchPiece, Plan
from largebatch.recipe.data import Mix
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.loop import EagerStep, cross_entropy, step_seeds, train

STEPS = 5
GLOBAL_BATCH = 64
SPAN = 8
PEAK = 0.8
MOMENTUM, WEIGHT_DECAY, ETA, EPS = 0.9, 0.05, 0.02, 1e-9
SMOOTHING = 0.1
MIX = Mix(mixup=MIXUP, cutmix=CUTMIX, probability=PROBABILITY, switch=SWITCH)
CONVENTIONS = ("reference", "scaled-momentum", "outside", "fujitsu")
SECTIONS = {
    "nesterov": "kind: sgd, momentum: 0.9, nesterov: true",
    "shampoo": (
        "kind: shampoo, momentum: 0.9, beta2: 0.7, matrix_eps: 1e-4, block_size: 8, "
        "start_step: 2, root: 4"
    ),
    "schedule-free": (
        "kind: schedule-free, momentum: 0.9, weight_power: 0.75, weight_lr_power: 1.5, "
        "statistics_samples: 8"
    ),
    "lamb": "kind: lamb, bias_correction: false, max_grad_norm: 0.5",
    "adamw": "kind: adamw, beta1: 0.8, beta2: 0.9, eps: 1e-6",
    "muon": (
        "kind: muon, momentum: 0.9, adjust_lr: original, normalize_weights: true, ns_steps: 3, "
        "others: {kind: sgd, lr: 0.4, head_lr: 0.2, weight_decay: 0.05, bias_weight_decay: 0.1}"
    ),
    "muon with adamw": (
        "kind: muon, momentum: 0.9, others: {kind: adamw, eps: 1e-6, weight_decay: 0.05}"
    ),
}
"""Sections of a recipe, without the weight decay, which is that of all."""

OPTIMIZERS = ("sgd", *CONVENTIONS, *SECTIONS)
NETS = ("plain", "batchnorm")
CASES = {
    "plain": "plain",
    "batchnorm": "batchnorm",
    "shared spans": "batchnorm",
    "batch schedule": "batchnorm",
    "mixed images": "plain",
}
"""The net of each case on several workers. Where spans are shared, and in the batch schedule, a
worker holds half of a span."""

LARGER = (BatchPiece(step=2, position=2 * GLOBAL_BATCH, global_batch=96),)
SIZES = (GLOBAL_BATCH, GLOBAL_BATCH, 96, 96)
"""A batch schedule over the same samples, and the global batch of each of its updates."""

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
State = dict[str, Tensor]


def rate(step: int) -> float:
    """Rise, then fall, so that no two steps share a rate."""
    return PEAK * (0.3, 1.0, 0.7, 0.4, 0.1)[step]


def net(kind: str) -> nn.Sequential:
    """Build a small float64 network, the same each time."""
    torch.manual_seed(1)
    first, second = (
        nn.BatchNorm2d(channels) if kind == "batchnorm" else nn.Identity() for channels in (6, 4)
    )
    body = [nn.Conv2d(3, 6, 3), first, nn.ReLU(), nn.Conv2d(6, 4, 3), second, nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, 5)).double()


def data() -> tuple[Tensor, Tensor]:
    """Return STEPS x GLOBAL_BATCH samples in the order of their positions."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(STEPS * GLOBAL_BATCH, 3, 6, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(5, (STEPS * GLOBAL_BATCH,), generator=generator)
    return images, labels


def make_optimizer(kind: str, model: nn.Module, workers: Group) -> Optimizer:
    """Build one of OPTIMIZERS; those of SECTIONS as a run does."""
    if kind in SECTIONS:
        changes = (
            f"optimizer={{{SECTIONS[kind]}, weight_decay: {WEIGHT_DECAY}}}",
            f"schedule={{peak_lr: {PEAK}, warmup: null, decay: {{kind: constant}}}}",
        )
        return build_optimizer(load_recipe(DIGITS, changes), model, workers)
    groups = param_groups(model, weight_decay=WEIGHT_DECAY)
    if kind == "sgd":
        return SGD(
            [{k: g[k] for k in ("params", "weight_decay")} for g in groups], momentum=MOMENTUM
        )
    convention: Any = kind
    return LARS(groups, lr=PEAK, momentum=MOMENTUM, eta=ETA, eps=EPS, convention=convention)


def solve(
    backend: Backend,
    net_kind: str,
    optimizer_kind: str,
    *,
    accumulation: int,
    changes: tuple[BatchPiece, ...] = (),
    mixes: bool = False,
) -> nn.Module:
    """Train with everything largebatch has, and return the model."""
    steps = len(SIZES) if changes else STEPS
    device_batch = GLOBAL_BATCH // backend.world_size // accumulation
    plan = Plan(
        workers=backend.world_size,
        global_batch=GLOBAL_BATCH,
        device_batch=device_batch,
        accumulation=accumulation,
        batch_changes=changes,
        bn_span=SPAN,
        sync_workers=max(1, SPAN // device_batch),
        train_samples=STEPS * GLOBAL_BATCH,
        val_samples=1,
        steps=steps,
        warmup_steps=0,
        clean_steps=0,
        evaluate_after=(),
    )
    images, labels = data()

    def batches() -> Iterator[Batch]:
        for part, _, number in plan.within(range(steps)):
            for step, micro in product(part, range(number)):
                positions = plan.positions(step, micro, backend.rank)
                batch = Batch(images[list(positions)], labels[list(positions)])
                if mixes:
                    batch = mix(batch, draw_pairs(MIX, positions, seed=0, classes=5))
                yield batch

    model = with_span(net(net_kind), SPAN)
    optimizer = make_optimizer(optimizer_kind, model, backend)
    with Reducer(model.named_parameters(), backend) as reducer:
        spans = Spans(model, backend, sync_workers=plan.sync_workers)
        criterion = cross_entropy(smoothing=SMOOTHING, off_target="all")
        samples = batches()
        for part, global_batch, number in plan.within(range(steps)):
            step = EagerStep(model, optimizer, criterion, reducer, spans, global_batch=global_batch)
            seed = step_seeds(0, backend.rank)
            for _ in train(step, samples, rate, steps=part, accumulation=number, seed=seed):
                pass
    return model


def evaluate_each(model: nn.Module, backend: Backend) -> Metrics:
    """Evaluate the data of the first step, dealt out to the workers in threes."""
    images, labels = (part[:GLOBAL_BATCH].split(3) for part in data())
    share = slice(backend.rank, None, backend.world_size)
    batches = map(Batch, images[share], labels[share])
    return evaluate(model, batches, backend, expected=GLOBAL_BATCH)


def solve_all(backend_name: BackendName, path: Path, optimizers: Sequence[str]) -> None:
    """Solve and evaluate every case on these workers; worker 0 writes the results."""
    backend = connect(backend_name)
    results = {}
    for case, kind in product(CASES, optimizers):
        halves = case in {"shared spans", "batch schedule"}
        changes = LARGER if case == "batch schedule" else ()
        share = GLOBAL_BATCH // backend.world_size
        most = share // 2 if changes else share
        device_batch = min(SPAN // 2 if halves else GLOBAL_BATCH // 4, most)
        accumulation = share // device_batch
        model = solve(
            backend,
            CASES[case],
            kind,
            accumulation=accumulation,
            changes=changes,
            mixes=case == "mixed images",
        )
        metrics = evaluate_each(model, backend)
        results[f"{case} {kind}"] = {"state": model.state_dict(), "evaluation": asdict(metrics)}
    if backend.rank == 0:
        torch.save(results, path)
    backend.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    name: Any = sys.argv[1]
    solve_all(name, Path(sys.argv[2]), sys.argv[3:])
