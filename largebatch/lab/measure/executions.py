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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from largebatch import accelerator, proof
from largebatch.data.types import Batch, Batches
from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.distributed.serial import Serial
from largebatch.errors import AuditError, PlanError, RecipeError
from largebatch.formatting import plural, table
from largebatch.models.compiled import require_compiler
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.keys import Reduction
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import join, session_on
from largebatch.runs.options import Options
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

_LEAST = 8 * torch.finfo(torch.float32).eps
"""Smallest rounding that is assumed, relative: that of a few numbers may be zero by chance."""

_EMPTY = 1e-6
"""Gradients that are zero but for rounding, as those of a bias before BatchNorm, count as if they
had this part of the usual size."""


class Key(NamedTuple):
    """One compared tensor."""

    kind: Kind
    name: str
    """Name of the weight or buffer, with that of the optimizer's state; empty for the loss."""

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else self.kind


Snapshot = dict[Key, Tensor]
"""What an update left, in the memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How far the updates under one setting are from those of the reference."""

    setting: str
    absent: str | None = None
    """Why nothing was compared; None if it was."""

    remark: str = ""
    """What was used, or why a difference beyond rounding is none of arithmetic."""

    first: int | None = None
    """The first update that differs, counted from 1; None if all are the same bits."""

    differences: tuple[float, ...] = ()
    """Relative difference after each update, of the tensor that differs by most roundings."""

    roundings: tuple[float, ...] = ()
    """The same in roundings of the reference."""

    most: str = ""
    """Name of that tensor after the last update."""

    wrong_after: int | None = None
    """The first update with a difference beyond rounding; None if there is none."""

    wrong: str = ""
    """The tensor that was computed first of those that differ beyond rounding in that update, and
    the one before it."""

    is_expected: bool = False
    """True if random numbers explain a difference beyond rounding."""

    @property
    def is_fault(self) -> bool:
        """True if a difference is neither rounding nor explained."""
        return self.wrong_after is not None and not self.is_expected


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


class _Variant(NamedTuple):
    """One setting to compare."""

    setting: str
    recipe: Recipe
    absent: str | None = None
    parts: tuple[str, ...] = ()
    """Parts of `proof` that the setting is about: without one of them nothing is compared."""

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


