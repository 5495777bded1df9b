"""Estimate the time and memory of a run on this machine, by training on a few samples."""

from typing import NamedTuple

from torch import nn

from largebatch.distributed.reducer import divide
from largebatch.distributed.serial import Serial
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.passes import Passes, largest_side, seconds_of, state_bytes, whole_spans
from largebatch.runs.state import grouping_of, kept_exact

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
    most = max(2, plan.device_batch)
    span = plan.bn_span or 1
    usual = recipe.data.image_size
    side = largest_side(plan, usual=usual)
    passes = Passes.of(recipe, model, backend.device, side=side)
    num = 2
    # The first pass is slower, because it allocates and chooses kernels. It counts as time spent,
    # so that an estimate of a large model on a CPU takes seconds.
    before = passes.seconds(num)
    seconds = passes.seconds(num)
    while num < most and before + seconds <= _ENOUGH_SECONDS:
        num = whole_spans(min(2 * num, most), span)
        before = seconds
        seconds = passes.seconds(num)
    update = seconds_of(optimizer.step, backend.device)
    activations = passes.activation_bytes(num)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    kept_by_optimizer = state_bytes(optimizer)
    polish = recipe.polish or Polish.model_construct()
    # Weights and gradients, and an average where there is one.
    copies = 2 + (polish.ema is not None or polish.swa is not None)
    per_sample = seconds / num
    parts = plan.sized(range(plan.train_steps), otherwise=usual)
    parts.append((range(plan.train_steps, plan.updates), usual))
    # Convolutions take time in proportion to the pixels. Passes are counted in those of the largest
    # size, which was measured.
    num_passes = sum(
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
        run_seconds=per_sample * plan.device_batch * num_passes + update * plan.updates,
        memory_bytes=copies * weights + kept_by_optimizer + activations * plan.device_batch // num,
        sums=tuple(sum(sent_bytes(weight) for _, weight in group) for group in groups),
    )
