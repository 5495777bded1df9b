"""What a resumed run can lack of the state before the stop, in tables of rules.

Updates are counted from 1, as those of the whole run.
"""

import math
from dataclasses import dataclass

from largebatch.errors import shorten
from largebatch.formatting import plural, three_digits
from largebatch.rules import Rule

# Learning rates and the loss scale.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Learning rates, and other numbers of parameter groups, beside those of the whole."""

    updates: int
    groups: int
    update: int = 0
    """First update with another rate, counted from 1; 0 if there is none."""

    name: str = "learning rate"
    """Name of the number that differs: learning rate, momentum."""

    group: int = 0
    """First group that differs."""

    differing_groups: int = 0
    resumed: tuple[float, ...] = ()
    """First rates of the rest from this update on, of this group."""

    reference: tuple[float, ...] = ()
    """Rates of the whole."""

    begins_again: bool = False
    """True if all rates of the rest are those from the first update of the whole on."""

    is_first_only: bool = False
    """True if only the rest's first rate differs, and no scheduler counts otherwise."""

    warms_up: bool = False
    """True if the rates that begin again rise, or rise to those of the whole."""

    shift: int | None = None
    """Updates by which the rest is ahead of the whole; None if no number explains the rates."""

    counters: tuple[int, int] | None = None
    """`last_epoch` of the first scheduler that differs, in the rest and in the whole."""

    is_after_weights: bool = False
    """True if weights differ before the rates do, and no scheduler counts otherwise."""

    moves: int = 0
    """Moves of schedulers in the rest."""

    moves_of_whole: int = 0
    """Moves in the whole in the same updates."""


def _rates_text(e: Rates) -> str:
    where = f" of group {e.group + 1}" if e.groups > 1 and e.differing_groups < e.groups else ""
    resumed = ", ".join(f"{value:.4g}" for value in e.resumed)
    reference = ", ".join(f"{value:.4g}" for value in e.reference)
    return f"{e.name}{where} from update {e.update:,} on: {resumed}; in the whole: {reference}"


def _counters_text(e: Rates) -> str:
    if e.counters is None:
        return ""
    return f"; the scheduler's last_epoch is {e.counters[0]}, not {e.counters[1]}"


def _times(number: int) -> str:
    return "once" if number == 1 else plural(number, "time")


def _figure_of_rates(e: Rates) -> float:
    return abs(e.resumed[0] - e.reference[0]) / max(abs(e.reference[0]), 1e-30)


_LOAD_SCHEDULER = "scheduler.load_state_dict(checkpoint['scheduler'])"

