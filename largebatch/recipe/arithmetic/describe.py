"""Describe parts of a plan: division, spans, the protocol."""

import math

from largebatch.formatting import plural
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.protocols import Protocol


def describe_division(plan: Plan) -> str:
    """Describe the division of the first global batch."""
    return _division(plan, plan.global_batch, plan.accumulation)


def describe_batch_changes(plan: Plan) -> dict[str, str]:
    """Describe each change of the global batch, by its step."""
    later = zip(plan.batch_changes, plan.within(range(plan.steps))[1:], strict=True)
    return {
        f"from {piece.step:,}": f"{_division(plan, size, accumulation)}, epoch "
        f"{plan.epoch(piece.step):.2f}, learning rate of the schedule x {piece.lr_factor:g}"
        for piece, (_, size, accumulation) in later
    }


def _division(plan: Plan, batch: int, accumulation: int) -> str:
    passes = plural(accumulation, "micro-batch", "micro-batches")
    workers = plural(plan.workers, "worker") + (f" x {passes}" if accumulation > 1 else "")
    return f"{batch:,} = {workers} x {plan.device_batch}"


def describe_spans(plan: Plan) -> str:
    """Describe the BatchNorm spans and which workers share them."""
    if plan.bn_span is None:
        return "no BatchNorm"
    if plan.sync_workers == 1:
        return f"{plan.bn_span} samples, {plan.device_batch // plan.bn_span} in a device batch"
    share = math.gcd(*(piece.global_batch for piece in plan.pieces)) // plan.workers
    reason = "because of the device batch"
    if share % plan.bn_span:
        reason = f"a worker's {share} samples are not a multiple of the span"
    return (
        f"{plan.bn_span} samples = {plan.sync_workers} workers x {plan.device_batch}, which "
        f"exchange statistics ({reason})"
    )


def describe_protocol(protocol: Protocol, *, global_batch: int) -> str:
    """Describe the gradients of an update, and the place of the weights."""
    where = f"{protocol.dedicated} servers" if protocol.dedicated else "a server beside each"
    return (
        f"{protocol.kind}: {global_batch:,} samples an update = {protocol.gradients} gradients x "
        f"{protocol.mini_batch(global_batch):,}; {protocol.learners} learners, {where}: "
        f"{protocol.workers} workers"
    )
