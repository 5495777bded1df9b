"""The first updates of a recipe under other settings of `execution`, compared update by update.

A setting of `execution` may change the numbers of a run by rounding at most. The reference computes
eagerly, by PyTorch's operations, in contiguous memory and without a graph. Each setting by itself,
and all of them as the recipe has them, repeat its updates: from the same weights, on the same
samples, built as a run is built.

The unit of every difference is measured: the same updates are made in float64, and their distance
from the reference is the rounding of the recipe's arithmetic. After every update all that a run
carries on is compared: the loss, gradients, weights, running statistics, the optimizer's state and
the average of weights.
"""

import gc
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from pydantic import TypeAdapter
from torch import Tensor

from largebatch import accelerator, proof
from largebatch.data.types import Batch, Batches
from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.serial import Serial
from largebatch.errors import AuditError, PlanError, RecipeError
from largebatch.formatting import plural, table
from largebatch.models.compiled import require_compiler
from largebatch.recipe.arithmetic.plan import Plan, describe_division, make_plan
from largebatch.recipe.keys import Reduction
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import join, session_on
from largebatch.runs.options import Options
from largebatch.runs.proving import NOT_TRIED
from largebatch.runs.weights import begin_with
from largebatch.tracking.events import Event, Note
from largebatch.training.averages import averaged
from largebatch.training.graph import WARM_UP
from largebatch.training.loop import Update, step_seeds
from largebatch.training.session import Session, StageSteps, log_update, make_updates

Kind = Literal[
    "running statistics", "loss", "gradient", "optimizer state", "weight", "average of weights"
]
"""What is compared, in the order in which an update computes it."""

LIMIT = 32.0
"""Largest difference that is rounding, in roundings of the reference."""

SEEDS = 5
"""Seeds of which each must show a difference beyond rounding for a fault. Where one value falls on
the other side of a ReLU, or another one of two is the maximum, a gradient changes by any amount;
that comes with 1 of 5 to 10 seeds in three updates of digits_96, and not with the next ones."""

_LEAST = 8 * torch.finfo(torch.float32).eps
"""Smallest rounding that is assumed, relative: that of a few numbers may be zero by chance."""

_EMPTY = 1e-6
"""Part of the usual size that gradients count with at least: some are zero but for rounding, as
those of a bias before BatchNorm."""


class Key(NamedTuple):
    """One compared tensor."""

    kind: Kind
    name: str
    """Name of the weight or buffer, with that of the optimizer's state; empty for the loss."""

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else self.kind


_KERNELS = tuple(part for part in proof.PARTS if part != proof.GRAPH)

