"""Staleness: accuracy, staleness and simulated time of protocols, over (sigma, mu, lambda).

The grid is Rudra's (arXiv:1509.04210): sigma, the staleness that a protocol aims at, mu, the
samples of a gradient, and lambda, the learners. Learners are simulated: their gradients are real,
and the order in which these arrive, and the time, are those of a simulated cluster. The order of
arrivals is the order in which gradients are computed here, one after the other, so one process
trains any number of learners.
"""

import math
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field
from pydantic_core import to_jsonable_python
from torch import Tensor, nn

from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import DivergedError
from largebatch.lab.protocols.server import ParameterServer, UpdateRule, replay
from largebatch.lab.protocols.simulator import SimulatedCluster, Simulation, simulate
from largebatch.lab.protocols.stage import Gradients
from largebatch.lab.studies.doubts import CellRuns, StudyFinding, doubts_about, in_no_order
from largebatch.lab.studies.metrics import interval_line, point_with_intervals
from largebatch.lab.studies.records import Count, Json, Share, StudyRecord, read_as
from largebatch.lab.studies.runner import Records
from largebatch.lab.studies.study import (
    Cell,
    Grid,
    Slot,
    Study,
    Values,
    naming,
    of_few_updates,
    recipe_of,
)
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model, model_without_memory
from largebatch.optional import require_scipy
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.protocols import Softsync
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import (
    Chart,
    Line,
    Page,
    PageSection,
    Panel,
    Series,
    Table,
    columns_over,
    line_chart,
    series,
)
from largebatch.report.seeds import CONFIDENCE, Interval, difference, interval, leads, ratio
from largebatch.runs.build import open_session
from largebatch.runs.interrupts import InterruptedStudyError, noting_requests
from largebatch.runs.options import Options
from largebatch.schedules.build import build_schedule
from largebatch.tracking.events import EvaluationEvent, Event
from largebatch.training.session import Session, StageSteps, Training
from largebatch.training.stages import run_stages

_NOTE = (
    "Real gradients, simulated learners and times. Means over seeds with Student's interval of "
    "95 %. Of many cells the best one is best by luck, too. A run that diverged counts as chance."
)
_TABLE = (
    "sigma is the staleness that a protocol aims at (0: hardsync), mu the samples of a gradient, "
    "lambda the learners, tau how many updates late a gradient was. Evaluations take no time."
)
_TRADE_OFF = (
    "A line joins the cells of a protocol with equal mu x lambda. By Rudra's rule (section 4 of "
    "arXiv:1509.04210) their accuracies are equal, so that the line is level."
)
_TAU = "Shares of all gradients of a cell, over the seeds. Rudra's tau is at most 2 sigma."
_SPEED_UP = (
    "Samples per second of the simulated cluster over those of one learner alone, for the same "
    "mini-batches and times, without training: how much sooner the same samples are done, and not "
    "how much sooner an accuracy is reached."
)

PAPER_LEARNERS = 30
"""Number of learners for which Rudra has a speed-up."""

LATE_SHARE = 1e-4
"""Rudra's bound of the share of gradients that are more than 2 sigma updates late."""


