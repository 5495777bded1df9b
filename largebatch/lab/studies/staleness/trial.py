"""One run of a cell: simulated learners, real gradients, and what is recorded of both.

The first server's order of arrivals is the order in which gradients are computed here, one after
the other, so one process trains any number of learners.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic_core import to_json
from torch import Tensor, nn

from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.lab.protocols.arrivals import Arrivals
from largebatch.lab.protocols.gradients import Gradients
from largebatch.lab.protocols.replay import Part, replay
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.server import ParameterServer
from largebatch.lab.protocols.simulator import Simulation, simulate
from largebatch.lab.studies.staleness.study import Cell
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.runs.build import open_session
from largebatch.runs.interrupts import InterruptedStudyError, noting_requests
from largebatch.runs.options import Options
from largebatch.tracking.environment import source_commit, versions
from largebatch.training.session import Session

Result = dict[str, Any]
"""What is recorded of a run, as JSON."""

COURSE = 60
"""Parts of a stage whose training losses are recorded."""


def train(cell: Cell, *, seed: int, options: Options) -> Result:
    """Train a cell with one seed, in its stages, and return what is recorded.

    A run whose loss or weights stop being numbers is a result, as good as chance. An evaluation
    takes no simulated time; between two stages all learners wait for the last update. Raises
    InterruptedStudyError after a request to stop.
    """
    begun = time.perf_counter()
    recipe = cell.recipe.model_copy(update={"seed": seed, "protocol": None})
    with noting_requests() as was_asked_to_stop, open_session(recipe, options, {}) as session:
        learners = _Learners.of(cell, session, was_asked_to_stop, seed=seed)
        diverged = None
        try:
            for name, steps in _stages(session.training.plan):
                learners.train(name, steps)
            learners.measure_statistics()
        except _DivergedError as error:
            diverged = str(error)
    last = learners.stages[-1] if learners.stages and diverged is None else {}
    found = {
        "seed": seed,
        "top1": last.get("top1", 1 / recipe.data.classes),
        "loss": last.get("loss"),
        "diverged": diverged,
        "stages": learners.stages,
        "course": learners.course,
        **learners.simulated,
        "computing_seconds": time.perf_counter() - begun,
        "commit": source_commit(),
        "versions": versions(),
        "recipe": cell.recipe_of(seed),
        "cluster": cell.machines,
    }
    plain: Result = json.loads(to_json(found, inf_nan_mode="null"))  # JSON has no NaN
    return plain


def staleness_of(arrivals: Arrivals, *, sigma: int) -> dict[str, Any]:
    """Return how late gradients were, in updates, and how many by more than twice sigma."""
    tau = arrivals.staleness
    return {
        "tau": np.bincount(tau).tolist(),
        "tau_mean": float(tau.mean()),
        "tau_above_2_sigma": float((tau > 2 * sigma).mean()),
    }


class _DivergedError(Exception):
    """Training cannot go on: a loss is no number."""


@dataclass(kw_only=True)
class _Learners:
    """The server, the model that gradients are computed on, and what was found so far.

    The session's own model and optimizer are the server's; the model here becomes, one after the
    other, what each learner has read. Each learner has running statistics of its own.
    """

    cell: Cell
    session: Session
    seed: int
    rule: Rule
    was_asked_to_stop: Callable[[], bool]
    model: nn.Module
    reducer: Reducer
    spans: Spans
    clock: int = 0
    stages: list[dict[str, Any]] = field(default_factory=list)
    course: list[dict[str, float]] = field(default_factory=list)
    """Updates and simulated seconds so far, and the mean training loss since the entry before."""

    simulations: list[Simulation] = field(default_factory=list)
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)
    """The running statistics of every learner that has computed anything."""

    @classmethod
    def of(
        cls, cell: Cell, session: Session, was_asked_to_stop: Callable[[], bool], *, seed: int
    ) -> "_Learners":
        alone = Serial(session.training.backend.device)
        model = build_model(session.saver.recipe, alone.device)
        return cls(
            cell=cell,
            session=session,
            seed=seed,
            rule=cell.rule,
            was_asked_to_stop=was_asked_to_stop,
            model=model,
            reducer=Reducer(model.named_parameters(), alone, divisor=1.0),
            spans=Spans(model, alone, sync_workers=1),
        )

    def train(self, stage: str, steps: range) -> None:
        """Make the updates of a stage, and evaluate; raise _DivergedError."""
        state, size = self.session.state, self.cell.mu
        weights = list(self.model.parameters())
        held = list(state.model.parameters())
        cluster = self.cell.cluster.model_copy(
            update={"model_bytes": float(sum(weight.nbytes for weight in weights))}
        )
        # A stage has draws of its own.
        seed = int(np.random.SeedSequence((self.seed, steps.start)).generate_state(1)[0])
        found = simulate(self.rule, cluster, servers=1, updates=len(steps), seed=seed)
        self.simulations.append(found)
        arrivals = found.arrivals[0].later(steps.start, gradients=self.rule.gradients)
        server = ParameterServer(
            held, state.updater.optimizer, state.updater.schedule, self.rule, clock=steps.start
        )
        clean = stage == "clean"
        positions = (range(m * size, (m + 1) * size) for m in arrivals.mini_batch.tolist())
        with closing(self.session.training.pipeline.at(positions, clean=clean)) as batches:
            part = Part(server, range(len(weights)), arrivals)
            losses: list[float] = []
            for _, applied in replay([part], weights, self._gradient(weights, batches)):
                if not all(math.isfinite(arrival.loss) for arrival in applied.arrivals):
                    raise _DivergedError(f"update {applied.update}: the loss is no number")
                if self.was_asked_to_stop():
                    raise InterruptedStudyError
                losses += [arrival.loss for arrival in applied.arrivals]
                if (applied.update + 1 - steps.start) % math.ceil(len(steps) / COURSE) == 0:
                    self._note(applied.update + 1, losses)
        self._average_statistics()
        self._evaluate(stage)

    def _note(self, updates: int, losses: list[float]) -> None:
        """Record the progress of the run, and start to collect losses again."""
        before, found = sum(len(each.ends) for each in self.simulations[:-1]), self.simulations[-1]
        seconds = sum(float(each.ends[-1]) for each in self.simulations[:-1])
        self.course.append({
            "updates": updates,
            "seconds": seconds + float(found.ends[updates - before - 1]),
            "loss": statistics.fmean(losses),
        })  # fmt: skip
        losses.clear()

    def _gradient(
        self, weights: Sequence[nn.Parameter], batches: Iterator[Batch]
    ) -> Callable[[int, int], tuple[Sequence[Tensor], float]]:
        gradients = Gradients(
            model=self.model,
            weights=weights,
            batch=lambda _: next(batches),
            criterion=self.session.training.criterion,
            reducer=self.reducer,
            spans=self.spans,
            learners=self.rule.learners,
            seed=self.seed,
        )

        def of(learner: int, mini_batch: int) -> tuple[Sequence[Tensor], float]:
            self._have_statistics_of(learner)
            found = gradients.of(mini_batch)
            own = self.buffers[learner]
            for kept, buffer in zip(own, self.model.buffers(), strict=True):
                kept.copy_(buffer)
            return found

        return of

    def _have_statistics_of(self, learner: int) -> None:
        start = self.session.state.model.buffers
        own = self.buffers.setdefault(learner, [buffer.clone() for buffer in start()])
        for buffer, kept in zip(self.model.buffers(), own, strict=True):
            buffer.copy_(kept)

    def _average_statistics(self) -> None:
        """Set the running statistics of the model to their mean over the learners."""
        idle = self.rule.learners - len(self.buffers)
        for place, buffer in enumerate(self.session.state.model.buffers()):
            total = buffer.double() * idle
            for own in self.buffers.values():
                total += own[place]
            mean = total / self.rule.learners
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self.buffers.clear()

    def _evaluate(self, stage: str) -> None:
        found = self.session.evaluator.validation()
        if not math.isfinite(found.loss):
            raise _DivergedError(f"after {stage} the validation loss is no number")
        self.stages.append({"name": stage, "top1": found.top1, "loss": found.loss})

    @property
    def simulated(self) -> dict[str, Any]:
        """What the simulations found: staleness, and seconds."""
        whole = Arrivals.joined([found.arrivals[0] for found in self.simulations])
        return {
            "updates": int(sum(len(found.ends) for found in self.simulations)),
            "simulated_seconds": float(sum(found.ends[-1] for found in self.simulations)),
            **staleness_of(whole, sigma=self.cell.sigma),
        }

    def measure_statistics(self) -> None:
        """End with the pass that measures BatchNorm's statistics, if the recipe has one."""
        section = self.session.polish.statistics
        if section is not None:
            self.session.evaluator.statistics(section.samples, sequential=section.sequential)
            self._evaluate("statistics")


def _stages(plan: Plan) -> Iterator[tuple[str, range]]:
    """Yield the stages in which the server's weights move."""
    yield "train", range(plan.train_steps)
    if plan.clean_steps:
        yield "clean", range(plan.train_steps, plan.steps)
