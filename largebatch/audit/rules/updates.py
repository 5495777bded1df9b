"""What can be wrong with the workers and the updates that they make, in tables of rules."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.audit.subject import Subject
from largebatch.errors import shorten
from largebatch.formatting import plural, three_digits
from largebatch.rules import Rule

# The world.


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Workers that are connected, and those that were started."""

    workers: int
    hosts: int
    started: int
    starter: str
    """What started them."""


WORLD: tuple[Rule[World], ...] = (
    Rule(
        check="world size",
        level="fault",
        when=lambda e: e.started > e.workers,
        text=lambda e: (
            f"{plural(e.workers, 'worker')} connected, but the {e.starter} started {e.started}: "
            "each world trains alone"
        ),
        remedy="initialise the process group from the launcher's variables: hvd.init, or "
        "init_process_group with env://, and torchrun with --nnodes and --rdzv-endpoint",
        figure=lambda e: float(e.started),
    ),
    Rule(
        check="world size",
        level="fine",
        text=lambda e: f"{plural(e.workers, 'worker')} on {plural(e.hosts, 'host')}, as launched",
        figure=lambda e: float(e.workers),
    ),
)


def _not_given(name: str, check: str, argument: str) -> Rule[Subject]:
    return Rule(
        check=check,
        level="unknown",
        when=lambda subject: getattr(subject, name) is None,
        text="not examined",
        remedy=f"give {argument}",
        argument=argument,
    )


_VALIDATION = "val_loader= (the validation loader of this worker)"

GIVEN: tuple[Rule[Subject], ...] = (
    _not_given(
        "base",
        "rate for the batch",
        "base= (a global batch and the rate that trained well with it)",
    ),
    _not_given("epochs", "updates", "epochs= (the length of the run)"),
    _not_given("val_loader", "held-out samples", _VALIDATION),
    _not_given("val_loader", "evaluation samples", _VALIDATION),
    _not_given("evaluate", "evaluation mean", "evaluate= (a function that returns your metric)"),
)
"""Arguments without which checks are not made. That of `rate` is in `rules/rates.py`: moves of a
scheduler can replace it."""

# The updates that `step` makes.


class StepMaker(NamedTuple):
    """Who makes the step."""

    is_audit: bool
    """True if the script passes none."""


STEP_MAKER: tuple[Rule[StepMaker], ...] = (
    Rule(
        check="updates",
        level="fine",
        when=lambda e: e.is_audit,
        text="the audit's own: zero_grad, forward, loss, backward, step; step= audits yours",
    ),
)


class UpdatesOfWorkers(NamedTuple):
    """Numbers of updates after a call of the step."""

    fewest: int
    most: int


