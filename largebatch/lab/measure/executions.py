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
import os
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from largebatch import accelerator, proof
from largebatch.data.types import Batch, Batches
from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.serial import Serial
from largebatch.errors import AuditError, DeviceMemoryError, DivergedError, PlanError, RecipeError
from largebatch.formatting import plural, table
from largebatch.models.compiled import require_compiler
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan, describe_division, make_plan
from largebatch.recipe.keys import Reduction
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import join, session_on
from largebatch.runs.fitting import SHARE
from largebatch.runs.options import Options
from largebatch.runs.passes import Passes, largest_side, whole_spans
from largebatch.runs.proving import NOT_TRIED
from largebatch.runs.weights import begin_with
from largebatch.tracking.events import Event, Note
from largebatch.training.averages import averaged
from largebatch.training.graph import WARM_UP
from largebatch.training.loop import Update, step_seeds
from largebatch.training.session import Session, StageSteps, log_update, pieces_of

Kind = Literal[
    "running statistics", "loss", "gradient", "optimizer state", "weight", "average of weights"
]
"""What is compared, in the order in which an update computes it."""

LIMIT = 32.0
"""Largest difference that is rounding, in roundings of the reference."""

SEEDS = 5
"""Seeds of which each must show a difference beyond rounding for a fault. Where one value falls on
the other side of a ReLU, or another one of two is the maximum, a gradient changes by any amount;
with channels_last that came in three updates of digits_96 with 5 of 20 seeds."""

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
    """The tensor that is computed first of those beyond rounding in that update, and the layer
    before it."""

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
        """What was found, in a word or two."""
        if self.absent is not None:
            return "not compared"
        if self.first is None:
            return "bit for bit"
        if self.is_fault:
            return "FAULT"
        return "rounding" if self.wrong_after is None else "unknown"

    @property
    def details(self) -> list[str]:
        """Why it was found, and what was used, in sentences without a final period."""
        texts = [self.absent, self.remark or None]
        if self.is_fault:
            texts.append(f"beyond rounding in update {self.wrong_after}: {self.wrong}")
        elif self.wrong_after is not None and self.draws:
            texts.append("the model draws random numbers, which other samples get here")
        elif self.wrong_after is not None:
            texts.append(
                f"beyond rounding in update {self.wrong_after}, and not with another seed, as if "
                f"one value falls on the other side of a ReLU: {self.wrong}"
            )
        elif self.most:
            texts.append(f"most in the {self.most}")
        return [text for text in texts if text is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The updates of a recipe under all settings, beside the reference."""

    recipe: str
    plan: Plan
    """The reference's."""

    precision: str
    device: str
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
        unknown = sum(row.result == "unknown" for row in compared)
        absent = len(self.rows) - len(compared)
        counts = plural(len(self.faults), "fault") if self.faults else "no fault"
        if unknown:
            counts += f", {unknown} unknown"
        counts += f", {same} bit for bit, {absent} not compared"
        last = len(self.rounding)
        division = describe_division(self.plan)
        rounding = f"{self.rounding[0]:.1e} after 1 update, {self.rounding[-1]:.1e} after {last}"
        lines = [
            f"audit: {self.recipe} on {self.device}: {counts}",
            f"reference: {division}, {self.precision}, eager, PyTorch's operations, no graph",
            f"rounding: its gradients are {rounding} from those in float64",
        ]
        head = ["setting", "first", "after 1", f"after {last}", "result"]
        lines.append(table([head, *map(_cells, self.rows)]))
        for row in self.rows:
            lines += (
                textwrap.wrap(
                    f"{row.setting}: {'; '.join(row.details)}",
                    100,
                    subsequent_indent="  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                if row.details
                else []
            )
        return "\n".join(lines)


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
        self._device_batch: int | None = None

    @property
    def _plain(self) -> Recipe:
        """The recipe as the reference computes it."""
        plain = self._recipe.with_execution(
            kernels="torch",
            compile=False,
            graph=False,
            memory_format="contiguous",
            device_batch=self._device_batch,
        )
        return plain.model_copy(update={"monitor": ()})

    def _fitting_device_batch(self) -> int:
        """Return the largest device batch, up to that of a run, whose float64 passes fit here."""
        backend = self._backend
        device = backend.device
        workers = backend.world_size
        recipe = self._recipe
        plan = make_plan(recipe, workers=workers, backend=backend.name)
        if accelerator.is_remote(device):
            free = float(accelerator.free_memory_bytes(device))
        else:
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / backend.local_size
        with FakeTensorMode():
            model = build_model(
                self._plain.model_copy(update={"precision": "fp32"}), accelerator.CPU
            )
            side = largest_side(plan, usual=recipe.data.image_size)
            passes = Passes.of(recipe, model, accelerator.CPU, side=side)
            span = plan.bn_span or 1
            num = whole_spans(min(plan.device_batch, max(2, span)), span)
            sample_bytes = 2 * passes.activation_bytes(num) / num
        most = int(SHARE * free / sample_bytes)
        fits = torch.tensor(most).to(device)
        most = int(backend.all_gather(fits).min())  # sync: once, before training
        if plan.device_batch <= most:
            return plan.device_batch
        without = recipe.with_execution(device_batch=None)
        smaller = make_plan(without, workers=workers, fits=max(1, most)).device_batch
        if smaller > most:
            raise DeviceMemoryError(
                f"execution.device_batch: the smallest, {smaller:,}, takes "
                f"{smaller * sample_bytes / 1e9:.3g} GB in float64, and {device} has "
                f"{free / 1e9:.3g}: --set data.image_size={side // 2}, or a smaller batch.bn_span "
                "or model"
            )
        return smaller

    def result(self) -> Comparison:
        """Make all updates and return what was found, the same on all workers.

        Raises DeviceMemoryError if not even the smallest device batch fits in float64.
        """
        self._device_batch = self._fitting_device_batch()
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
        recipe = _with_seed(self._plain, number)
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
        reference = self._plain
        device = self._backend.device
        execution = self._recipe.execution
        yield _Variant("repeated", reference)
        has_kernels = any(proof.has_kernels(part, device) for part in _KERNELS)
        # Those of BatchNorm read channels_last only.
        recipe = reference.with_execution(
            kernels="apex" if execution.kernels == "apex" else "auto",
            memory_format="channels_last",
        )
        absent = None if has_kernels else f"needs a GPU; a {device.type} has no such kernels"
        yield _Variant("kernels", recipe, absent, parts=_KERNELS, divides=True)
        problem = None
        try:
            require_compiler(device)
        except RecipeError as error:
            problem = f"{error}"
        yield _Variant("compile", reference.with_execution(compile=True), problem)
        if device.type in accelerator.GRAPHS:
            # `auto` would not use one beside PyTorch's operations.
            recipe = reference.with_execution(graph=True)
            yield _Variant("graph", recipe, parts=(proof.GRAPH,))
        else:
            absent = f"needs a GPU; a {device.type} has no graphs"
            yield _Variant("graph", reference, absent)
        recipe = reference.with_execution(memory_format="channels_last")
        yield _Variant("channels_last", recipe, divides=True)
        yield self._halved(plan)
        yield self._alone(plan)
        yield _Variant("the recipe's", self._recipe, parts=proof.PARTS, divides=True, is_whole=True)

    def _halved(self, plan: Plan) -> _Variant:
        """Return the variant with a smaller device batch, and so with more micro-batches."""
        free = self._plain.with_execution(device_batch=None)
        smaller = make_plan(free, workers=plan.workers, fits=plan.device_batch // 2).device_batch
        if smaller >= plan.device_batch:
            absent = f"no device batch below {plan.device_batch} divides the recipe"
            return _Variant("device batch", free, absent)
        recipe = free.with_execution(device_batch=smaller)
        return _Variant(f"device batch {smaller}", recipe, divides=True)

    def _alone(self, plan: Plan) -> _Variant:
        """Return the variant with one worker, which each worker makes by itself."""
        recipe = self._plain
        if plan.workers == 1:
            absent = "needs several workers: --workers 2 compares two with one"
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
                    reason = _describe_parts(refusals) or "the recipe has nothing for them"
                    return Row(setting=variant.setting, absent=reason)
                notes = _Notes()
                session.log.trackers.append(notes)
                steps = range(len(reference.snapshots))
                row = _compared(variant, reference, _updates_of(session, steps))
        except RecipeError as error:  # on all workers, of a graph or kernels that are required
            if proof.GRAPH not in variant.parts:
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
    row = Row(setting=variant.setting, draws=variant.divides and reference.draws)
    pairs = zip(made_of_all, reference.snapshots, strict=True)
    try:
        for step, (made, snapshot) in enumerate(pairs):
            row = _with_update(row, made.snapshot, snapshot, reference, step)
    except DivergedError as error:  # the reference's updates were finite
        step = len(row.differences) + 1
        infinite = (math.inf,)
        row = replace(
            row,
            first=row.first or step,
            differences=row.differences + infinite,
            roundings=row.roundings + infinite,
            wrong_after=row.wrong_after or step,
            wrong=row.wrong or str(error),
        )
    return row


def _with_update(
    row: Row, found: Snapshot, snapshot: Snapshot, reference: _Reference, step: int
) -> Row:
    """Return the row with one more update, of which `snapshot` is the reference's."""
    sizes = reference.sizes[step]
    relative = {
        key: _relative(_length(tensor, snapshot[key]), sizes[key])
        for key, tensor in found.items()
        if not torch.equal(tensor, snapshot[key])
    }
    units = {key: it / reference.roundings[step][key] for key, it in relative.items()}
    if not units:
        return replace(row, differences=(*row.differences, 0.0), roundings=(*row.roundings, 0.0))
    worst = max(units, key=lambda key: units[key])
    row = replace(
        row,
        first=row.first or step + 1,
        differences=(*row.differences, relative[worst]),
        roundings=(*row.roundings, units[worst]),
        most=str(worst),
    )
    if row.wrong_after is None and not units[worst] <= LIMIT:  # NaN is no rounding either
        wrong = _first_wrong(units, [*found])
        row = replace(row, wrong_after=step + 1, wrong=wrong)
    return row


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
    names = _names_of_average(session)
    seeds = step_seeds(session.seed, session.backend.rank)
    session.step_log.resume_clock()
    with closing(convert(session.pipeline.training(steps, clean=False))) as batches:
        for make_updates in pieces_of(session, part):
            for update in make_updates(batches):
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
    texts = [f"used: {', '.join(used)}"] if used else []
    texts += [f"not used: {', '.join(refused)}"] if refused else []
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
    names: dict[Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    for weight, name in names.items():
        # With a loss scale the optimizer decides when a gradient is divided by it.
        if weight.grad is not None and not state.scaler.is_enabled():
            snapshot[Key("gradient", name)] = _on_host(weight.grad)
    for name, buffer in model.named_buffers():
        snapshot[Key("running statistics", name)] = _on_host(buffer)
    for tensor, entry in state.updater.optimizer.state.items():
        for of_state, value in entry.items():
            if isinstance(value, Tensor) and tensor in names:
                key = Key("optimizer state", f"{names[tensor]} ({of_state})")
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
    """Return the tensor that was computed first of those beyond rounding, and the layer before it.

    Statistics come in the order of the forward pass, gradients in that of the backward pass.
    """
    for kind in get_args(Kind):
        in_order = [key for key in keys if key.kind == kind]
        if kind == "gradient":
            in_order.reverse()
        right = ""  # the layer before, whose tensors do not differ
        layer = ""
        for key in in_order:
            if _layer_of(key) != layer:
                right, layer = layer, _layer_of(key)
            if not units.get(key, 0.0) <= LIMIT:
                return f"{key}; {right} before it is right" if right else str(key)
    raise AssertionError("no tensor is beyond rounding")


def _layer_of(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _worst(of_workers: Sequence[dict[str, object]]) -> Row:
    """Return the row of the worker with the largest difference, by its number if others differ."""
    rows = [_ROW.validate_python(fields) for fields in of_workers]
    worst = max(range(len(rows)), key=lambda rank: max(rows[rank].roundings, default=0.0))
    row = rows[worst]
    if row.is_fault and not all(other.is_fault for other in rows):
        return replace(row, wrong=f"{row.wrong}; on worker {worst}")
    return row
