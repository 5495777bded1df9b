"""Describe parts of a plan: division, spans, decoding, the protocol."""

import math

from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe


def describe_division(plan: Plan) -> str:
    """Describe the division of the first global batch."""
    return (
        f"{plan.global_batch:,} = {plan.workers:,} workers x {plan.accumulation} micro-batches x "
        f"{plan.device_batch}"
    )


def describe_spans(plan: Plan) -> str:
    """Describe the BatchNorm spans and which workers share them."""
    if plan.bn_span is None:
        return "no BatchNorm"
    if plan.sync_workers == 1:
        return f"{plan.bn_span} samples, {plan.device_batch // plan.bn_span} in a device batch"
    share = math.gcd(*(piece.global_batch for piece in plan.pieces)) // plan.workers
    reason = "because of the device batch"
    if share % plan.bn_span:
        reason = f"a worker's {share} samples of the global batch are no whole spans"
    return (
        f"{plan.bn_span} samples = {plan.sync_workers} workers x {plan.device_batch}, which "
        f"exchange statistics ({reason})"
    )


def describe_decoding(recipe: Recipe) -> str:
    """Describe the source of the pixels."""
    execution = recipe.execution
    if recipe.data.source == "synthetic":
        return "synthetic"
    if execution.cache is None:
        return f"decoded by {execution.decoder or 'torchvision'}"
    where = "; on CPU workers: the same as memory" if execution.cache == "device" else ""
    return f"decoded once, cached as bytes (execution.cache: {execution.cache}{where})"


def describe_protocol(recipe: Recipe) -> str:
    """Describe the gradients of an update, and the place of the weights."""
    protocol, global_batch = recipe.protocol, recipe.batch.global_batch
    assert protocol is not None
    where = f"{protocol.dedicated} servers" if protocol.dedicated else "a server beside each"
    return (
        f"{protocol.kind}: {global_batch:,} samples an update = {protocol.gradients} gradients x "
        f"{protocol.mini_batch(global_batch):,}; {protocol.learners} learners, {where}: "
        f"{protocol.workers} workers"
    )
