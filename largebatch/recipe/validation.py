"""Conflicts between the sections of a recipe.

Each rule yields one sentence for each conflict, with the keys and what to do; all conflicts of a
recipe are reported together. No rule relies on another: it checks what its own arithmetic needs.
"""

from collections.abc import Iterator

from largebatch.recipe.keys import Keys
from largebatch.recipe.optimizers import ScheduleFree


def find_conflicts(recipe: Keys) -> Iterator[str]:
    """Yield every conflict between the sections of a recipe; none if it is valid."""
    for rule in (
        _samples,
        _protocol,
        _polish,
        _schedule_free,
        _cache,
        _reduction,
        _monitors,
        _smoothing,
    ):
        yield from rule(recipe)


def _samples(recipe: Keys) -> Iterator[str]:
    data, polish, trained = recipe.data, recipe.polish, recipe.train_samples
    if data.train_split < 1:
        yield (
            f"data.held_out.samples ({data.val_split}) must be fewer than data.train_samples "
            f"({data.train_samples})"
        )
        return
    without = " less data.held_out" if data.held_out else ""
    if polish is not None and trained < 1:
        yield (
            f"polish.held_out ({polish.held_out}) must be fewer than data.train_samples{without} "
            f"({data.train_split})"
        )
        return
    if polish is not None and polish.statistics and polish.statistics.samples > trained:
        without += " less polish.held_out" if polish.held_out else ""
        yield (
            f"polish.statistics.samples ({polish.statistics.samples}) must not exceed "
            f"data.train_samples{without} ({trained})"
        )
    if isinstance(recipe.optimizer, ScheduleFree):
        samples = recipe.optimizer.statistics_samples
        if samples is not None and samples > trained:
            yield (
                f"optimizer.statistics_samples ({samples}) must not exceed the training images "
                f"({trained})"
            )


def _protocol(recipe: Keys) -> Iterator[str]:
    protocol, batch = recipe.protocol, recipe.batch
    if protocol is None:
        return
    for setting, given in _synchronous_settings(recipe).items():
        if given:
            yield f"{setting} has no meaning with protocol: leave one of the two out"
    if batch.global_batch % protocol.gradients:
        yield (
            f"batch.global_batch ({batch.global_batch}) must be a multiple of the "
            f"{protocol.gradients} gradients that an update of protocol.kind: {protocol.kind} takes"
        )
        return
    if protocol.split and recipe.optimizer.kind == "lars":
        yield (
            "protocol.split: LARS needs the norms of whole tensors, which no server would have; "
            "leave it out, or use optimizer.kind: sgd"
        )
    size = protocol.mini_batch(batch.global_batch)
    if size % (batch.bn_span or 1):
        yield (
            f"batch.bn_span ({batch.bn_span}) must divide the {size} samples of a learner's "
            "mini-batch (batch.global_batch over the gradients of an update): with protocol each "
            "learner normalises by itself"
        )
    if recipe.execution.device_batch not in {None, size}:
        yield (
            f"execution.device_batch ({recipe.execution.device_batch}) must be a learner's "
            f"mini-batch with protocol, which is {size}; leave it out"
        )


def _synchronous_settings(recipe: Keys) -> dict[str, bool]:
    polish, monitored = recipe.polish, set(recipe.monitor) - {"generalization_gap"}
    return {
        f"optimizer.kind: {recipe.optimizer.kind}": recipe.optimizer.kind not in {"lars", "sgd"},
        "model.early": recipe.model.early is not None,
        "batch.schedule": bool(recipe.batch.schedule),
        f"reduction.kind: {recipe.reduction.kind}": recipe.reduction.kind != "sum",
        f"reduction.dtype: {recipe.reduction.dtype}": recipe.reduction.dtype != "fp32",
        "precision: fp16": recipe.precision == "fp16",
        f"nonfinite.action: {recipe.nonfinite.action}": recipe.nonfinite.action != "stop",
        f"monitor: {min(monitored, default='')}": bool(monitored),
        "execution.decoder: dali": recipe.execution.decoder == "dali",
        "polish.ema": polish is not None and polish.ema is not None,
        "polish.swa": polish is not None and polish.swa is not None,
    }


def _polish(recipe: Keys) -> Iterator[str]:
    if recipe.polish is not None and recipe.batch.bn_span is None:
        yield "polish is for models with BatchNorm: give batch.bn_span too"


def _schedule_free(recipe: Keys) -> Iterator[str]:
    optimizer, polish = recipe.optimizer, recipe.polish
    if not isinstance(optimizer, ScheduleFree):
        return
    if recipe.schedule.decay.kind not in {"constant", "fix"}:
        yield (
            "optimizer.kind: schedule-free averages its weights instead of lowering the rate; "
            f"schedule.decay must be {{kind: constant}}, got {recipe.schedule.decay.kind}"
        )
    for key in ("ema", "swa"):
        if polish is not None and getattr(polish, key) is not None:
            yield (
                f"polish.{key} would average the weights that optimizer.kind: schedule-free "
                "averages already; leave it out"
            )
    if polish is not None and polish.clean and polish.keep == "better":
        yield (
            "polish.clean cannot be rolled back with optimizer.kind: schedule-free, whose "
            "average holds every update of the schedule; leave out clean or keep: better"
        )
    if (optimizer.statistics_samples is None) != (recipe.batch.bn_span is None):
        yield (
            "optimizer.statistics_samples is for models with BatchNorm: give it and "
            "batch.bn_span, or neither"
        )


def _cache(recipe: Keys) -> Iterator[str]:
    if recipe.data.source == "synthetic" and recipe.execution.cache is not None:
        yield (
            f"execution.cache: {recipe.execution.cache} would not be used: data.source: "
            "synthetic has no files"
        )


def _reduction(recipe: Keys) -> Iterator[str]:
    reduction, batch = recipe.reduction, recipe.batch
    if reduction.dtype == "fp16" and recipe.precision != "fp16":
        yield (
            "reduction.dtype: fp16 needs precision: fp16, whose loss scale keeps small "
            "gradients from vanishing; or send in bf16"
        )
    parts, span = reduction.parts, batch.bn_span or 1
    if parts is not None and batch.global_batch % (span * parts):
        yield (
            f"reduction.parts ({parts}) does not divide batch.global_batch ({batch.global_batch}) "
            f"into parts of whole BatchNorm spans; it must divide {batch.global_batch // span}"
        )
    if reduction.kind == "adasum" and batch.schedule:
        yield (
            "reduction.kind: adasum divides every batch into as many parts of the same size: "
            "leave batch.schedule out"
        )


def _monitors(recipe: Keys) -> Iterator[str]:
    if "noise_scale" in recipe.monitor and recipe.reduction.kind == "adasum":
        yield (
            "monitor: noise_scale compares gradients before and after their sum, and "
            "reduction.kind: adasum has none; leave one of the two out"
        )
    if "trust_ratios" in recipe.monitor and recipe.optimizer.kind != "lars":
        yield (
            f"monitor: trust_ratios is for optimizer.kind: lars, and this one is "
            f"{recipe.optimizer.kind}; leave it out (gradient_norm works with every optimizer)"
        )


def _smoothing(recipe: Keys) -> Iterator[str]:
    if recipe.loss.label_smoothing > 1 - 1 / recipe.data.classes:
        yield (
            f"loss.label_smoothing ({recipe.loss.label_smoothing:g}) makes the labelled one of "
            f"{recipe.data.classes} classes the least likely"
        )