@dataclass(frozen=True, kw_only=True)
class StalenessCell(Cell):
    """One point of the grid."""

    times: str
    """As the study names them."""

    cluster: SimulatedCluster
    sigma: int
    mu: int

    @property
    def protocol(self) -> str:
        """The kind of protocol, and how the rate follows staleness."""
        if not self.sigma:
            return "hardsync"
        protocol = self.recipe.protocol
        assert isinstance(protocol, Softsync)
        kind = "asynchronous" if self.sigma == self.cluster.learners else f"{self.sigma}-softsync"
        return f"{kind}, modulation {protocol.modulation}"

    @property
    def rule(self) -> UpdateRule:
        """The rule of its server."""
        protocol = self.recipe.protocol
        assert protocol is not None
        return UpdateRule.of(protocol, mini_batch=self.mu)

    @property
    def definition(self) -> Json:
        """Recipe and cluster."""
        cluster = to_jsonable_python(self.cluster)
        return {"recipe": self.recipe.model_dump(mode="json"), "cluster": cluster}

    def carry_out(self, slot: Slot, values: Values, options: Options) -> Json:
        """Train with one seed, in its stages."""
        del values
        return train(self, seed=slot.seed, options=options)

    @property
    def probe(self) -> "StalenessCell":
        """The cell with few updates."""
        return replace(self, recipe=of_few_updates(self.recipe))

    def seconds_of(self, probed: Json) -> float:
        """Return the seconds of a run: the start, the updates and the evaluations of its stages."""
        plan = make_plan(self.recipe.model_copy(update={"protocol": None}), workers=1)
        measured = probed["train_seconds"] + probed["evaluation_seconds"]
        start = max(0.0, probed["ended"] - probed["begun"] - measured)
        update = probed["train_seconds"] / max(1, probed["updates"])
        stages = 1 + (plan.clean_steps > 0) + (self.recipe.polish is not None)
        return float(start + plan.steps * update + stages * probed["evaluation_seconds"])


def cells_of(study: Study, folder: Path) -> list[StalenessCell]:
    """Return the cells of a study whose file is in `folder`, each checked and each once.

    Raises RecipeError naming the cell whose recipe and protocol do not fit each other.
    """
    assert study.staleness is not None
    return _cells(study, folder, study.staleness.grids)


