"""Makes the updates of a stage by the protocol of the recipe, in place of the synchronous ones.

The learners come to rest for an evaluation, a checkpoint or the end of a stage: no mini-batch is
handed out beyond that update, all gradients are pushed, and every worker has the same weights after
the same number of updates.
"""

import copy
import json
import math
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.errors import CheckpointError, DivergedError, RecipeError
from largebatch.lab.protocols.exchange import Exchange, Record
from largebatch.lab.protocols.gradients import Gradients, average_statistics
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import ARRIVALS, MOMENTUM
from largebatch.lab.protocols.service import Gradient, LostLearner
from largebatch.lab.protocols.split import split_over
from largebatch.models import affine_parameters
from largebatch.recipe.protocols import LocalSteps
from largebatch.recipe.recipe import Recipe
from largebatch.storage import write_whole
from largebatch.tracking.events import Step
from largebatch.training.state import TrainState
from largebatch.training.updates import Part, Training, Updates, synchronous_updates

NAME = "protocol"
"""Name of this state in checkpoints and in summary.json."""

_GRADIENTS = TypeAdapter(list[int])
_LOST = TypeAdapter(list[LostLearner])


@dataclass(slots=True)
class ProtocolState:
    """The state of a protocol, an ExtraState of the run."""

    momentum: dict[str, Tensor] = field(default_factory=dict)
    """Momentum with local steps, of the servers (`outer`) and of every learner (`inner`, a row
    each); this worker's optimizer has only its own. Empty without local steps."""

    gradients: list[int] = field(default_factory=list)
    """Number of gradients that the first server received, by learner."""

    lost: list[LostLearner] = field(default_factory=list)
    """Learners lost in all parts of the run; a resumed part begins with all learners."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, for a checkpoint."""
        return {"momentum": self.momentum, **self.summary()}

    def load_state_dict(self, state: dict[str, Any], optimizer: Optimizer) -> None:
        """Load what `state_dict` returned; raise ValueError if it is of other weights."""
        self.momentum = state.get("momentum", {})
        self.gradients = _GRADIENTS.validate_python(state.get("gradients", []))
        self.lost = _LOST.validate_python(state.get("lost", []))
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        num_weights = sum(weight.numel() for weight in weights)
        for name in ("outer", "inner") if self.momentum else ():
            saved = self.momentum[name].shape[-1]
            if saved != num_weights:
                raise ValueError(f"protocol: {name} is of {saved} weights")

    def drop_momentum(self) -> None:
        """Forget the momentum of local steps."""
        self.momentum = {}

    def summary(self) -> dict[str, Any]:
        """Return plain values for summary.json."""
        return {"gradients": list(self.gradients), "lost": [asdict(one) for one in self.lost]}

    def remarks(self) -> list[str]:
        """Return a remark on each learner that was lost."""
        return [f"learner {one.learner} was lost after {one.update} updates" for one in self.lost]


@dataclass(frozen=True)
class ProtocolUpdates:
    """Makes the updates of a stage, and yields whenever learners rest."""

    recipe: Recipe
    exchange: Exchange
    state: ProtocolState

    def __call__(self, training: Training, part: Part) -> Generator[None, None, None]:
        """Make these updates of a stage."""
        segment = _Segment(training, part, self)
        if training.backend.rank == 0:
            segment.forget(part.steps.start)
        while training.state.progress.step < part.end and not training.requests.stopped:
            segment.run()
            yield


def open_updates(recipe: Recipe, state: TrainState, backend: Backend | None) -> Updates:
    """Return what makes the updates of a stage; without a backend, for a run that makes none.

    The state of the protocol joins `state.extra`, because checkpoints hold it. Raises RecipeError
    if a stage trains fewer tensors than the protocol has servers.
    """
    assert recipe.protocol is not None
    protocol = state.extra[NAME] = ProtocolState()
    if backend is None:
        return synchronous_updates
    require_tensors(state.model, recipe)
    return ProtocolUpdates(recipe, Exchange.open(backend, recipe.protocol), protocol)