class _Comparing:
    """The comparison on one worker."""

    def __init__(self, recipe: Recipe, options: Options, backend: Backend, steps: int) -> None:
        self._recipe = recipe
        self._reference = reference_of(recipe)
        self._options = options
        self._backend = backend
        self._steps = range(steps)
        self._start: Snapshot = {}
        self._snapshots: list[Snapshot] = []
        self._sizes: list[dict[Key, float]] = []
        """Norm of each tensor after each update, of weights that of their change."""

        self._roundings: list[dict[Key, float]] = []
        """Relative distance of each tensor from float64, after each update."""

        self._usual: list[dict[Kind, float]] = []
        """Median of these over the tensors of a kind."""

        self._draws = False

    def result(self) -> Comparison:
        """Make all updates and return what was found, the same on all workers."""
        plan = self._make_reference()
        self._make_exact()
        rows = [self._row(variant) for variant in self._variants(plan)]
        everyone = gather_values(
            [asdict(row) for row in rows], self._backend, self._backend.device
        )
        return Comparison(
            recipe=self._recipe.name,
            plan=plan,
            precision=self._recipe.precision,
            device=self._backend.device.type,
            steps=len(self._snapshots),
            rounding=tuple(usual.get("gradient", usual["loss"]) for usual in self._usual),
            rows=tuple(_worst(of_workers) for of_workers in zip(*everyone, strict=True)),
        )

    def _make_reference(self) -> Plan:
        with session_on(
            self._backend, self._reference, self._options, handles_stops=False
        ) as session:
            plan = session.plan
            if len(self._steps) > plan.train_steps:
                raise AuditError(
                    f"--steps {len(self._steps)}: {self._recipe.name} makes "
                    f"{plural(plan.train_steps, 'update')} on augmented images; give fewer"
                )
            self._start = _weights(session)
            for made in self._made(session):
                if made.skipped:
                    break  # in float64 no gradient overflows, so nothing after it is comparable
                self._snapshots.append(made.snapshot)
                self._draws = self._draws or made.draws
        if not self._snapshots:
            raise AuditError(
                f"precision: {self._recipe.precision}: the first update is skipped, as its "
                "gradients are not finite with this loss scale; to audit the rest of the recipe: "
                "--set precision=bf16"
            )
        self._steps = range(len(self._snapshots))
        return plan

    def _make_exact(self) -> None:
        """Make the updates in float64, and measure the distance of the reference from them."""
        exact = self._reference.model_copy(
            update={"precision": "fp32", "reduction": Reduction()}
        )
        with session_on(
            self._backend, exact, self._options, handles_stops=False, in_float64=True
        ) as session:
            made_of_all = self._made(session, convert=_doubled)
            for made, reference in zip(made_of_all, self._snapshots, strict=True):
                sizes = {
                    key: _norm(tensor, self._start.get(key)) for key, tensor in made.snapshot.items()
                }
                _fill_empty(sizes, made.snapshot)
                roundings = {
                    key: _relative(_norm(tensor, made.snapshot[key]), sizes[key])
                    for key, tensor in reference.items()
                }
                of_kinds = defaultdict(list)
                for key, rounding in roundings.items():
                    of_kinds[key.kind].append(rounding)
                self._sizes.append(sizes)
                self._roundings.append(roundings)
                self._usual.append(
                    {kind: statistics.median(values) for kind, values in of_kinds.items()}
                )

    def _variants(self, plan: Plan) -> Iterator[_Variant]:
        """Yield what is compared with the reference."""
        reference = self._reference
        device = self._backend.device
        execution = self._recipe.execution
        of_kernels = tuple(part for part in proof.PARTS if part != proof.GRAPH)
        yield _Variant("repeated", reference)
        chosen = "apex" if execution.kernels == "apex" else "auto"
        has_kernels = any(proof.has_kernels(part, device) for part in of_kernels)
        yield _Variant(
            "kernels",
            reference.with_execution(kernels=chosen),
            None if has_kernels else f"needs a GPU; the {device.type} has none of this package",
            parts=of_kernels,
        )
        try:
            require_compiler(device)
            problem = None
        except RecipeError as error:
            problem = str(error)
        yield _Variant("compile", reference.with_execution(compile=True), problem)
        has_graphs = device.type in accelerator.GRAPHS
        yield _Variant(
            "graph",
            # The trial of the graph is made without kernels where PyTorch's are asked for.
            reference.with_execution(graph=True, kernels="torch") if has_graphs else reference,
            None if has_graphs else f"needs a GPU; there are no graphs on a {device.type}",
            parts=(proof.GRAPH,),
        )
        yield _Variant(
            "channels_last", reference.with_execution(memory_format="channels_last"), divides=True
        )
        yield self._halved(plan)
        yield self._alone(plan)
        yield _Variant("the recipe's", self._recipe, divides=True)

    def _halved(self, plan: Plan) -> _Variant:
        """Return the variant with a smaller device batch, and so with more micro-batches."""
        free = self._reference.with_execution(device_batch=None)
        smaller = make_plan(free, workers=plan.workers, fits=plan.device_batch // 2).device_batch
        absent = None
        if smaller >= plan.device_batch:
            absent = f"no device batch below {plan.device_batch} divides the recipe"
            smaller = plan.device_batch
        recipe = self._reference.with_execution(device_batch=smaller)
        return _Variant(f"device batch {smaller}", recipe, absent, divides=True)

    def _alone(self, plan: Plan) -> _Variant:
        """Return the variant with one worker, which each worker makes by itself."""
        if plan.workers == 1:
            absent = "needs several workers: --workers 2 compares them with one"
            return _Variant("other workers", self._reference, absent)
        recipe = self._reference.with_execution(device_batch=plan.device_batch)
        try:
            make_plan(recipe)
        except PlanError:  # workers share a span, which one holds whole
            recipe = recipe.with_execution(device_batch=None)
        return _Variant("1 worker", recipe, is_alone=True, divides=True)

    def _row(self, variant: _Variant) -> Row:
        """Make the updates of a variant and compare them."""
        if variant.absent is not None:
            return Row(setting=variant.setting, absent=variant.absent)
        backend = Serial(self._backend.device) if variant.is_alone else self._backend
        try:
            with session_on(
                backend, variant.recipe, self._options, handles_stops=False
            ) as session:
                refusals = [proof.DECISIONS.get((part, backend.device)) for part in variant.parts]
                if refusals and all(refusals):
                    absent = next(reason for reason in refusals if reason)
                    return Row(setting=variant.setting, absent=f"not used: {absent}")
                notes = _Notes()
                session.log.trackers.append(notes)
                return self._compared(variant, self._made(session), notes)
        finally:
            gc.collect()  # the graphs and compiled passes of one variant before those of the next

    def _compared(self, variant: _Variant, made_of_all: Iterator[_Made], notes: _Notes) -> Row:
        first: int | None = None
        differences = []
        roundings = []
        most = ""
        wrong_after: int | None = None
        wrong = ""
        for step, made in enumerate(made_of_all):
            reference = self._snapshots[step]
            units: dict[Key, float] = {}
            relative: dict[Key, float] = {}
            for key, tensor in made.snapshot.items():
                if torch.equal(tensor, reference[key]):
                    continue
                relative[key] = _relative(_norm(tensor, reference[key]), self._sizes[step][key])
                rounding = max(
                    self._roundings[step][key], self._usual[step][key.kind], _LEAST
                )
                units[key] = relative[key] / rounding if math.isfinite(rounding) else 0.0
            if units and first is None:
                first = step + 1
            worst = max(units, key=lambda key: units[key], default=None)
            differences.append(0.0 if worst is None else relative[worst])
            roundings.append(0.0 if worst is None else units[worst])
            most = most if worst is None else str(worst)
            if wrong_after is None and roundings[-1] > LIMIT:
                wrong_after = step + 1
                wrong = _first_wrong(units, [*made.snapshot])
        return Row(
            setting=variant.setting,
            first=first,
            differences=tuple(differences),
            roundings=tuple(roundings),
            most=most,
            wrong_after=wrong_after,
            wrong=wrong,
            is_expected=variant.divides and self._draws,
            remark="; ".join(dict.fromkeys(notes.texts)),
        )

    def _made(
        self, session: Session, *, convert: Callable[[Batches], Batches] = lambda batches: batches
    ) -> Iterator[_Made]:
        """Make the updates of a session and yield what each left."""
        recipe = self._recipe
        if recipe.model.weights is not None:
            drawn = recipe.model.head_std is not None
            begin_with(Path(recipe.model.weights), session.state, session.backend, drawn=drawn)
        part = StageSteps("train", self._steps, len(self._steps), clean=False)
        batches = convert(session.pipeline.training(self._steps, clean=False))
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
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return [names[id(tensor)] for tensor in averaged(model)]


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()  # sync: between updates


def _norm(tensor: Tensor, other: Tensor | None) -> float:
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
    rows = [
        Row(**{name: tuple(it) if isinstance(it, list) else it for name, it in fields.items()})  # type: ignore[arg-type]  # as they were sent
        for fields in of_workers
    ]
    worst = max(range(len(rows)), key=lambda rank: max(rows[rank].roundings, default=0.0))
    row = rows[worst]
    if row.is_fault and not all(other.is_fault for other in rows):
        return replace(row, wrong=f"{row.wrong}; on worker {worst}")
    return row