UPDATES_OF_WORKERS: tuple[Rule[UpdatesOfWorkers], ...] = (
    Rule(
        check="updates",
        level="fault",
        when=lambda e: e.fewest < e.most,
        text=lambda e: f"workers made {e.fewest} to {e.most} updates",
        remedy="make the update in the same call of `step` on every worker",
        figure=lambda e: float(e.fewest),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What all calls of the step did."""

    calls: int
    updates: int
    skipped: int
    """Number of updates that a GradScaler skipped."""

    elsewhere: int
    """Number of steps of the optimizer if it has no parameter of the model."""

    tensors: int
    """Number of parameters of the model."""

    is_unchanged: bool
    """True if the model's weights are as before."""


_OPTIMIZE_MODEL = "make the optimizer from the parameters of the model that is trained, not a copy"

MADE: tuple[Rule[Made], ...] = (
    Rule(
        check="precision",
        level="note",
        when=lambda e: e.skipped > 0,
        text=lambda e: f"{e.updates} updates were made and {e.skipped} skipped",
        remedy="a GradScaler skips some at first; if it continues, gradients are infinite or NaN",
        figure=lambda e: float(e.skipped),
    ),
    Rule(
        check="updates",
        level="fault",
        when=lambda e: not e.updates and e.elsewhere > 0 and e.is_unchanged,
        text=lambda e: (
            f"the optimizer has 0 of {plural(e.tensors, 'tensor')} of the model, which stays as it "
            f"is in {plural(e.elsewhere, 'step')}"
        ),
        remedy=_OPTIMIZE_MODEL,
        figure=lambda _: 0.0,
    ),
    Rule(
        check="updates",
        level="unknown",
        when=lambda e: not e.updates and e.elsewhere > 0,
        text=lambda e: (
            f"the optimizer has 0 of {plural(e.tensors, 'tensor')} of the model: what it changes "
            "is copied into the model"
        ),
        remedy=_OPTIMIZE_MODEL,
    ),
    Rule(
        check="updates",
        level="unknown",
        when=lambda e: not e.updates,
        text=lambda e: f"no update in {e.calls:,} calls of step",
        remedy="make updates in `step`, with the optimizer passed; or pass more `steps`",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """Tensors of the optimizer that are not trained."""

    names: tuple[str, ...]
    number: int
    """Number of parameters of the model."""

    is_reduced_by_wrapper: bool
    """True if DistributedDataParallel reduces the gradients."""


FROZEN: tuple[Rule[Frozen], ...] = (
    Rule(
        check="updates",
        level="note",
        when=lambda e: bool(e.names) and e.is_reduced_by_wrapper,
        text=lambda e: (
            f"{len(e.names)} of {plural(e.number, 'tensor')} ({shorten(e.names, most=3)}) are in "
            "the optimizer and frozen: if they are trained later, their gradients are not reduced"
        ),
        remedy="wrap the model in DistributedDataParallel again whenever a layer is unfrozen: it "
        "reduces only what is trained when it is made",
        figure=lambda e: float(len(e.names)),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """Calls of the step, and where an epoch ends."""

    was_seen: bool
    """True if an update at an epoch's end was made, or has as many micro-batches as others."""

    window: int
    """Largest number of calls of an update."""

    length: int
    """Number of batches of an epoch; 0 if it is not known."""

    calls: int


EPOCH_END: tuple[Rule[EpochEnd], ...] = (
    Rule(
        check="updates",
        level="unknown",
        when=lambda e: not e.was_seen,
        text=lambda e: (
            f"no epoch's end was seen, where an update may have fewer than {e.window} "
            f"micro-batches: {e.length:,} batches, {e.calls} calls of the step"
        ),
        remedy=lambda e: (
            f"pass steps={math.ceil(e.length / e.window)} to reach it"
            if e.length
            else "give a loader whose length is known"
        ),
        figure=lambda e: float(e.calls),
    ),
)

# What is equal on all workers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Tensors that differ between workers."""

    other_sets: tuple[str, ...]
    """Names of those that not all workers have, or not in one shape; empty if all do."""

    unequal: tuple[str, ...]
    number: int
    """Number of all tensors."""

    most: float
    """Largest distance of a worker's tensor from the mean, over the mean's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Tensors of all workers, which one process has once."""

    difference: Difference | None
    when: str
    noun: str
    are_sent: bool = False
    """True if the wrapper sends worker 0's tensors before each pass."""


def _difference_text(e: Replicas) -> str:
    assert e.difference is not None
    if e.difference.other_sets:
        names = shorten(e.difference.other_sets, most=3)
        return f"workers have tensors of other names or shapes {e.when}: {names}"
    unequal = e.difference.unequal
    return (
        f"unequal on the workers {e.when}: {len(unequal)} of "
        f"{plural(e.difference.number, e.noun)} ({shorten(unequal, most=3)}), by up to "
        f"{three_digits(100 * e.difference.most)} % of the mean"
    )


def _difference_figure(e: Replicas) -> float | None:
    assert e.difference is not None
    return None if e.difference.other_sets else e.difference.most


def _replicas(check: str, remedy: str) -> tuple[Rule[Replicas], ...]:
    return (
        Rule(
            check=check,
            level="note",
            when=lambda e: e.difference is not None and e.are_sent,
            text=_difference_text,
            remedy="average over the workers what the layer adds to them, as SyncBatchNorm does: "
            "worker 0's are sent before each pass, and those of the others are lost",
            figure=_difference_figure,
        ),
        Rule(
            check=check,
            level="fault",
            when=lambda e: e.difference is not None,
            text=_difference_text,
            remedy=remedy,
            figure=_difference_figure,
        ),
        Rule(
            check=check,
            level="fine",
            text=lambda e: f"equal on all workers, before the audit and {e.when}",
        ),
    )


_STEP_EQUALLY = "step the same schedule equally often, in the same update, on every worker"

REPLICAS: Mapping[str, tuple[Rule[Replicas], ...]] = {
    "weights": _replicas(
        "weights", "give every worker worker 0's weights before training, and the same updates"
    ),
    "buffers": _replicas(
        "buffers", "broadcast the buffers (broadcast_buffers=True), or make them equal at the start"
    ),
    "optimizer state": _replicas(
        "optimizer state", "load or broadcast the optimizer's state on every worker"
    ),
    "learning rates": _replicas("learning rates", _STEP_EQUALLY),
    "averaged weights": _replicas(
        "averaged weights", "average on every worker after each update, from weights that all share"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalSettings:
    """The first setting of the optimizers' groups that differs in an update."""

    name: str
    update: int
    """Number of the update, counted from 1."""

    values: tuple[float, ...]
    """Value on each worker."""

    @property
    def most(self) -> float:
        """Largest distance of a worker's value from the mean, over the mean."""
        mean = sum(self.values) / len(self.values)
        return max(abs(value - mean) for value in self.values) / max(abs(mean), 1e-30)


SETTINGS: tuple[Rule[UnequalSettings], ...] = (
    Rule(
        check="learning rates",
        level="fault",
        text=lambda e: (
            ("learning rates differ" if e.name.endswith(" lr") else f"{e.name} differs")
            + f" in update {e.update} ({shorten([f'{value:.6g}' for value in e.values])})"
        ),
        remedy=_STEP_EQUALLY,
        figure=lambda e: e.most,
    ),
)


class AverageMoves(NamedTuple):
    """Moves of the averaged copy."""

    most: int
    """Largest number in an update."""


AVERAGE_MOVES: tuple[Rule[AverageMoves], ...] = (
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.most > 1,
        text=lambda e: (
            f"the averaged copy moves {e.most} times in an update, between its micro-batches"
        ),
        remedy="move it once an update",
        figure=lambda e: e.most,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatingLayers:
    """Layers that some workers train in evaluation mode."""

    layers: tuple[str, ...]
    evaluating: int
    """Number of workers that evaluate the first of them."""

    workers: int


MODES: tuple[Rule[EvaluatingLayers], ...] = (
    Rule(
        check="training mode",
        level="fault",
        when=lambda e: bool(e.layers),
        text=lambda e: (
            f"{e.evaluating} of {e.workers} workers train with {plural(len(e.layers), 'layer')} in "
            f"evaluation mode ({shorten(e.layers, most=3)}), the others do not"
        ),
        remedy="call model.train() before the training on all workers, and freeze the same layers",
        figure=lambda e: float(len(e.layers)),
    ),
)