RATES: tuple[Rule[Rates], ...] = (
    Rule(
        check="learning rates",
        level="fine",
        when=lambda e: e.update == 0,
        text=lambda e: (
            f"rates and settings of {plural(e.groups, 'group')} in {plural(e.updates, 'update')} "
            "as in the whole"
        ),
    ),
    Rule(
        check="learning rates",
        level="note",
        when=lambda e: e.is_after_weights,
        text=lambda e: f"{_rates_text(e)}: after the weights differ",
        remedy="nothing here if the schedule follows a metric",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.is_first_only,
        text=lambda e: (
            f"{e.name} of update {e.update:,}, and of no later one, is {e.resumed[0]:.4g}; in the "
            f"whole: {e.reference[0]:.4g}: the optimizer has it until the scheduler moves"
        ),
        remedy="load the optimizer's state after the scheduler is made, which sets rates",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.moves == 0 < e.moves_of_whole,
        text=lambda e: f"{_rates_text(e)}: no scheduler moves in the rest",
        remedy="make the scheduler from the optimizer that is trained, and step it after a resume",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.begins_again and e.warms_up,
        text=lambda e: f"{_rates_text(e)}: the schedule begins again, with its warm-up",
        remedy=f"{_LOAD_SCHEDULER}, or compute rates from the number of all updates",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.begins_again,
        text=lambda e: f"{_rates_text(e)}: the schedule begins again{_counters_text(e)}",
        remedy=f"{_LOAD_SCHEDULER} (after the optimizer's)",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.counters is not None and e.counters[0] > e.counters[1],
        text=lambda e: (
            f"{_rates_text(e)}{_counters_text(e)}: stepped "
            f"{_times(e.counters[0] - e.counters[1]) if e.counters else ''} too often"
        ),
        remedy="load the scheduler's state and do not step it for the saved epoch again; save "
        "after scheduler.step()",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.warms_up,
        text=lambda e: f"{_rates_text(e)}: warm-up again",
        remedy="warm up by the number of all updates, not by those since the start of the process",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.counters is not None,
        text=lambda e: f"{_rates_text(e)}{_counters_text(e)}",
        remedy=f"{_LOAD_SCHEDULER}; save it after scheduler.step()",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.shift is not None and e.shift > 0,
        text=lambda e: (
            f"{_rates_text(e)}: those of the whole {plural(e.shift or 0, 'update')} later"
        ),
        remedy="begin the schedule at the number of updates that were made: the rest steps it too "
        "often",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        when=lambda e: e.shift is not None,
        text=lambda e: (
            f"{_rates_text(e)}: those of the whole {plural(-(e.shift or 0), 'update')} earlier"
        ),
        remedy="begin the schedule at the number of updates that were made; save it after its step",
        figure=_figure_of_rates,
    ),
    Rule(
        check="learning rates",
        level="fault",
        text=_rates_text,
        remedy="optimizer.load_state_dict(checkpoint['optimizer']), and compute rates from the "
        "number of all updates",
        figure=_figure_of_rates,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Loss scale before the rest's first update, and GradScaler's count towards the next one."""

    resumed: float | None
    reference: float | None
    at_start: float | None
    """Scale of the first update of the whole."""

    growth: int | None = None
    """Updates without an overflow that the rest has counted."""

    reference_growth: int | None = None


_LOAD_SCALER = "scaler.load_state_dict(checkpoint['scaler']), saved by scaler.state_dict()"

LOSS_SCALE: tuple[Rule[Scale], ...] = (
    Rule(
        check="loss scale",
        level="fine",
        when=lambda e: e.resumed == e.reference and e.growth == e.reference_growth,
        text=lambda e: f"{e.resumed or 0:g}, as in the whole",
    ),
    Rule(
        check="loss scale",
        level="fault",
        when=lambda e: e.resumed is None,
        text=lambda e: f"the rest has none, the whole has {e.reference or 0:g}",
        remedy="scale the loss after a resume too: scaler.scale(loss).backward()",
    ),
    Rule(
        check="loss scale",
        level="fault",
        when=lambda e: e.reference is None,
        text=lambda e: f"{e.resumed or 0:g}; the whole has none",
        remedy="train with or without a GradScaler in both parts",
    ),
    Rule(
        check="loss scale",
        level="fault",
        when=lambda e: e.resumed == e.reference,
        text=lambda e: (
            f"GradScaler counts {e.growth} updates without an overflow, not {e.reference_growth}: "
            "the next scale comes at another update"
        ),
        remedy=_LOAD_SCALER,
        figure=lambda e: float((e.growth or 0) - (e.reference_growth or 0)),
    ),
    Rule(
        check="loss scale",
        level="fault",
        when=lambda e: e.resumed == e.at_start,
        text=lambda e: f"{e.resumed:g} as at the start of the run, not {e.reference:g}",
        remedy=_LOAD_SCALER,
        figure=lambda e: (e.resumed or 0) / (e.reference or math.nan),
    ),
    Rule(
        check="loss scale",
        level="fault",
        text=lambda e: f"{e.resumed:g}, not {e.reference:g}",
        remedy=_LOAD_SCALER,
        figure=lambda e: (e.resumed or 0) / (e.reference or math.nan),
    ),
)

# Tensors.


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Tensors of one kind before the rest's first update, beside those of the whole there."""

    number: int
    """Number of tensors that the whole has."""

    missing: tuple[str, ...] = ()
    """Names of those that the rest does not have."""

    unequal: tuple[str, ...] = ()
    """Names of those that have other bits."""

    initial: int = 0
    """Number of unequal ones that are those of the whole before its first update."""

    copied: int = 0
    """Number of unequal ones that are another's: of weights, the average's; of buffers, worker 0's;
    of an average, the resumed weights."""

    zeros: int = 0
    """Number of unequal ones that are all zeros."""

    exchanged: int = 0
    """Number of unequal ones that are another tensor's of the whole."""

    other_update: int | None = None
    """Updates after which the whole has all of the unequal ones; None if there is no such update.
    """

    expected_update: int = 0
    """Updates before the stop."""

    distance: float = math.nan
    """Largest relative distance of an unequal tensor, estimated; NaN if it is not known."""

    missing_keys: tuple[str, ...] = ()
    """Keys that load_state_dict(strict=False) left as they were."""

    unused_keys: tuple[str, ...] = ()
    """Keys of the file that it did not use."""

    workers: tuple[int, ...] = ()
    """Workers on which it differs, if not on all."""

    @property
    def wrong(self) -> int:
        """Number of tensors that are missing or unequal."""
        return len(self.missing) + len(self.unequal)

    @property
    def is_copied(self) -> bool:
        """True if all that differs is another's."""
        return 0 < self.wrong == self.copied

    @property
    def is_new(self) -> bool:
        """True if all that differs is as in a model that was just made."""
        return 0 < self.wrong == self.initial

    @property
    def part(self) -> float:
        """Part of the tensors that is missing or unequal."""
        return self.wrong / max(1, self.number)

    @property
    def is_rounded(self) -> bool:
        """True if tensors differ by no more than a smaller type rounds."""
        return self.distance < _ROUNDED and self.part > 0.5

    @property
    def prefix(self) -> str:
        """Prefix of all unused keys, such as `module.`; empty if there is none in common."""
        for prefix in ("_orig_mod.", "module.", "model."):
            if self.unused_keys and all(prefix in key for key in self.unused_keys):
                return prefix
        return ""


def _tensors(e: Restored, noun: str) -> str:
    names = shorten([*e.missing, *e.unequal], most=3)
    text = f"{e.wrong:,} of {plural(e.number, noun)} ({names})"
    if e.workers:
        text += f" on {plural(len(e.workers), 'worker')} ({', '.join(map(str, e.workers))})"
    return text


def _by(e: Restored) -> str:
    if math.isnan(e.distance) or math.isinf(e.distance):
        return ""
    return f", by up to {three_digits(100 * e.distance)} %"


def _unused(e: Restored) -> str:
    if not e.unused_keys:
        return ""
    names = shorten(e.unused_keys, most=2)
    return (
        f"; load_state_dict(strict=False) left {plural(len(e.unused_keys), 'key')} of the file "
        f"unused ({names})"
    )


def _load_by_keys(e: Restored) -> str:
    if e.prefix:
        return (
            f"remove the prefix: {{key.removeprefix('{e.prefix}'): value for key, value in "
            "state.items()}, and load with strict=True"
        )
    if e.unused_keys or e.missing_keys:
        return "load with strict=True, and give the keys the names of the model"
    return "model.load_state_dict(checkpoint['model'])"


_ROUNDED = 0.01
"""Largest relative distance of a tensor that was saved in a smaller type: bfloat16's is 0.004."""


def _older(check: str, noun: str) -> Rule[Restored]:
    return Rule(
        check=check,
        level="fault",
        when=lambda e: e.other_update is not None and not e.missing,
        text=lambda e: (
            f"{_tensors(e, noun)} are those after {plural(e.other_update or 0, 'update')}, not "
            f"{e.expected_update:,}"
        ),
        remedy="save after the last update of an epoch, and load the newest file",
        figure=lambda e: float((e.other_update or 0) - e.expected_update),
    )


def _equal(check: str, noun: str) -> Rule[Restored]:
    return Rule(
        check=check,
        level="fine",
        when=lambda e: not e.wrong,
        text=lambda e: f"{plural(e.number, noun)} restored bit for bit",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """The rest's first update, where nothing was loaded."""

    resumed_from: tuple[str, ...]
    """Files that the rest read before it."""


NEW_RUN: tuple[Rule[NewRun], ...] = (
    Rule(
        check="weights",
        level="fault",
        text=lambda e: (
            "the rest begins as a new run: weights, optimizer state, rates and samples of its "
            "first update are those of update 1"
            + (f"; it read {shorten(e.resumed_from, most=3)}" if e.resumed_from else "")
        ),
        remedy="give --rest the file that the first part saves, and load from it the model, the "
        "optimizer, the scheduler and the epoch",
    ),
)

WEIGHTS: tuple[Rule[Restored], ...] = (
    Rule(
        check="weights",
        level="unknown",
        when=lambda e: not e.number,
        text="the weights before the rest were not seen",
        remedy="train parameters of a torch module with an optimizer of torch",
    ),
    _equal("weights", "tensor"),
    Rule(
        check="weights",
        level="fault",
        when=lambda e: bool(e.missing),
        text=lambda e: f"{_tensors(e, 'tensor')}: the rest trains another model or other parts",
        remedy="build the same model, and freeze the same layers, after a resume",
        figure=lambda e: e.part,
    ),
    Rule(
        check="weights",
        level="fault",
        when=lambda e: e.is_new,
        text=lambda e: f"{_tensors(e, 'tensor')} are those of a new model{_unused(e)}",
        remedy=_load_by_keys,
        figure=lambda e: e.part,
    ),
    Rule(
        check="weights",
        level="fault",
        when=lambda e: e.is_copied,
        text=lambda e: f"{_tensors(e, 'tensor')} are those of the averaged copy",
        remedy="load the trained weights into the model, and the average into its copy",
        figure=lambda e: e.part,
    ),
    _older("weights", "tensor"),
    Rule(
        check="weights",
        level="fault",
        when=lambda e: e.is_rounded,
        text=lambda e: f"{_tensors(e, 'tensor')} are rounded{_by(e)}",
        remedy="save weights in the type in which they are trained, without .half() or .bfloat16()",
        figure=lambda e: e.distance,
    ),
    Rule(
        check="weights",
        level="fault",
        text=lambda e: f"{_tensors(e, 'tensor')} are not those before the stop{_by(e)}{_unused(e)}",
        remedy=lambda e: (
            "load on every worker the file that was saved last"
            if e.workers
            else f"{_load_by_keys(e)}, after all that changes the weights"
        ),
        figure=lambda e: e.part,
    ),
)


def _only_counts(e: Restored) -> bool:
    return all(name.endswith("num_batches_tracked") for name in (*e.missing, *e.unequal))


BUFFERS: tuple[Rule[Restored], ...] = (
    _equal("buffers", "buffer"),
    Rule(
        check="buffers",
        level="note",
        when=_only_counts,
        text=lambda e: f"{_tensors(e, 'buffer')} count other batches",
        remedy="nothing with a momentum; with momentum=None, load them too",
        figure=lambda e: e.part,
    ),
    Rule(
        check="buffers",
        level="fault",
        when=lambda e: bool(e.missing),
        text=lambda e: f"{_tensors(e, 'buffer')}: the rest does not have them",
        remedy="build the same model after a resume: the same norms and track_running_stats",
        figure=lambda e: e.part,
    ),
    Rule(
        check="buffers",
        level="fault",
        when=lambda e: e.is_new,
        text=lambda e: f"{_tensors(e, 'buffer')} are those of a new model{_unused(e)}",
        remedy=lambda e: (
            _load_by_keys(e)
            if e.unused_keys
            else "save model.state_dict(), which has buffers, not parameters alone; load with "
            "strict=True"
        ),
        figure=lambda e: e.part,
    ),
    Rule(
        check="buffers",
        level="note",
        when=lambda e: e.is_copied,
        text=lambda e: f"{_tensors(e, 'buffer')} are worker 0's",
        remedy="nothing if worker 0's are sent before each pass; else save those of each worker",
        figure=lambda e: e.part,
    ),
    _older("buffers", "buffer"),
    Rule(
        check="buffers",
        level="fault",
        text=lambda e: f"{_tensors(e, 'buffer')} are not those before the stop{_by(e)}{_unused(e)}",
        remedy="save model.state_dict() of each worker that has its own, and make no forward pass "
        "in training mode before the first update",
        figure=lambda e: e.part,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """State of an optimizer before the rest's first update, and its parameter groups."""

    tensors: Restored
    """Its state by `parameter:key`."""

    keys: tuple[str, ...] = ()
    """What is missing or unequal of a parameter: momentum_buffer, exp_avg, step."""

    sizes: tuple[int, ...] = ()
    """Tensors in each parameter group of the rest."""

    reference_sizes: tuple[int, ...] = ()
    parameters: int = 0
    """Number of parameters that lack a value."""

    parameters_with_state: int = 0
    """Number of parameters that have state in the whole."""

    steps: tuple[float, float] | None = None
    """Steps that the optimizer counts, in the rest and in the whole, if they differ."""

    optimizer: int = 0
    """Number of the optimizer."""

    optimizers: int = 1


def _state_text(e: OptimizerState) -> str:
    owner = f"optimizer {e.optimizer + 1}: " if e.optimizers > 1 else ""
    return owner + _tensors(e.tensors, "value")


def _of_groups(e: OptimizerState) -> str:
    if e.sizes == e.reference_sizes:
        return ""
    sizes = " + ".join(map(str, e.sizes))
    return f"; its groups have {sizes} tensors, not {' + '.join(map(str, e.reference_sizes))}"


_LOAD_OPTIMIZER = "optimizer.load_state_dict(checkpoint['optimizer'])"
_SAME_GROUPS = (
    f"make the parameter groups as before the stop, then {_LOAD_OPTIMIZER}; add none after it"
)

OPTIMIZER_STATE: tuple[Rule[OptimizerState], ...] = (
    Rule(
        check="optimizer state",
        level="fine",
        when=lambda e: not e.tensors.wrong and e.sizes == e.reference_sizes,
        text=lambda e: f"{plural(e.tensors.number, 'value')} restored bit for bit",
    ),
    Rule(
        check="optimizer state",
        level="note",
        when=lambda e: not e.tensors.wrong,
        text=lambda e: f"{plural(e.tensors.number, 'value')} restored{_of_groups(e)}",
        remedy="nothing if the groups have the same rates and decays",
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: 0 < len(e.tensors.missing) == e.tensors.number,
        text=lambda e: (
            f"none before the rest's first update: {_state_text(e)} are missing{_of_groups(e)}"
        ),
        remedy=lambda e: (
            f"save optimizer.state_dict(), and {_LOAD_OPTIMIZER}"
            if e.sizes == e.reference_sizes
            else _SAME_GROUPS
        ),
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: 0 < e.parameters < e.parameters_with_state,
        text=lambda e: (
            f"{e.parameters:,} of {plural(e.parameters_with_state, 'parameter')} have no "
            f"{shorten(e.keys, most=3)}: {_state_text(e)}{_of_groups(e)}"
        ),
        remedy=f"make the parameter groups as before the stop, then "
        f"{_LOAD_OPTIMIZER}; add or unfreeze none after it",
        figure=lambda e: e.parameters / e.parameters_with_state,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: bool(e.tensors.missing),
        text=lambda e: f"{_state_text(e)} are missing: {shorten(e.keys, most=3)}",
        remedy=f"keep the optimizer's kind and settings, and {_LOAD_OPTIMIZER}",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: 0 < e.tensors.zeros == len(e.tensors.unequal),
        text=lambda e: f"{_state_text(e)} are zero: {shorten(e.keys, most=3)}",
        remedy=f"save optimizer.state_dict(), and {_LOAD_OPTIMIZER}",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: 0 < e.tensors.exchanged == len(e.tensors.unequal),
        text=lambda e: f"{_state_text(e)} are those of other parameters{_of_groups(e)}",
        remedy="give the optimizer its parameters in the order in which they were saved",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: e.tensors.other_update is not None,
        text=lambda e: (
            f"{_state_text(e)} are those after {plural(e.tensors.other_update or 0, 'update')}, "
            f"not {e.tensors.expected_update:,}"
        ),
        remedy="save model and optimizer together, after the update",
        figure=lambda e: float((e.tensors.other_update or 0) - e.tensors.expected_update),
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: e.steps is not None and set(e.keys) == {"step"},
        text=lambda e: (
            f"{_state_text(e)} count {e.steps[0] if e.steps else 0:g} steps, not "
            f"{e.steps[1] if e.steps else 0:g}: the bias correction differs"
        ),
        remedy=f"{_LOAD_OPTIMIZER}; do not set 'step' after it",
        figure=lambda e: e.steps[0] - e.steps[1] if e.steps else None,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        when=lambda e: e.tensors.is_rounded,
        text=lambda e: f"{_state_text(e)} are rounded{_by(e.tensors)}",
        remedy="save the optimizer's state in the type that it has",
        figure=lambda e: e.tensors.distance,
    ),
    Rule(
        check="optimizer state",
        level="fault",
        text=lambda e: (
            f"{_state_text(e)} are not those before the stop{_by(e.tensors)}: "
            f"{shorten(e.keys, most=3)}"
        ),
        remedy=lambda e: (
            f"{_LOAD_OPTIMIZER} on every worker" if e.tensors.workers else _LOAD_OPTIMIZER
        ),
        figure=lambda e: e.tensors.part,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Averages:
    """Averaged copies of the model before the rest's first update that has one."""

    tensors: Restored
    count: int | None = None
    """Updates that the rest's average counts."""

    reference_count: int | None = None
    parting: int = 0
    """Updates after which averages of equal weights differ, if they were restored; 0 if none do."""


AVERAGES: tuple[Rule[Averages], ...] = (
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: len(e.tensors.missing) == e.tensors.number,
        text=lambda e: (
            f"the rest has no average, the whole has one of {plural(e.tensors.number, 'tensor')}"
        ),
        remedy="make the average after a resume too, and load its state",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: bool(e.tensors.missing),
        text=lambda e: f"{_tensors(e.tensors, 'tensor')} are missing in the average",
        remedy="average the same tensors after a resume",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.tensors.is_copied,
        text=lambda e: (
            f"the average begins again from the resumed weights: {_tensors(e.tensors, 'tensor')}"
            f"{_by(e.tensors)}"
        ),
        remedy="ema.load_state_dict(checkpoint['ema']), after ema was made from the model",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.tensors.is_new,
        text=lambda e: (
            f"the average is that of a new model: {_tensors(e.tensors, 'tensor')}{_by(e.tensors)}"
        ),
        remedy="save ema.state_dict(), and ema.load_state_dict(checkpoint['ema'])",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.tensors.other_update is not None,
        text=lambda e: (
            f"the average is that after {plural(e.tensors.other_update or 0, 'update')}, "
            f"not {e.tensors.expected_update:,}: {_tensors(e.tensors, 'tensor')}"
        ),
        remedy="save the average after it was updated, in the same file as the model",
        figure=lambda e: float((e.tensors.other_update or 0) - e.tensors.expected_update),
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.tensors.wrong > 0,
        text=lambda e: (
            f"{_tensors(e.tensors, 'tensor')} of the average are not those before the stop"
            f"{_by(e.tensors)}"
        ),
        remedy="save ema.state_dict(), and ema.load_state_dict(checkpoint['ema'])",
        figure=lambda e: e.tensors.part,
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.count != e.reference_count,
        text=lambda e: f"the average counts {e.count or 0} updates, not {e.reference_count or 0}",
        remedy="load all of ema.state_dict(), n_averaged too",
        figure=lambda e: float((e.count or 0) - (e.reference_count or 0)),
    ),
    Rule(
        check="averaged weights",
        level="fault",
        when=lambda e: e.parting > 0,
        text=lambda e: (
            f"restored, but after update {e.parting:,} the averages of equal weights differ: its "
            "decay does"
        ),
        remedy="keep the decay, and load the count of updates from which it is computed",
        figure=lambda e: float(e.parting),
    ),
    Rule(
        check="averaged weights",
        level="fine",
        text=lambda e: f"{plural(e.tensors.number, 'tensor')} of the average, restored bit for bit",
    ),
)
