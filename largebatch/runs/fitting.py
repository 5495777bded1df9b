"""The device batch that fits the memory of an accelerator, and a smaller one after it did not.

It is kept in the run folder: a resumed run rounds as before and measures nothing.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import PositiveInt, TypeAdapter
from torch import nn

from largebatch import accelerator
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import DeviceMemoryError, PlanError, SmallerBatchError
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.passes import Passes, largest_side, whole_spans
from largebatch.storage import write_whole, writing
from largebatch.tracking.events import CHECKPOINTS
from largebatch.training.session import Session

KEPT = "device_batch.json"
"""File in a run folder with a `_Kept`, as a JSON list."""


class _Kept(NamedTuple):
    """The device batch of a run, and the machine that it was chosen for."""

    device_batch: PositiveInt
    workers: PositiveInt
    device: str
    """Type of the workers' devices."""

    reason: str
    """Why it was made smaller; empty if it was not."""

    evaluation_batch: PositiveInt | None
    """Samples of a batch that is evaluated; None if as many."""


_KEPT = TypeAdapter(_Kept)

SHARE = 0.8
"""Part of the free memory that is used; the rest is for copies of input and fragmentation."""

BESIDE = 0.05
"""Part of the free memory for a batch that is evaluated, since a graph of training passes keeps
SHARE of it. A graph of the evaluation takes as much again; half of the rest stays free."""

_PART = 1 / 8
"""Part of the free memory that the second measurement aims at."""

_COPIES = 4  # copies of the weights besides the gradients: moments, averages and sums


def resolve(
    recipe: Recipe, draft: Plan, model: nn.Module, backend: Backend, *, resumes: Path | None
) -> tuple[Plan, list[str]]:
    """Return the plan of a run, the same on all workers, and remarks on its device batch.

    `draft` is any plan of the recipe for these workers. The device batch is that of the recipe, or
    of the run in the folder `resumes`, or the largest that fits the memory that is free now.
    """
    if not recipe.sums_gradients or recipe.execution.device_batch is not None:
        return draft, []
    remarks: list[str] = []
    if resumes is not None:
        plan, remarks = kept_plan(recipe, resumes, backend)
        if plan is not None:
            return plan, remarks if plan != draft else []
    if not accelerator.is_remote(backend.device):
        return draft, remarks
    plan, reason = fitted_plan(recipe, draft, model, backend)
    return plan, [reason, *remarks]