def _cells(study: Study, folder: Path, grids: Sequence[Grid]) -> list[StalenessCell]:
    assert study.staleness is not None
    machines = study.staleness.machines
    bases = {name: recipe_of(one, folder) for name, one in study.recipes.items()}
    cells: dict[str, StalenessCell] = {}
    for grid in grids:
        lists = grid.recipes, grid.times, grid.sigma, grid.mu, grid.learners, grid.modulation
        for name, times, given, mu, learners, modulation in product(*lists):
            sigma = learners if given == "lambda" else given
            rate = f"-{modulation}" if sigma else ""  # all modulations of hardsync are one
            variant = f"{times}-sigma{sigma}-mu{mu}-lambda{learners}{rate}"
            base = bases[name]
            protocol = {"learners": learners, "servers": {"centralised": 1}}
            if sigma:
                protocol |= {"kind": "softsync", "n": sigma, "modulation": modulation}
            else:
                reference = base.batch.global_batch
                protocol |= {"kind": "hardsync", "modulation": "sqrt", "reference_batch": reference}
            tree = base.model_dump(mode="json")
            # An update has one gradient of every learner with hardsync, and lambda / n with
            # n-softsync.
            tree["batch"]["global_batch"] = mu * (max(1, learners // sigma) if sigma else learners)
            tree["protocol"] = protocol
            with naming(f"{name}/{variant}"):
                recipe = validate_tree(Recipe, tree, source=base.name)
                alone = make_plan(recipe.model_copy(update={"protocol": None}), workers=1)
                build_schedule(recipe.schedule, alone)
                cluster = SimulatedCluster(
                    learners=learners,
                    compute=study.staleness.times[times],
                    slow=dict.fromkeys(range(learners), machines.overhead + machines.sample * mu),
                    link=machines.link,
                    server_link=machines.server_link,
                    serving=machines.serving,
                )
            cell = StalenessCell(
                configuration=name, variant=variant, recipe=recipe, seeds=study.seeds, times=times,
                cluster=cluster, sigma=sigma, mu=mu,
            )  # fmt: skip
            cells[cell.name] = cell
    return list(cells.values())


def train(cell: StalenessCell, *, seed: int, options: Options) -> Json:
    """Train a cell with one seed, in the stages of its recipe, and return the record.

    A run whose loss or weights are not finite is a result with the accuracy of chance. An
    evaluation takes no simulated time; between two stages all learners wait for the last update.
    Raises InterruptedStudyError after a request to stop.
    """
    recipe = cell.recipe.model_copy(update={"seed": seed, "protocol": None})
    must_stop = noting_requests()
    diverged = None
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder:
        # Its checkpoints are of no use: a run that is stopped leaves nothing.
        run_options = replace(options, out=Path(folder))
        with open_session(recipe, run_options, {}) as opened:
            learners = _Learners(cell, seed, opened, must_stop)
            session = replace(opened, updates=learners.updates)
            evaluations = EvaluationTimes()
            session.log.trackers.append(evaluations)
            try:
                run_stages(session, until=session.plan.updates)
            except DivergedError as error:
                diverged = str(error)
            finally:
                session.saver.finish()
            stages = session.state.stages
    simulations = learners.simulations
    tau = [arrival.staleness for simulation in simulations for arrival in simulation.arrivals[0]]
    for stage in stages:
        if diverged is None and not math.isfinite(stage.loss):
            diverged = f"after {stage.name} the validation loss is not finite"
    last = stages[-1] if stages and diverged is None else None
    return {
        "seed": seed,
        "top1": last.top1 if last else 1 / recipe.data.classes,
        "loss": last and last.loss,
        "diverged": diverged,
        "stages": [
            {"name": stage.name, "top1": stage.top1, "loss": stage.loss} for stage in stages
        ],
        "updates": sum(len(simulation.ends) for simulation in simulations),
        "simulated_seconds": float(sum(simulation.ends[-1] for simulation in simulations)),
        "tau": np.bincount(tau).tolist(),
        "train_seconds": learners.seconds,
        "evaluation_seconds": math.fsum(evaluations),
    }


class EvaluationTimes(list[float]):
    """A tracker that keeps the seconds of each evaluation."""

    def record(self, event: Event) -> None:
        """Record one event."""
        if isinstance(event, EvaluationEvent):
            self.append(event.seconds)


class _Learners:
    """Makes the updates of a stage by a server and simulated learners, and has their results.

    The session's own model and optimizer are the server's; the model here becomes, one after the
    other, what each learner has read. Each learner has running statistics of its own.
    """

    def __init__(
        self, cell: StalenessCell, seed: int, session: Session, must_stop: Callable[[], bool]
    ) -> None:
        self.cell = cell
        self.seed = seed
        self.must_stop = must_stop
        self.pipeline = session.pipeline
        self.criterion = session.criterion
        alone = Serial(session.backend.device)
        self.model = build_model(session.saver.recipe, alone.device)
        self.reducer = Reducer(self.model.named_parameters(), alone, divisor=1.0)
        self.spans = Spans(self.model, alone, sync_workers=1)
        self.simulations: list[Simulation] = []
        self.seconds = 0.0
        """Seconds of all updates here."""

        self.buffers: dict[int, list[Tensor]] = {}
        """The running statistics of every learner that has computed anything in the stage."""

    def updates(self, training: Training, part: StageSteps) -> Generator[None, None, None]:
        """Make the updates of a stage, and yield after the last one; raise DivergedError."""
        begun = time.monotonic()
        state = training.state
        steps = part.steps
        size = self.cell.mu
        rule = self.cell.rule
        optimizer = state.updater.optimizer
        # Those of the stage: the affine one trains a part of the weights only.
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        copies = self._copy(state.model)
        weights = [copies[weight] for weight in held]
        # Another seed in each stage: else the second one would repeat the times of the first.
        seed = int(np.random.SeedSequence((self.seed, steps.start)).generate_state(1)[0])
        model_bytes = float(sum(weight.nbytes for weight in copies.values()))
        cluster = replace(self.cell.cluster, model_bytes=model_bytes)
        simulation = simulate(
            rule, cluster, servers=1, updates=len(steps), seed=seed, first=steps.start
        )
        self.simulations.append(simulation)
        arrivals = simulation.arrivals[0]
        server = ParameterServer(held, optimizer, state.updater.schedule, rule, clock=steps.start)
        positions = (
            range(arrival.mini_batch * size, (arrival.mini_batch + 1) * size)
            for arrival in arrivals
        )
        with closing(self.pipeline.at(positions, clean=part.clean)) as batches:
            gradients = Gradients(
                model=self.model,
                weights=weights,
                batch=lambda _: next(batches),
                criterion=self.criterion,
                reducer=self.reducer,
                spans=self.spans,
                learners=cluster.learners,
                seed=self.seed,
            )

            def gradient(learner: int, mini_batch: int) -> tuple[Sequence[Tensor], float]:
                self._use_statistics(learner, state.model)
                return gradients.of(mini_batch)

            for taken in replay(server, arrivals, weights, gradient):
                update = taken[0].update
                if not all(math.isfinite(arrival.loss) for arrival in taken):
                    raise DivergedError(f"update {update}: the loss is not finite")
                if self.must_stop():
                    raise InterruptedStudyError
                state.count(update, images=size * rule.gradients, seconds=0.0)
        self._average_statistics(state.model)
        self.seconds += time.monotonic() - begun
        yield

    @torch.no_grad()
    def _copy(self, model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        """Give the learners' model the server's weights; return its weight by the server's."""
        copies = dict(zip(model.parameters(), self.model.parameters(), strict=True))
        for weight, copied in copies.items():
            copied.copy_(weight)
        return copies

    def _use_statistics(self, learner: int, model: nn.Module) -> None:
        """Use the running statistics of a learner, which begin as the server's."""
        if learner not in self.buffers:
            self.buffers[learner] = [buffer.clone() for buffer in model.buffers()]
        for buffer, values in zip(self.model.buffers(), self.buffers[learner], strict=True):
            buffer.data = values  # which BatchNorm changes in place

    def _average_statistics(self, model: nn.Module) -> None:
        """Give the server the mean of the learners' running statistics, at the end of a stage."""
        learners = self.cell.cluster.learners
        idle = learners - len(self.buffers)  # these have the statistics that the stage began with
        for place, buffer in enumerate(model.buffers()):
            total = buffer.double() * idle
            for buffers in self.buffers.values():
                total += buffers[place]
            mean = total / learners
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self.buffers.clear()


def _require_any(counts: tuple[int, ...]) -> tuple[int, ...]:
    if not any(counts):
        raise ValueError("expected one gradient or more")
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRecord(StudyRecord):
    """Record of one run."""

    top1: Share
    updates: Count
    simulated_seconds: Annotated[float, Field(gt=0, le=1e15)]
    tau: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_require_any)]
    """Number of gradients by how many updates late they were, from 0 on."""


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """A cell with the records of its seeds."""

    cell: StalenessCell
    records: tuple[StalenessRecord, ...]

    @property
    def by_seed(self) -> dict[int, float]:
        """Top-1 accuracy in percent, by seed."""
        return {record.seed: 100 * record.top1 for record in self.records}

    @property
    def top1(self) -> Interval:
        """Top-1 accuracy in percent, over the seeds."""
        return interval(self.by_seed.values())

    @property
    def spent(self) -> Interval:
        """Simulated seconds of a run, over the seeds."""
        return interval(record.simulated_seconds for record in self.records)

    @property
    def seconds(self) -> float:
        """Mean of `spent`."""
        return self.spent.mean

    @property
    def counts(self) -> list[int]:
        """Number of gradients that were 0, 1, 2 ... updates late, over the seeds."""
        late = zip_longest(*(record.tau for record in self.records), fillvalue=0)
        return [sum(numbers) for numbers in late]

    @property
    def tau(self) -> float:
        """Mean staleness in updates over all gradients; NaN without a gradient."""
        if not any(self.counts):
            return math.nan
        return float(np.average(range(len(self.counts)), weights=self.counts))

    @property
    def largest_tau(self) -> int:
        """Staleness of the latest gradient in updates; 0 without a gradient."""
        return max((tau for tau, count in enumerate(self.counts) if count), default=0)

    @property
    def late(self) -> int:
        """Number of gradients that were more than 2 sigma updates late."""
        return sum(self.counts[2 * self.cell.sigma + 1 :])

    @property
    def late_percent(self) -> float:
        """Share of these gradients; NaN without a gradient."""
        gradients = sum(self.counts)
        return 100 * self.late / gradients if gradients else math.nan

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(record.diverged is not None for record in self.records)

    @property
    def words(self) -> str:
        """Its point, for a sentence."""
        return f"{self.cell.protocol} (mu {self.cell.mu}, lambda {self.cell.cluster.learners})"


def doubts_about_rows(
    rows: Sequence[StalenessRow], others: Sequence[StalenessRow] = ()
) -> list[str]:
    """Return what speaks against a finding about some rows, ranked above others.

    Times are simulated, so that they need no quiet machine.
    """
    above, below = (
        [
            CellRuns(
                name=row.words,
                runs={record.seed: record for record in row.records},
                seeds=row.cell.seeds,
            )
            for row in some
        ]
        for some in (rows, others)
    )
    return doubts_about(above, others=below, study=(), of_time=False)


def findings(name: str, rows: Sequence[StalenessRow]) -> Iterator[StudyFinding]:
    """Yield which cells of one recipe with the same times are the best and the fastest.

    The fastest is compared with hardsync of the same mu and lambda, if the study has it.
    """
    best = max(rows, key=lambda row: row.top1.mean)
    others = [row for row in rows if row is not best]
    compared = leads(best.by_seed, {row.words: row.by_seed for row in others})
    level = [lead.over for lead in compared if not lead.is_sure]
    doubts = doubts_about_rows([best], others)
    if not others:
        doubts.append("only one cell was measured")
    doubts += in_no_order(best.words, level, between="; ")
    yield StudyFinding(
        about=f"{name}, the highest top-1",
        text=f"{best.top1.with_ends('.2f', '%')}, of {best.words}, in {best.seconds:,.4g} s of the "
        "simulated cluster",
        doubts=doubts,
    )
    fastest = min(rows, key=lambda row: row.seconds)
    point = fastest.cell.mu, fastest.cell.cluster.learners
    for row in rows:
        waits = not row.cell.sigma and (row.cell.mu, row.cell.cluster.learners) == point
        if waits and row is not fastest:
            points = difference(fastest.by_seed, row.by_seed)
            shown = points.with_ends("+.2f", " points") if points else "unknown"
            times = fastest.seconds / row.seconds
            yield StudyFinding(
                about=f"{name}, the fastest against hardsync",
                text=f"{fastest.words} takes {times:.2f} times as long. Its "
                f"top-1 is {fastest.top1.with_ends('.2f', '%')}; minus hardsync's, {shown}",
                doubts=doubts_about_rows([fastest, row]),
            )


def diagonals(rows: Sequence[StalenessRow]) -> dict[tuple[str, int], list[StalenessRow]]:
    """Return the cells by protocol and mu x lambda, where several have both.

    One learner alone is asynchronous and every softsync at the same time, so it is in all of them.
    """
    protocols = dict.fromkeys(row.cell.protocol for row in rows if row.cell.sigma)
    joined: dict[tuple[str, int], list[StalenessRow]] = {}
    for row in rows:
        on_lines = [row.cell.protocol]
        if row.cell.sigma and row.cell.cluster.learners == 1:
            on_lines = list(protocols)
        for protocol in on_lines:
            samples = row.cell.mu * row.cell.cluster.learners
            joined.setdefault((protocol, samples), []).append(row)
    return {key: inside for key, inside in joined.items() if len(inside) > 1}


def rudra_findings(name: str, rows: Sequence[StalenessRow]) -> Iterator[StudyFinding]:
    """Yield what the cells of one recipe with the same times show of Rudra's two rules.

    They are that few gradients are more than 2 sigma updates late, and that accuracy follows
    mu x lambda.
    """
    # One learner alone is never late, so it says nothing about the others.
    free = [row for row in rows if row.cell.sigma and not is_alone(row.cell)]
    gradients = sum(sum(row.counts) for row in free)
    late = sum(row.late for row in free)
    if gradients:
        latest = max(free, key=lambda row: row.largest_tau / row.cell.sigma)
        share = late / gradients
        doubts = doubts_about_rows(free)
        # One-sided tests of the bound, as if gradients were late independently of each other.
        binomial = require_scipy("scipy.stats").binom
        fewer = float(binomial.cdf(late, gradients, LATE_SHARE)) < 1 - CONFIDENCE
        more = float(binomial.sf(late - 1, gradients, LATE_SHARE)) < 1 - CONFIDENCE
        if not (fewer or more):
            doubts.append(
                f"too few gradients to judge: {late:,} of {gradients:,}, and Rudra's bound is "
                f"{LATE_SHARE:g}"
            )
        judged = "confirms" if fewer else "refutes"
        yield StudyFinding(
            about=f"{name}, gradients more than 2 sigma updates late",
            text=f"{late:,} of {gradients:,} without hardsync, a share of {share:.2g}, which "
            f"{judged} Rudra's bound of {LATE_SHARE:g}; the largest tau is {latest.largest_tau:,} "
            f"updates, {latest.largest_tau / latest.cell.sigma:.2f} sigma, of {latest.words}",
            doubts=doubts,
        )
    joined = diagonals(rows)
    gaps = {}
    # The lowest and the highest of several cells are chosen among all pairs of them.
    pairs = sum(math.comb(len(inside), 2) for inside in joined.values())
    for point, inside in joined.items():
        low, *_, high = sorted(inside, key=lambda row: row.top1.mean)
        gap = difference(high.by_seed, low.by_seed, together=pairs)
        if gap is not None:
            gaps[point] = gap
    if gaps:
        widest = max(gaps, key=lambda point: gaps[point].mean)
        protocol, samples = widest
        gap = gaps[widest]
        doubts = doubts_about_rows(joined[widest])
        if gap.low <= 0:
            doubts.append("within the noise of seeds")
        yield StudyFinding(
            about=f"{name}, equal protocol and mu x lambda",
            text=f"cells differ by up to {gap.with_ends('.2f', ' points')} of top-1, at "
            f"{samples:,} of {protocol}; by Rudra's rule they are equal",
            doubts=doubts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUpRow:
    """The simulated speed of a number of learners."""

    protocol: str
    cell: StalenessCell
    seconds: Mapping[int, float]
    """Seconds of a sample, by seed."""

    alone: Mapping[int, float]
    """The same of one learner alone."""

    @property
    def panel(self) -> str:
        """Times and mini-batch, within which protocols are compared."""
        return f"{self.cell.times}, mu {self.cell.mu:,}"

    @property
    def speed_up(self) -> Interval:
        """Samples per second over those of one learner alone, by pairs of a seed."""
        faster = ratio(self.alone, self.seconds)
        assert faster is not None  # both have the same seeds
        return faster


def speed_ups(study: Study, folder: Path) -> list[SpeedUpRow]:
    """Simulate the speed-up of a study whose file is in `folder`; empty if it has none.

    Raises RecipeError as cells_of does.
    """
    assert study.staleness is not None
    section = study.staleness.speed_up
    if section is None:
        return []
    names = {0: "hardsync", "lambda": "asynchronous"}
    rows = []
    for sigma in section.sigma:
        grid = Grid(
            recipes=(section.recipe,),
            times=tuple(study.staleness.times),
            sigma=(sigma,),
            mu=section.mu,
            learners=tuple(sorted({1, *section.learners})),
            modulation=("n",),
        )
        cells = _cells(study, folder, [grid])
        model = model_without_memory(cells[0].recipe.model, classes=cells[0].recipe.data.classes)
        size = float(sum(weight.nbytes for weight in model.parameters()))
        seconds = {
            cell.name: {
                seed: _seconds_of_sample(cell, size, gradients=section.gradients, seed=seed)
                for seed in range(1, section.seeds + 1)
            }
            for cell in cells
        }
        alone = {(one.times, one.mu): seconds[one.name] for one in cells if is_alone(one)}
        rows += [
            SpeedUpRow(
                protocol=names.get(sigma, f"{sigma}-softsync"),
                cell=cell,
                seconds=seconds[cell.name],
                alone=alone[cell.times, cell.mu],
            )
            for cell in cells
        ]
    return rows


def is_alone(cell: StalenessCell) -> bool:
    """Return True if the cell has one learner."""
    return cell.cluster.learners == 1


def _seconds_of_sample(
    cell: StalenessCell, model_bytes: float, *, gradients: int, seed: int
) -> float:
    cluster = replace(cell.cluster, model_bytes=model_bytes)
    updates = max(1, gradients // cell.rule.gradients)
    simulation = simulate(cell.rule, cluster, servers=1, updates=updates, seed=seed)
    return float(simulation.ends[-1]) / (updates * cell.rule.gradients * cell.mu)


def speed_up_findings(rows: Sequence[SpeedUpRow]) -> Iterator[StudyFinding]:
    """Yield the speed-up of each protocol at the most learners, by times and mini-batch."""
    for panel in dict.fromkeys(row.panel for row in rows):
        inside = [row for row in rows if row.panel == panel]
        most = max(row.cell.cluster.learners for row in inside)
        listed = ", ".join(
            f"{row.protocol} {row.speed_up.with_ends('.1f', ' times')}"
            for row in inside
            if row.cell.cluster.learners == most
        )
        paper = "; Rudra has 22 to 28 times" if most == PAPER_LEARNERS else ""
        yield StudyFinding(
            about=f"Simulated speed-up of {most} learners over one, {panel}",
            text=f"{listed}{paper}",
        )


def speed_up_section(rows: Sequence[SpeedUpRow], looks: Mapping[str, Series]) -> PageSection:
    """Return the table and the charts of speed-ups over learners."""
    column = columns_over(rows)
    columns = [
        column("Protocol", lambda row: row.protocol, None),
        column("Times", lambda row: row.cell.times, None),
        column("mu", lambda row: row.cell.mu, ",d"),
        column("lambda", lambda row: row.cell.cluster.learners, ",d"),
        column("Speed-up", lambda row: row.speed_up.mean, ".2f"),
        column("±", lambda row: row.speed_up.reach, ".2f"),
        column("Seeds", lambda row: len(row.seconds), "d"),
    ]
    table = Table(name="speed-up", columns=columns, series=[looks[row.protocol] for row in rows])
    charts = []
    for place, panel in enumerate(dict.fromkeys(row.panel for row in rows)):
        lines = []
        for protocol in dict.fromkeys(row.protocol for row in rows):
            line = [row for row in rows if (row.panel, row.protocol) == (panel, protocol)]
            learners = [row.cell.cluster.learners for row in line]
            means = [row.speed_up for row in line]
            lines.append(interval_line(looks[protocol], learners, means))
        axes = Panel(lines=lines, x="Learners (lambda)", y="Speed-up", from_zero=True)
        charts.append(
            line_chart(f"speed-up-{place}", axes, title=f"Speed-up: {panel}", caption=panel)
        )
    return PageSection(title="Speed-up", parts=[table, *charts], notes=[_SPEED_UP])


def trade_off_chart(
    name: str, panel: str, rows: Sequence[StalenessRow], looks: Mapping[str, Series]
) -> Chart:
    """Return top-1 over simulated time, with lines that join cells of equal mu x lambda."""
    lines = [point_with_intervals(looks[row.cell.protocol], row.spent, row.top1) for row in rows]
    for (protocol, _), inside in diagonals(rows).items():
        points = sorted((row.seconds, row.top1.mean) for row in inside)
        seconds, means = zip(*points, strict=True)
        lines.append(Line(series=looks[protocol], x=seconds, y=means, points=False))
    axes = Panel(lines=lines, x="Simulated seconds of a run", y="Top-1, %", log="x")
    return line_chart(name, axes, title=f"Top-1 by time: {panel}", caption=panel)


def tau_chart(
    name: str, panel: str, rows: Sequence[StalenessRow], looks: Mapping[str, Series]
) -> Chart:
    """Return the histogram of staleness of each cell."""
    lines = []
    for row in rows:
        counts = row.counts[: row.largest_tau + 1]
        shares = [100 * count / sum(counts) for count in counts]
        lines.append(Line(series=looks[row.cell.protocol], x=range(len(shares)), y=shares))
    axes = Panel(lines=lines, x="Staleness tau, updates", y="Gradients, %", from_zero=True)
    return line_chart(name, axes, title=f"Staleness: {panel}", caption=panel)


def make_page(study: Study, folder: Path, records: Records) -> Page:
    """Return the page of a study whose file is in `folder`, from its records."""
    rows = []
    for cell in cells_of(study, folder):
        if cell.name in records:
            results = (
                read_as(StalenessRecord, content, source=f"{cell.name}/{run}.json")
                for run, content in records[cell.name].items()
            )
            rows.append(StalenessRow(cell, tuple(results)))
    faster = speed_ups(study, folder)
    protocols = dict.fromkeys(row.cell.protocol for row in rows)
    protocols |= dict.fromkeys(row.protocol for row in faster)
    looks = {protocol: series(place, protocol) for place, protocol in enumerate(protocols)}
    panels: dict[str, list[StalenessRow]] = {}  # only cells of one are compared
    for row in rows:
        panels.setdefault(f"{row.cell.configuration}, {row.cell.times}", []).append(row)
    trade_offs = list[Chart]()
    histograms = list[Chart]()
    for place, (panel, inside) in enumerate(panels.items()):
        trade_offs.append(trade_off_chart(f"trade-off-{place}", panel, inside, looks))
        late = [row for row in inside if row.cell.sigma and not is_alone(row.cell)]
        if late:
            histograms.append(tau_chart(f"tau-{place}", panel, late, looks))
    column = columns_over(rows)
    columns = [
        column("Protocol", lambda row: row.cell.protocol, None),
        column("Recipe", lambda row: row.cell.configuration, None),
        column("Times", lambda row: row.cell.times, None),
        column("sigma", lambda row: row.cell.sigma, "d"),
        column("mu", lambda row: row.cell.mu, ",d"),
        column("lambda", lambda row: row.cell.cluster.learners, ",d"),
        column("mu x lambda", lambda row: row.cell.mu * row.cell.cluster.learners, ",d"),
        column("Top-1, %", lambda row: row.top1.mean, ".2f"),
        column("±", lambda row: row.top1.reach, ".2f"),
        column("Seconds", lambda row: row.seconds, ",.2f"),
        column("Mean tau", lambda row: row.tau, ".2f"),
        column("Largest tau", lambda row: row.largest_tau, ",d"),
        column("tau > 2 sigma, %", lambda row: row.late_percent, ".4f"),
        column("Updates", lambda row: row.records[0].updates, ",d"),
        column("Seeds", lambda row: len(row.records), "d"),
        column("Diverged", lambda row: row.diverged, "d"),
    ]
    table = Table(name="cells", columns=columns, series=[looks[row.cell.protocol] for row in rows])
    sections = []
    if rows:
        sections.append(PageSection(title="Cells", parts=[table], notes=[_TABLE]))
        sections.append(PageSection(title="Accuracy by time", parts=trade_offs, notes=[_TRADE_OFF]))
    if histograms:
        sections.append(PageSection(title="Staleness", parts=histograms, notes=[_TAU]))
    if faster:
        sections.append(speed_up_section(faster, looks))
    conclusions = [one for name, inside in panels.items() for one in findings(name, inside)]
    conclusions += [one for name, inside in panels.items() for one in rudra_findings(name, inside)]
    conclusions += speed_up_findings(faster)
    return Page(
        title=study.name,
        subtitle="; ".join(panels),
        findings=list(map(str, conclusions)),
        is_sound=not any(finding.doubts for finding in conclusions),
        note=_NOTE,
        legend=("Protocols", list(looks.values())),
        sections=sections,
        source="the records of a study",
    )