class _Segment:
    """The updates between two rests."""

    def __init__(self, training: Training, part: Part, updates: ProtocolUpdates) -> None:
        self._training, self._part, recipe = training, part, updates.recipe
        section = recipe.protocol
        assert section is not None
        self._section, self._exchange, self._state = section, updates.exchange, updates.state
        self._every = recipe.execution.checkpoints.every_steps
        self._path = training.log.folder / ARRIVALS
        self._size = section.mini_batch(recipe.batch.global_batch)
        self._rule = Rule.of(section, mini_batch=self._size)
        self._optimizer = training.state.updater.optimizer
        groups = self._optimizer.param_groups
        self._gradients = Gradients(
            model=training.state.model,
            weights=[weight for group in groups for weight in group["params"]],
            batch=self._batch,
            criterion=training.criterion,
            reducer=training.state.updater.reducer,
            spans=training.spans,
            learners=section.learners,
            seed=training.seed,
        )

    def run(self) -> None:
        """Make the updates to the next rest, or fewer if a worker is asked to stop or to save."""
        training, rule = self._training, self._rule
        start = training.state.progress.step
        updates = range(start, self._next_rest(start))
        local = isinstance(self._section, LocalSteps)
        if local and updates.start < self._begin:
            local, rule = False, Rule.hardsync(rule.learners)
        with self._undone_on_failure():
            record = self._run_locally(updates) if local else self._run_by_gradients(rule, updates)
            left = self._exchange.learners
            average_statistics(training.state.model, training.backend, learners=left)
            if training.backend.rank == 0:
                self._write(record)
            self._count(record)
            training.requests.share()
            diverged = self._add(record, rule, begun=updates.start)
        if diverged is not None:
            raise diverged

    def _next_rest(self, begun: int) -> int:
        """Return the number of updates after which the learners come to rest next.

        With local steps that is at the end of a round, except at the last update of the stage.
        """
        points = [point for point in self._training.plan.evaluate_after if point > begun]
        if self._every is not None:
            points.append((begun // self._every + 1) * self._every)
        point, section, begin = min([self._part.end, *points]), self._section, self._begin
        if not isinstance(section, LocalSteps) or point <= begin:
            return point
        if begun < begin:
            return begin
        last = self._part.steps.stop
        return min(last, begun + -(-(point - begun) // section.steps) * section.steps)

    @property
    def _begin(self) -> int:
        """Number of the update from which learners make local steps."""
        section = self._section
        if not isinstance(section, LocalSteps) or section.begin is None:
            return 0
        return self._training.plan.steps_in(section.begin)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Return to the last rest if the updates, or their record, fail.

        Between two rests there is no consistent state: a learner's weights and momentum have
        different clocks, gradients that were pushed but not applied are lost with the servers, and
        the step of a checkpoint is that of the record.
        """
        state, weights = self._training.state, self._gradients.weights
        model, protocol = state.model, self._state.state_dict()
        progress = copy.deepcopy(state.progress)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        momentum = _momentum(self._optimizer, weights).clone()
        had = bool(self._optimizer.state)
        try:
            yield
        except BaseException:
            model.load_state_dict(before)
            self._state.load_state_dict(protocol, self._optimizer)
            state.progress = progress
            if had:
                _load_momentum(self._optimizer, weights, momentum)
            else:
                self._optimizer.state.clear()
            raise

    def _add(self, record: Record, rule: Rule, *, begun: int) -> DivergedError | None:
        try:
            state, plan = self._training.state, self._training.plan
            for step in self._steps(record, rule, begun=begun):
                images = plan.batch_at(step.step)
                state.count(step.step, images=images, seconds=step.step_seconds)
                state.follow(step.step, None)
                self._training.step_log.add_record(step)
        except DivergedError as error:
            return error
        return None

    def _run_by_gradients(self, rule: Rule, updates: range) -> Record:
        with self._held(self._optimizer, self._gradients.of) as (weights, optimizer, gradient):
            return self._exchange.run(
                weights,
                optimizer,
                self._training.state.updater.schedule,
                rule,
                MiniBatches(rule, updates),
                clock=updates.start,
                gradient=gradient,
                asks=self._training.requests.is_pending,
            )

    def _held(
        self, optimizer: Optimizer, gradient: Gradient
    ) -> AbstractContextManager[tuple[Sequence[Tensor], Optimizer, Gradient]]:
        weights, section = self._gradients.weights, self._section
        if section.split:
            return split_over(section.num_servers, weights, optimizer, gradient)
        return nullcontext((weights, optimizer, gradient))

    def _run_locally(self, updates: range) -> Record:
        assert isinstance(self._section, LocalSteps)
        section, outer = self._section, self._section.outer
        training, momentum = self._training, self._state.momentum
        weights = self._gradients.weights
        mean = SGD(weights, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
        if momentum:
            own = training.backend.rank if self._exchange.is_learner else 0
            _load_momentum(mean, weights, momentum["outer"])
            _load_momentum(self._optimizer, weights, momentum["inner"][own])
        local = partial(
            self._gradients.of_local_steps,
            end=updates.stop,
            steps=section.steps,
            optimizer=self._optimizer,
            schedule=training.state.updater.schedule,
        )
        with self._held(mean, local) as (held, outer_optimizer, change):
            record = self._exchange.run(
                held,
                outer_optimizer,
                lambda _: outer.lr,
                self._rule,
                MiniBatches(self._rule, updates),
                clock=-(-(updates.start - self._begin) // section.steps),
                gradient=change,
                asks=training.requests.is_pending,
            )
        inner = training.backend.all_gather(_momentum(self._optimizer, weights))
        self._state.momentum = {
            "outer": _momentum(mean, weights),
            "inner": inner[: section.learners].clone(),
        }
        return record

    def _count(self, record: Record) -> None:
        state = self._state
        pushed = Counter(arrival.learner for arrival in record.arrivals[0])
        before = state.gradients or [0] * self._section.learners
        state.gradients = [number + pushed[n] for n, number in enumerate(before)]
        self._training.pipeline.dropped.update(self._exchange.lost)
        for lost in self._exchange.losses:
            if lost not in state.lost:
                state.lost.append(lost)
                self._training.log.note(
                    self._part.stage, _describe(lost), kind="lost worker", learner=lost.learner
                )

    def _batch(self, number: int) -> Batch:
        positions = range(number * self._size, (number + 1) * self._size)
        clean = self._part.clean
        with closing(self._training.pipeline.at([positions], clean=clean)) as batches:
            return next(batches)

    def _steps(self, record: Record, rule: Rule, *, begun: int) -> Iterator[Step]:
        """Yield the record of each update, as the core does; a round's updates share a loss."""
        plan, schedule = self._training.plan, self._training.state.updater.schedule
        step = begun
        for applied, seconds in record.updates:
            several = range(step, min(record.end, step + rule.local_steps))
            losses = [arrival.loss for arrival in applied.arrivals]
            each = seconds / len(several)
            for number in several:
                yield Step(
                    stage=self._part.stage,
                    step=number,
                    epoch=plan.epoch(number + 1),
                    loss=sum(losses) / len(losses),
                    lr=applied.lr if rule.local_steps == 1 else schedule(number),
                    step_seconds=each,
                    images_per_second=plan.global_batch / each,
                )
            step = several.stop

    def forget(self, begun: int) -> None:
        """Remove the records of updates that are made again from the file; worker 0 only."""
        if not self._path.exists():
            return
        lines = self._path.read_text().splitlines(keepends=True)
        first = begun * self._rule.gradients
        whole = [line for line in lines if line.endswith("\n")]  # a killed process left the last
        kept = [line for line in whole if json.loads(line)["mini_batch"] < first]
        if len(kept) < len(lines):
            write_whole(self._path, "".join(kept).encode())

    def _write(self, record: Record) -> None:
        """Add the gradients to the run folder, by server, in the order in which they arrived.

        Raises CheckpointError if the file cannot be written.
        """
        lines = []
        for server, arrivals in enumerate(record.arrivals):
            for arrival in arrivals:
                loss = arrival.loss if math.isfinite(arrival.loss) else None  # as in the log
                lines.append(json.dumps({"server": server, **arrival._asdict(), "loss": loss}))
        try:
            with self._path.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {error.strerror}") from None


def _describe(lost: LostLearner) -> str:
    how = "was silent for the whole of --timeout" if lost.silent else "was gone"
    had = "it had no mini-batch then"
    if lost.mini_batch is not None:
        had = f"its last mini-batch, {lost.mini_batch}, was handed out again"
    return (
        f"learner {lost.learner} {how} after {lost.update} updates; the others continue, and {had}"
    )


def _momentum(optimizer: Optimizer, weights: Sequence[Tensor]) -> Tensor:
    """Return the momentum of these weights as one flat tensor; zeros without momentum."""
    none: dict[str, Tensor] = {}
    kept = [optimizer.state.get(weight, none).get(MOMENTUM) for weight in weights]
    return torch.cat(
        [
            torch.zeros_like(weight).flatten() if found is None else found.flatten()
            for weight, found in zip(weights, kept, strict=True)
        ]
    ).detach()


def _load_momentum(optimizer: Optimizer, weights: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.to(weights[0].device).split([weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        optimizer.state[weight][MOMENTUM] = torch.empty_like(weight).copy_(part.view_as(weight))


def require_tensors(model: nn.Module, recipe: Recipe) -> None:
    """Raise RecipeError if a stage trains fewer tensors than the protocol has servers."""
    if recipe.protocol is None:
        return
    trained = set(model.parameters())
    if recipe.polish is not None and recipe.polish.affine is not None:
        trained = affine_parameters(model)
    servers = recipe.protocol.num_servers
    if servers > len(trained) and not recipe.protocol.split:
        raise RecipeError(
            f"protocol.servers: {servers} servers hold whole tensors, and a stage of this recipe "
            f"trains {len(trained)}: give at most that many, as in {{centralised: "
            f"{len(trained)}}}, or set protocol.split: true"
        )