def fitted_plan(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> tuple[Plan, str]:
    """Return the plan with the largest device batch that fits every worker, and the reason.

    `plan` is any plan of the recipe for these workers. The model does not change.
    """
    *fits, reason = measure(recipe, plan, model, backend)
    of_workers = backend.all_gather(torch.tensor(fits).to(backend.device)).view(-1, 2)
    images, evaluated = of_workers.amin(dim=0).tolist()  # sync: once, before training
    fitted = make_plan(recipe, workers=plan.workers, backend=backend.name, fits=images)
    fitted = _with_evaluations(fitted, evaluated)
    fewer = f", {evaluated:,} at a time in evaluations" if fitted.evaluation_batch else ""
    return fitted, (
        f"device batch {fitted.device_batch:,} of a worker's {_share(plan):,} samples in an "
        f"update: {images:,} fit, {reason}{fewer} (execution.device_batch sets another)"
    )


def _with_evaluations(plan: Plan, evaluated: int | None) -> Plan:
    """Return the plan with batches of this size in evaluations, if they must be smaller."""
    if evaluated is None or evaluated >= plan.device_batch:
        return plan
    return replace(plan, evaluation_batch=evaluated)


def measure(recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend) -> tuple[int, int, str]:
    """Return the samples that this worker can train on and evaluate at once, and why, in words.

    The memory of a forward and backward pass is measured for two numbers of random samples, whole
    BatchNorm spans or part of one; its growth is the memory of a sample. An evaluation is measured
    with the second number. Raises DeviceMemoryError if not even the first of them fit.
    """
    device = backend.device
    most = _share(plan)
    span = plan.bn_span or 1
    side = largest_side(plan, usual=recipe.data.image_size)
    passes = Passes.of(recipe, model, device, side=side)
    free = accelerator.free_memory_bytes(device)

    def peak(num: int, *, evaluates: bool = False) -> int:
        try:
            num_bytes = passes.peak_bytes(num, evaluates=evaluates)
        except torch.OutOfMemoryError:
            raise DeviceMemoryError(
                f"{num:,} samples of {side} x {side} pixels do not fit the memory of {device}, of "
                f"which {free / 1e9:.3g} GB were free: take smaller images (data.image_size), a "
                "smaller model, or a larger GPU"
            ) from None
        # Else the next peak would not have the gradients, which this one has.
        model.zero_grad(set_to_none=True)
        return max(1, num_bytes)

    with _unchanged(model, device):
        few = whole_spans(2, span)
        low = peak(few)
        # The second number is as large as is surely safe, because a line through two near points is
        # uncertain.
        many = whole_spans(max(few, min(most, int(_PART * free * few / low))), span)
        high = peak(many)
        evaluation = peak(many, evaluates=True)
    sample_bytes = max(1.0, (high - low) / (many - few) if many > few else high / many)
    weights = sum(weight.nbytes for weight in model.parameters())
    # Libraries' workspaces, whatever the samples; and what an update needs besides a pass.
    fixed = max(0.0, high - many * sample_bytes) + _COPIES * weights
    fits = max(1, min(most, int((SHARE * free - fixed) / sample_bytes)))
    evaluated = max(1, int(BESIDE * free * many / evaluation))
    reason = (
        f"in {SHARE:.0%} of {free / 1e9:.3g} GB: {sample_bytes / 1e6:.3g} MB a sample of {side} x "
        f"{side} pixels, measured, and {fixed / 1e9:.3g} GB besides"
    )
    return fits, evaluated, reason


def keep(folder: Path, backend: Backend, plan: Plan, *, reason: str = "") -> None:
    """Write the device batch of a run into its folder, for `kept_plan`; or CheckpointError."""
    kept = _Kept(
        device_batch=plan.device_batch,
        workers=backend.world_size,
        device=backend.device.type,
        reason=reason,
        evaluation_batch=plan.evaluation_batch,
    )
    with writing(folder):
        write_whole(folder / KEPT, _KEPT.dump_json(kept))


def kept_plan(recipe: Recipe, folder: Path, backend: Backend) -> tuple[Plan | None, list[str]]:
    """Return the plan with the device batch of the run in `folder`, and remarks on it.

    The plan is None if that device batch is unknown, was another number of workers' or another type
    of device's, or does not divide the recipe. Worker 0 reads for all.
    """
    content = None
    with suppress(OSError):
        content = (folder / KEPT).read_bytes() if backend.rank == 0 else None
    try:
        kept = _KEPT.validate_json(broadcast_bytes(content, backend))
    except ValueError:  # a run of an earlier version has none
        return None, []
    remark = f"device batch {kept.device_batch:,}, as in this run before"
    remark = f"{kept.reason}; {remark}" if kept.reason else remark
    # Another number of workers has another share of a batch, and another device other memory.
    is_same_machine = (kept.workers, kept.device) == (backend.world_size, backend.device.type)
    with suppress(PlanError):  # the recipe was changed since, with --allow
        if is_same_machine:
            resumed = recipe.with_execution(device_batch=kept.device_batch)
            plan = make_plan(resumed, workers=backend.world_size, backend=backend.name)
            return _with_evaluations(plan, kept.evaluation_batch), [remark]
    return None, [f"{remark}, was for {kept.workers} x {kept.device}, and is chosen again"]


def halve(session: Session, folder: Path) -> SmallerBatchError:
    """Keep a smaller device batch in the folder of a run that ran out of memory.

    A single worker saves the run as of its last update. Several resume it from its newest
    checkpoint, if any, because the others wait for this one in the middle of an update.

    Raises DeviceMemoryError, with a smaller device batch, if the recipe gives another or this
    worker cannot reach the folder.
    """
    recipe = session.saver.recipe
    plan = session.plan
    backend = session.backend
    reducer = session.state.updater.reducer
    free = recipe.with_execution(device_batch=None)
    # The next smaller number that divides the batch into whole BatchNorm spans; the mathematics of
    # the run stay, because the global batch does.
    halved = make_plan(free, workers=plan.workers, fits=plan.device_batch // 2)
    if plan.evaluation_batch is not None:
        halved = _with_evaluations(halved, max(1, plan.evaluation_batch // 2))
    smaller = halved.device_batch
    where = f"device batch {plan.device_batch:,} does not fit the memory of {backend.device}"
    step = session.state.progress.step
    in_passes = reducer.in_passes
    if smaller >= plan.device_batch or not recipe.sums_gradients:
        pairs = " and pairs of mixed images" if recipe.data.mix is not None else ""
        raise DeviceMemoryError(
            f"{where}, and no smaller one divides the batch into whole BatchNorm spans{pairs}"
        )
    if recipe != free or not (folder / KEPT).exists():  # on a disk of another host
        raise DeviceMemoryError(
            f"{where} (after update {step:,}): continue with --device-batch {smaller} --resume auto"
        )
    # One of several stopped in the middle of an update that the others wait in: only the files of
    # the run know a state that all had.
    alone = backend.name == "serial"
    saves = alone and step and in_passes  # else weights may be those of half an update
    is_saved = saves or any((folder / CHECKPOINTS).glob("step-*"))
    error = SmallerBatchError(
        f"{where}: continuing with {smaller:,} from the "
        f"{'newest checkpoint' if is_saved else 'start, because nothing is saved'}; if nothing "
        "starts again, repeat the command with --resume auto"
    )
    error.alone = alone
    if alone:
        reducer.zero()
        gc.collect()  # the tensors of the pass that failed
        session.step_log.flush()
    session.log.note("train", str(error))
    if saves:
        session.saver.save()
    keep(folder, backend, halved, reason=where)
    return error


def _share(plan: Plan) -> int:
    """Return the samples of a worker in an update: a number that divides every global batch."""
    return math.gcd(*(piece.global_batch for piece in plan.pieces)) // plan.workers


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and generators, and remove gradients, at the end of the block."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device.index or 0], device_type=device.type):
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    model.zero_grad(set_to_none=True)