Snapshot = dict[Key, Tensor]
"""What an update left, in the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How far the updates under one setting are from those of the reference."""

    setting: str
    absent: str | None = None
    """Why nothing was compared; None if it was."""

    remark: str = ""
    """What of the setting is used on this machine."""

    first: int | None = None
    """The first update that differs, counted from 1; None if all are the same bits."""

    differences: tuple[float, ...] = ()
    """Relative difference after each update, of the tensor that differs by most roundings."""

    roundings: tuple[float, ...] = ()
    """The same in roundings of the reference."""

    most: str = ""
    """Name of that tensor after the last update that differs."""

    wrong_after: int | None = None
    """The first update with a difference beyond rounding; None if there is none."""

    wrong: str = ""
    """Of what differs beyond rounding in that update, the tensor that is computed first, and the
    one before it."""

    seeds: int = 1
    """Seeds with which it was compared: more than 1 after a difference beyond rounding."""

    is_repeated: bool = True
    """False if the last of these seeds has shown no difference beyond rounding."""

    draws: bool = False
    """True if the passes draw random numbers that this setting gives to other samples."""

    @property
    def is_fault(self) -> bool:
        """True if a difference is no rounding, came with every seed, and nothing explains it."""
        return self.wrong_after is not None and self.is_repeated and not self.draws

    @property
    def result(self) -> str:
        """What the row means, in words."""
        remark = f"; {self.remark}" if self.remark else ""
        if self.absent is not None:
            return self.absent
        if self.first is None:
            return f"bit for bit{remark}"
        if self.is_fault:
            return f"FAULT: in update {self.wrong_after} beyond rounding: {self.wrong}{remark}"
        if self.wrong_after is None:
            return f"rounding, most in the {self.most}{remark}"
        if self.draws:
            return f"unknown: the model draws random numbers, which other samples get here{remark}"
        return (
            f"rounding: beyond it once, in the {self.wrong}, and not with another seed, as where "
            f"one value falls on the other side of a ReLU{remark}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The updates of a recipe under all settings, beside the reference."""

    recipe: str
    plan: Plan
    """The reference's."""

    precision: str
    device: str
    steps: int
    rounding: tuple[float, ...]
    """Median relative distance of the reference's gradients from float64, after each update."""

    rows: tuple[Row, ...]

    @property
    def faults(self) -> list[Row]:
        """Settings whose updates differ by more than rounding."""
        return [row for row in self.rows if row.is_fault]

    def table(self) -> str:
        """Format the rows in 100 columns, below what they are compared with."""
        compared = [row for row in self.rows if row.absent is None]
        same = sum(row.first is None for row in compared)
        faults = plural(len(self.faults), "fault") if self.faults else "no fault"
        absent = len(self.rows) - len(compared)
        counts = f"{faults}, {same} bit for bit, {absent} not compared"
        last = len(self.rounding)
        division = describe_division(self.plan)
        rounding = f"{self.rounding[0]:.1e} after 1 update, {self.rounding[-1]:.1e} after {last}"
        lines = [
            f"audit: {self.recipe} on {self.device}: {counts}",
            f"reference: {division}, {self.precision}, eager, PyTorch's operations, no graph",
            f"rounding: its gradients are {rounding} from those in float64",
        ]
        head = ["setting", "first", "after 1", f"after {last}", "result"]
        rows = [head, *map(_cells, self.rows)]
        return "\n".join([*lines, table(rows, wrap_at=100)])


def _cells(row: Row) -> list[str]:
    numbers = ["-", "-"]
    if row.first is not None:
        pairs = list(zip(row.differences, row.roundings, strict=True))
        numbers = [f"{pair[0]:.1e} ({pair[1]:,.1f})" for pair in (pairs[0], pairs[-1])]
    first = "-" if row.first is None else str(row.first)
    return [row.setting, first, *numbers, row.result]


_ROW = TypeAdapter(Row)


class _Variant(NamedTuple):
    """One setting to compare."""

    setting: str
    recipe: Recipe
    absent: str | None = None
    parts: tuple[str, ...] = ()
    """Parts of `proof` that the setting may use."""

    is_whole: bool = False
    """True if it is compared also where none of these is used."""

    is_alone: bool = False
    """True if each worker makes all updates by itself."""

    divides: bool = False
    """True if random numbers of a layer fall on other samples or elements than in the reference."""


class _Notes:
    """A tracker that keeps the remarks of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, event: Event) -> None:
        """Keep the text of a note."""
        if isinstance(event, Note):
            self.texts.append(event.text)


class _Made(NamedTuple):
    """An update that was made, and what it left."""

    snapshot: Snapshot
    skipped: bool
    draws: bool
    """True if the passes have drawn random numbers."""


def compare_executions(recipe: Recipe, options: Options, *, steps: int) -> Comparison:
    """Make the first `steps` updates of a recipe under each setting, on all workers of a launcher.

    On a device with graphs more updates are made, as the first ones of a run have none. Raises
    AuditError if there is nothing to compare: the recipe has a protocol, fewer updates, or a loss
    that is not finite; and as open_session.
    """
    if recipe.protocol is not None:
        raise AuditError(
            f"protocol: {recipe.protocol.kind}: its updates depend on the time of messages, so two "
            "runs differ; to audit the rest of the recipe: --set protocol=null"
        )
    facts = {"command": "audit", **recipe.model_dump(mode="json"), "steps": steps}
    with join(options, facts, starting=True, splits=True) as backend:
        if backend.device.type in accelerator.GRAPHS:
            steps += WARM_UP
        return _Comparing(recipe, options, backend, steps).result()


def reference_of(recipe: Recipe) -> Recipe:
    """Return the recipe as the reference computes it."""
    return recipe.with_execution(
        kernels="torch", compile=False, graph=False, memory_format="contiguous"
    ).model_copy(update={"monitor": ()})


class _Reference(NamedTuple):
    """What the updates of one seed are compared with, one item of each list after each update."""

    plan: Plan
    snapshots: list[Snapshot]
    sizes: list[dict[Key, float]]
    """Length of each tensor, of weights that of their change."""

    roundings: list[dict[Key, float]]
    """Relative distance of each tensor from float64, but at least the median one of its kind."""

    medians: list[float]
    """Median distance of the gradients, or of the loss where there are none."""

    draws: bool
    """True if the passes draw random numbers."""


class _Comparing:
    """The comparison on one worker."""

    def __init__(self, recipe: Recipe, options: Options, backend: Backend, steps: int) -> None:
        self._recipe = recipe
        self._options = options
        self._backend = backend
        self._steps = range(steps)
        self._references: dict[int, _Reference] = {}

    def result(self) -> Comparison:
        """Make all updates and return what was found, the same on all workers."""
        reference = self._reference(0)
        return Comparison(
            recipe=self._recipe.name,
            plan=reference.plan,
            precision=self._recipe.precision,
            device=self._backend.device.type,
            rounding=tuple(reference.medians),
            rows=tuple(self._row(variant) for variant in self._variants(reference.plan)),
        )

    def _reference(self, number: int) -> _Reference:
        """Return the reference with the seed of the recipe, or the `number`-th after it."""
        if number not in self._references:
            self._references[number] = self._make_reference(number)
        return self._references[number]

    def _make_reference(self, number: int) -> _Reference:
        recipe = _with_seed(reference_of(self._recipe), number)
        snapshots: list[Snapshot] = []
        draws = False
        with self._session(self._backend, recipe) as session:
            plan = session.plan
            if len(self._steps) > plan.train_steps:
                raise AuditError(
                    f"--steps: {self._recipe.name} makes {plural(plan.train_steps, 'update')} on "
                    f"augmented images, and the audit makes {len(self._steps)}; give fewer"
                )
            start = _weights(session)
            with closing(_updates_of(session, self._steps)) as made_of_all:
                for made in made_of_all:
                    if made.skipped:
                        break  # in float64 no gradient overflows: nothing after it is comparable
                    snapshots.append(made.snapshot)
                    draws = draws or made.draws
        if not snapshots:
            raise AuditError(
                f"precision: {self._recipe.precision}: the first update is skipped, as its "
                "gradients are not finite with this loss scale; to audit the rest of the recipe: "
                "--set precision=bf16"
            )
        reference = _Reference(plan, snapshots, [], [], [], draws)
        exact = recipe.model_copy(update={"precision": "fp32", "reduction": Reduction()})
        with self._session(self._backend, exact, in_float64=True) as session:
            made_of_all = _updates_of(session, range(len(snapshots)), convert=_doubled)
            for made, snapshot in zip(made_of_all, snapshots, strict=True):
                _measure_rounding(reference, made.snapshot, snapshot, start)
        return reference

    def _session(
        self, backend: Backend, recipe: Recipe, *, in_float64: bool = False
    ) -> AbstractContextManager[Session]:
        return session_on(
            backend, recipe, self._options, handles_stops=False, in_float64=in_float64
        )

    def _variants(self, plan: Plan) -> Iterator[_Variant]:
        """Yield what is compared with the reference."""
        reference = reference_of(self._recipe)
        device = self._backend.device
        execution = self._recipe.execution
        yield _Variant("repeated", reference)
        has_kernels = any(proof.has_kernels(part, device) for part in _KERNELS)
        yield _Variant(
            "kernels",
            reference.with_execution(kernels="apex" if execution.kernels == "apex" else "auto"),
            None if has_kernels else f"not here: needs a GPU; a {device.type} has no such kernels",
            parts=_KERNELS,
        )
        problem = None
        try:
            require_compiler(device)
        except RecipeError as error:
            problem = f"not here: {error}"
        yield _Variant("compile", reference.with_execution(compile=True), problem)
        if device.type in accelerator.GRAPHS:
            # `auto` would not use one beside PyTorch's operations.
            recipe = reference.with_execution(graph=True)
            yield _Variant("graph", recipe, parts=(proof.GRAPH,))
        else:
            absent = f"not here: needs a GPU; a {device.type} has no graphs"
            yield _Variant("graph", reference, absent)
        recipe = reference.with_execution(memory_format="channels_last")
        yield _Variant("channels_last", recipe, divides=True)
        yield self._halved(plan)
        yield self._alone(plan)
        yield _Variant("the recipe's", self._recipe, parts=proof.PARTS, divides=True, is_whole=True)

    def _halved(self, plan: Plan) -> _Variant:
        """Return the variant with a smaller device batch, and so with more micro-batches."""
        free = reference_of(self._recipe).with_execution(device_batch=None)
        smaller = make_plan(free, workers=plan.workers, fits=plan.device_batch // 2).device_batch
        if smaller >= plan.device_batch:
            absent = f"not here: no device batch below {plan.device_batch} divides the recipe"
            return _Variant("device batch", free, absent)
        recipe = free.with_execution(device_batch=smaller)
        return _Variant(f"device batch {smaller}", recipe, divides=True)

    def _alone(self, plan: Plan) -> _Variant:
        """Return the variant with one worker, which each worker makes by itself."""
        recipe = reference_of(self._recipe).with_execution(device_batch=plan.device_batch)
        if plan.workers == 1:
            absent = "not here: --workers 2 compares two with one"
            return _Variant("other workers", recipe, absent)
        try:
            make_plan(recipe)
        except PlanError:  # workers share a span, which one holds whole
            recipe = recipe.with_execution(device_batch=None)
        return _Variant("1 worker", recipe, is_alone=True, divides=True)

    def _row(self, variant: _Variant) -> Row:
        """Compare a variant, with more seeds while each shows a difference beyond rounding."""
        if variant.absent is not None:
            return Row(setting=variant.setting, absent=variant.absent)
        row = self._row_of_seed(variant, 0)
        for number in range(1, SEEDS):
            if not row.is_fault:
                break
            repeated = self._row_of_seed(variant, number)
            row = replace(row, seeds=number + 1, is_repeated=repeated.is_fault)
        return row

    def _row_of_seed(self, variant: _Variant, number: int) -> Row:
        backend = Serial(self._backend.device) if variant.is_alone else self._backend
        reference = self._reference(number)
        try:
            with self._session(backend, _with_seed(variant.recipe, number)) as session:
                refusals = {
                    part: proof.DECISIONS.get((part, backend.device), NOT_TRIED)
                    for part in variant.parts
                }
                if refusals and all(refusals.values()) and not variant.is_whole:
                    return Row(setting=variant.setting, absent=_describe_parts(refusals))
                notes = _Notes()
                session.log.trackers.append(notes)
                steps = range(len(reference.snapshots))
                row = _compared(variant, reference, _updates_of(session, steps))
        except RecipeError as error:  # on all workers, of a graph that is required
            if variant.parts != (proof.GRAPH,):
                raise
            return Row(setting=variant.setting, absent=f"not used: {error}")
        finally:
            gc.collect()  # the graphs and compiled passes of this variant before those of the next
        remarks = [_describe_parts(refusals), *notes.texts]
        row = replace(row, remark="; ".join(dict.fromkeys(filter(None, remarks))))
        everyone = gather_values(asdict(row), self._backend, self._backend.device)
        return _worst(everyone)


def _compared(variant: _Variant, reference: _Reference, made_of_all: Iterator[_Made]) -> Row:
    """Compare the updates of a variant on this worker with those of the reference."""
    first: int | None = None
    differences = []
    roundings = []
    most = ""
    wrong_after: int | None = None
    wrong = ""
    for step, (made, snapshot) in enumerate(
        zip(made_of_all, reference.snapshots, strict=True), start=1
    ):
        relative = {
            key: _relative(_length(tensor, snapshot[key]), reference.sizes[step - 1][key])
            for key, tensor in made.snapshot.items()
            if not torch.equal(tensor, snapshot[key])
        }
        units = {key: it / reference.roundings[step - 1][key] for key, it in relative.items()}
        if units and first is None:
            first = step
        worst = max(units, key=lambda key: units[key], default=None)
        differences.append(0.0 if worst is None else relative[worst])
        roundings.append(0.0 if worst is None else units[worst])
        most = most if worst is None else str(worst)
        if wrong_after is None and roundings[-1] > LIMIT:
            wrong_after = step
            wrong = _first_wrong(units, [*made.snapshot])
    return Row(
        setting=variant.setting,
        first=first,
        differences=tuple(differences),
        roundings=tuple(roundings),
        most=most,
        wrong_after=wrong_after,
        wrong=wrong,
        draws=variant.divides and reference.draws,
    )


def _updates_of(
    session: Session,
    steps: range,
    *,
    convert: Callable[[Batches], Batches] = lambda batches: batches,
) -> Generator[_Made, None, None]:
    """Make updates of a session and yield what each left."""
    recipe = session.saver.recipe
    if recipe.model.weights is not None:
        drawn = recipe.model.head_std is not None
        begin_with(Path(recipe.model.weights), session.state, session.backend, drawn=drawn)
    part = StageSteps("train", steps, len(steps), clean=False)
    batches = convert(session.pipeline.training(steps, clean=False))
    names = _names_of_average(session)
    seeds = step_seeds(session.seed, session.backend.rank)
    session.step_log.resume_clock()
    with closing(make_updates(session, part, batches)) as updates:
        for update in updates:
            log_update(part.stage, update, session.state, session.step_log)
            draws = _has_drawn(seeds(update.step), session.backend.device)
            skipped = update.skipped is not None and bool(update.skipped)
            yield _Made(_snapshot(session, update, names), skipped, draws)
    session.step_log.flush()


def _measure_rounding(
    reference: _Reference, exact: Snapshot, snapshot: Snapshot, start: Snapshot
) -> None:
    """Add the sizes and roundings of an update to a reference."""
    sizes = {key: _length(tensor, start.get(key)) for key, tensor in exact.items()}
    _fill_empty(sizes, exact)
    distances = {
        key: _relative(_length(tensor, exact[key]), sizes[key]) for key, tensor in snapshot.items()
    }
    of_kinds: dict[Kind, list[float]] = defaultdict(list)
    for key, distance in distances.items():
        of_kinds[key.kind].append(distance)
    medians = {kind: statistics.median(of_kind) for kind, of_kind in of_kinds.items()}
    reference.sizes.append(sizes)
    reference.roundings.append(
        {key: max(distance, medians[key.kind], _LEAST) for key, distance in distances.items()}
    )
    reference.medians.append(medians.get("gradient", medians["loss"]))


def _describe_parts(refusals: Mapping[str, str | None]) -> str:
    """Describe which parts of `proof` are used; none that the model or the device does not have."""
    used = [part for part, refusal in refusals.items() if refusal is None]
    refused = [f"{part} ({it})" for part, it in refusals.items() if it not in {None, NOT_TRIED}]
    texts = []
    if used:
        texts.append(f"used: {', '.join(used)}")
    if refused or not used:
        texts.append(f"not used: {', '.join(refused) or 'the recipe has nothing for them'}")
    return "; ".join(texts)


def _with_seed(recipe: Recipe, number: int) -> Recipe:
    return recipe.model_copy(update={"seed": recipe.seed + number})


def _doubled(batches: Batches) -> Batches:
    """Yield batches in float64; numbers of classes stay."""
    with closing(batches):
        for images, labels in batches:
            shares = labels.double() if labels.is_floating_point() else labels
            yield Batch(images.double(), shares)


def _has_drawn(seed: int, device: torch.device) -> bool:
    """Return True if random numbers were drawn since a seed was set, which is set again."""
    after = _random_state(device)
    accelerator.seed(seed, device)
    return not torch.equal(after, _random_state(device))


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    if accelerator.is_remote(device):
        return torch.cat([state, torch.get_device_module(device).get_rng_state(device).cpu()])
    return state


def _weights(session: Session) -> Snapshot:
    return {
        Key("weight", name): _on_host(weight)
        for name, weight in session.state.model.named_parameters()
    }


def _snapshot(session: Session, update: Update, names_of_average: Sequence[str]) -> Snapshot:
    """Return all that an update left."""
    state = session.state
    model = state.model
    loss = update.loss.detach().clone()
    sum_over_workers(loss, session.backend)
    snapshot: Snapshot = {Key("loss", ""): _on_host(loss)}
    names = {weight: name for name, weight in model.named_parameters()}
    for weight, name in names.items():
        # With a loss scale the optimizer decides when a gradient is divided by it.
        if weight.grad is not None and not state.scaler.is_enabled():
            snapshot[Key("gradient", name)] = _on_host(weight.grad)
    for name, buffer in model.named_buffers():
        snapshot[Key("running statistics", name)] = _on_host(buffer)
    for weight, entry in state.updater.optimizer.state.items():
        for of_state, value in entry.items():
            if isinstance(value, Tensor) and weight in names:
                key = Key("optimizer state", f"{names[weight]} ({of_state})")
                snapshot[key] = _on_host(value)
    snapshot |= _weights(session)
    if state.average is not None:
        tensors = [it for it in state.average.state_dict().values() if it.is_floating_point()]
        for name, tensor in zip(names_of_average, tensors, strict=True):
            snapshot[Key("average of weights", name)] = _on_host(tensor)
    return snapshot


def _names_of_average(session: Session) -> list[str]:
    """Return the names of the tensors of an average, in its order."""
    model = session.state.model
    names = {
        id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    return [names[id(tensor)] for tensor in averaged(model)]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()  # sync: between updates


def _length(tensor: Tensor, other: Tensor | None) -> float:
    """Return the length of a tensor, or of its difference from another one, in float64."""
    exact = tensor.double()
    return float(torch.linalg.vector_norm(exact if other is None else exact - other.double()))


def _relative(distance: float, size: float) -> float:
    if distance == 0:
        return 0.0
    return distance / size if size else math.inf


def _fill_empty(sizes: dict[Key, float], snapshot: Snapshot) -> None:
    """Raise the sizes of gradients that are zero but for rounding."""
    of_elements = {
        key: size / math.sqrt(max(1, snapshot[key].numel()))
        for key, size in sizes.items()
        if key.kind == "gradient"
    }
    if not of_elements:
        return
    least = _EMPTY * statistics.median(of_elements.values())
    for key in of_elements:
        sizes[key] = max(sizes[key], least * math.sqrt(snapshot[key].numel()))


def _first_wrong(units: dict[Key, float], keys: Sequence[Key]) -> str:
    """Return the tensor that was computed first of those beyond rounding, and the one before it.

    Statistics come in the order of the forward pass, gradients in that of the backward pass.
    """
    for kind in get_args(Kind):
        in_order = [key for key in keys if key.kind == kind]
        if kind == "gradient":
            in_order.reverse()
        for place, key in enumerate(in_order):
            if units.get(key, 0.0) <= LIMIT:
                continue
            before = f"; {in_order[place - 1].name} before it is right" if place else ""
            return f"{key}{before}"
    raise AssertionError("no tensor is beyond rounding")


def _worst(of_workers: Sequence[dict[str, object]]) -> Row:
    """Return the row of the worker with the largest difference, by its number if others differ."""
    rows = [_ROW.validate_python(fields) for fields in of_workers]
    worst = max(range(len(rows)), key=lambda rank: max(rows[rank].roundings, default=0.0))
    row = rows[worst]
    if row.is_fault and not all(other.is_fault for other in rows):
        return replace(row, wrong=f"{row.wrong}; on worker {worst}")
    return row
