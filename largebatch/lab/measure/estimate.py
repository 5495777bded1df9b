"""Estimate the time and memory of a run on this machine, by training on a few samples."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from largebatch import accelerator
from largebatch.distributed.reducer import divide
from largebatch.distributed.serial import Serial
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe
from largebatch.runs.fitting import largest_side, random_batch, whole_spans
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.state import build_criterion, grouping_of, kept_exact

_ENOUGH_SECONDS = 0.3  # seconds of a pass from which overhead no longer dominates


class Estimate(NamedTuple):
    """Time and memory of one worker that has this machine's device to itself."""

    device: str
    precision: str
    samples: int
    """Samples per pass of the measurement."""

    step_seconds: float
    """Seconds of forward, backward and update, without input and communication, for the first
    global batch at the largest image size."""

    run_seconds: float
    """Seconds of all updates of the run, measured in the same way."""

    memory_bytes: int
    """Bytes of weights, gradients, optimizer state, averages and activations."""

    sums: tuple[int, ...] = ()
    """Bytes of each group of gradients that several workers sum, in the order of sending."""


def estimate(recipe: Recipe, plan: Plan) -> Estimate:
    """Train on 2, 4, 8 ... random samples, up to a device batch, until a pass is long enough.

    The samples are whole BatchNorm spans or part of one, and never a single sample, which has no
    variance. Time and activations are scaled from the last pass to the device batch.
    """
    backend = Serial()
    recipe = recipe.without_machine_settings
    if backend.device.type == "cpu":  # where fp16 is several times slower, and no way to train
        recipe = recipe.model_copy(update={"precision": "fp32"})
    model = build_model(recipe, backend.device)
    optimizer = build_optimizer(recipe, model, backend)
    criterion = build_criterion(recipe.loss)
    most, span = max(2, plan.device_batch), plan.bn_span or 1
    usual = recipe.data.image_size
    num, seconds, kept, side = 2, 0.0, 0, largest_side(plan, usual=usual)
    for attempt in count():
        images, labels = random_batch(num, side, classes=recipe.data.classes, device=backend.device)
        with saved_bytes(model) as activations:
            start = time.perf_counter()
            criterion(model(images), labels).backward()
            before, seconds = seconds, _elapsed(start, backend.device)
        kept = sum(activations.values())
        if attempt and (num >= most or before + seconds > _ENOUGH_SECONDS):
            break
        num = whole_spans(min(2 * num, most), span) if attempt else num  # the first is slower
    start = time.perf_counter()
    optimizer.step()
    update = _elapsed(start, backend.device)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    kept_by_optimizer = state_bytes(optimizer)
    polish = recipe.polish or Polish.model_construct()
    copies = 2 + (polish.ema is not None or polish.swa is not None)
    per_sample = seconds / num
    parts = plan.sized(range(plan.train_steps), otherwise=usual)
    parts.append((range(plan.train_steps, plan.updates), usual))
    passes = sum(
        len(steps) * number * (size / side) ** 2
        for part, size in parts
        for steps, _, number in plan.within(part)
    )
    exact = kept_exact(recipe.reduction.dtype, model)
    grouping = grouping_of(recipe.execution.groups)
    groups = divide(model.named_parameters(), grouping=grouping, exact=exact)
    shorter = 4 if recipe.reduction.dtype == "fp32" else 2

    def sent_bytes(weight: nn.Parameter) -> int:
        return weight.numel() * (4 if weight in exact else shorter)

    return Estimate(
        device=backend.device.type,
        precision=recipe.precision,
        samples=num,
        step_seconds=per_sample * plan.device_batch * plan.accumulation + update,
        run_seconds=per_sample * plan.device_batch * passes + update * plan.updates,
        memory_bytes=copies * weights + kept_by_optimizer + kept * plan.device_batch // num,
        sums=tuple(sum(sent_bytes(weight) for _, weight in group) for group in groups),
    )


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    leaves = tree_leaves(optimizer.state_dict()["state"])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def _elapsed(start: float, device: torch.device) -> float:
    accelerator.synchronize(device)  # sync: this is a measurement
    return time.perf_counter() - start


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of activations that forward keeps for backward, each storage once."""
    storages: dict[int, int] = {}
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # fake tensors have one too, and no address
        if storage._cdata not in weights:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages
