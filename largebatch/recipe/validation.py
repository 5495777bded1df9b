"""Conflicts between the sections of a recipe: each rule yields one sentence for each."""

import math
from collections.abc import Iterator

from largebatch.recipe.data import REPEATED
from largebatch.recipe.execution import DEFAULT_DECODER
from largebatch.recipe.keys import BinaryCrossEntropy, Keys
from largebatch.recipe.polish import Polish
from largebatch.recipe.protocols import Protocol


def find_conflicts(recipe: Keys) -> Iterator[str]:
    """Yield every conflict between the sections of a recipe; none if it is valid."""
    yield from _samples(recipe)
    if recipe.polish is not None:
        yield from _polish(recipe.polish, bn_span=recipe.batch.bn_span)
    yield from _pairs(recipe)
    if recipe.protocol is not None:
        yield from _protocol(recipe, recipe.protocol)
    stages = recipe.polish.others if recipe.polish is not None else ()
    protocols = [recipe.protocol] if recipe.protocol is not None else []
    for choice in (recipe.optimizer, recipe.schedule.decay, *stages, *protocols):
        yield from choice.conflicts(recipe)
    yield from _loss(recipe)
    yield from (conflict for conflict, is_given in _others(recipe).items() if is_given)


def _samples(recipe: Keys) -> Iterator[str]:
    data = recipe.data
    polish = recipe.polish
    trained = recipe.train_samples
    # Each of these makes the next one meaningless, so only the first is reported.
    if data.train_split < 1:
        total = data.train_samples
        yield f"data.held_out.samples ({data.val_split}) leave none of data.train_samples ({total})"
    elif polish is not None and trained < 1:
        yield f"polish.held_out ({polish.held_out}) leave none of the images ({data.train_split})"
    elif data.repeats > 1 and trained < REPEATED:
        yield (
            f"data.repeats ({data.repeats}) needs {REPEATED} or more training images, which follow "
            f"{data.repeats} times together; there are {trained}: leave data.repeats out"
        )
    else:
        statistics = polish.statistics if polish is not None else None
        samples = {
            "polish.statistics.samples": statistics.samples if statistics else None,
            "optimizer.statistics_samples": getattr(recipe.optimizer, "statistics_samples", None),
        }
        for key, number in samples.items():
            if number is not None and number > trained:
                yield f"{key} ({number}) must not exceed the training images ({trained})"


def _pairs(recipe: Keys) -> Iterator[str]:
    if recipe.data.mix is None:
        return
    whole = math.lcm(2, recipe.batch.bn_span or 1)
    for key, size in recipe.batch.by_key.items():
        if size % 2:
            below = size // whole * whole
            possible = f"{below} or {below + whole}" if below else f"{whole}"
            yield (
                f"{key} ({size}) must be even, because data.mix mixes pairs of images: give "
                f"{possible}, or leave data.mix out"
            )


def _protocol(recipe: Keys, protocol: Protocol) -> Iterator[str]:
    batch = recipe.batch
    polish = recipe.polish
    execution = recipe.execution
    # A gap is measured in evaluations; the other monitors follow the step of all workers.
    monitored = set(recipe.monitor) - {"generalization_gap"}
    # Servers apply gradients one by one: there is no step of all workers that these could be in.
    synchronous = {
        f"optimizer.kind: {recipe.optimizer.kind}": not recipe.optimizer.takes_late_gradients,
        "model.early": recipe.model.early is not None,
        "model.backbone": recipe.model.backbone is not None,
        "optimizer.clip_norm": recipe.optimizer.clip_norm is not None,
        "optimizer.layer_decay": recipe.optimizer.layer_decay is not None,
        "batch.schedule": bool(batch.schedule),
        "data.mix": recipe.data.mix is not None,
        f"reduction.dtype: {recipe.reduction.dtype}": recipe.reduction.dtype != "fp32",
        "precision: fp16": recipe.precision == "fp16",
        f"nonfinite.action: {recipe.nonfinite.action}": recipe.nonfinite.action != "stop",
        f"monitor: {min(monitored, default='')}": bool(monitored),
        f"execution.decoder: {execution.decoder}": execution.decoder not in {None, DEFAULT_DECODER},
        f"execution.replay_every: {execution.replay_every}": execution.replay_every is not None,
        "execution.graph: true": execution.graph is True,  # learners send each gradient by itself
        "polish.ema": polish is not None and polish.ema is not None,
        "polish.swa": polish is not None and polish.swa is not None,
    }
    for setting, is_given in synchronous.items():
        if is_given:
            yield f"{setting} has no meaning with protocol: leave one of the two out"
    if batch.global_batch % protocol.gradients:
        yield (
            f"batch.global_batch ({batch.global_batch}) must be a multiple of the "
            f"{protocol.gradients} gradients that an update of protocol.kind: {protocol.kind} takes"
        )
        return  # no mini-batch has a size that the rest could be compared with
    size = protocol.mini_batch(batch.global_batch)
    if size % (batch.bn_span or 1):
        yield (
            f"batch.bn_span ({batch.bn_span}) must divide the {size} samples of a learner's "
            "mini-batch: with protocol each learner normalises by itself"
        )
    if execution.device_batch not in {None, size}:
        yield (
            f"execution.device_batch ({execution.device_batch}) must be a learner's mini-batch "
            f"with protocol, which is {size}; leave it out"
        )


def _loss(recipe: Keys) -> Iterator[str]:
    loss = recipe.loss
    classes = recipe.data.classes
    smoothing = loss.label_smoothing
    weights = loss.class_weights
    # The label keeps 1 - s and the others share s: above 1 - 1 / classes each of them has more.
    if smoothing > 1 - 1 / classes:
        yield (
            f"loss.label_smoothing ({smoothing:g}) makes the labelled one of {classes} classes the "
            "least likely"
        )
    if isinstance(weights, tuple) and len(weights) != classes:
        yield (
            f"loss.class_weights must have a number for each of {classes} classes, got "
            f"{len(weights)}"
        )
    if isinstance(loss, BinaryCrossEntropy) and loss.target_threshold is not None:
        low = smoothing / classes
        high = 1 - smoothing + low
        if not low <= loss.target_threshold < high:
            yield (
                f"loss.target_threshold ({loss.target_threshold:g}) makes all targets equal: with "
                f"this label_smoothing it must be at least {low:.4g} and below {high:.4g}"
            )


def _others(recipe: Keys) -> dict[str, bool]:
    """Return the conflicts of a few keys, and True for each that a recipe has."""
    cache = recipe.execution.cache
    backbone = recipe.model.backbone
    return {
        "model.backbone.frozen would keep random weights: give model.weights too": (
            backbone is not None and backbone.frozen is not None and recipe.model.weights is None
        ),
        f"execution.cache: {cache} would not be used: data.source: synthetic has no files": (
            cache in {"memory", "device"} and recipe.data.source == "synthetic"
        ),
        "reduction.dtype: fp16 needs precision: fp16, whose loss scale keeps small gradients from "
        "vanishing; or send in bf16": recipe.reduction.dtype == "fp16"
        and recipe.precision != "fp16",
        f"monitor: trust_ratios is for optimizer.kind: lars, got {recipe.optimizer.kind}": (
            "trust_ratios" in recipe.monitor and not recipe.optimizer.has_trust_ratios
        ),
        # It compares gradients of parts of the batch as if no image were in two of them.
        "monitor: noise_scale needs independent images: leave it or data.repeats out": (
            "noise_scale" in recipe.monitor and recipe.data.repeats > 1
        ),
    }


def _polish(polish: Polish, *, bn_span: int | None) -> Iterator[str]:
    if bn_span is None:
        for key in ("affine", "statistics"):
            if getattr(polish, key) is not None:
                yield f"polish.{key} is for models with BatchNorm: give batch.bn_span too"
    elif polish.swa is not None and polish.statistics is None:
        yield (
            "polish.swa needs polish.statistics: the running statistics of an average belong to "
            "other weights"
        )
