"""Staleness: accuracy, staleness and simulated time of protocols, over (sigma, mu, lambda).

The grid is Rudra's (arXiv:1509.04210): sigma, the staleness that a protocol aims at, mu, the
samples of a gradient, and lambda, the learners. Learners are simulated: their gradients are real,
and the order in which these arrive, and the time, are those of a simulated cluster. The order of
arrivals is the order in which gradients are computed here, one after the other, so one process
trains any number of learners.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
from pydantic_core import to_json
from torch import Tensor, nn

from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.lab.protocols.cluster import Cluster
from largebatch.lab.protocols.gradients import Gradients
from largebatch.lab.protocols.replay import Part, replay
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.server import Arrivals, ParameterServer
from largebatch.lab.protocols.simulator import Simulation, simulate
from largebatch.lab.studies.lines import interval_line
from largebatch.lab.studies.metrics import Interval, difference, interval, ratio
from largebatch.lab.studies.study import (
    Cell,
    Grid,
    Modulation,
    Study,
    Task,
    named_error,
    recipe_of,
)
from largebatch.lab.studies.trained import circumstances
from largebatch.models.batchnorm import Spans
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.protocols import Hardsync, Softsync
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import (
    Chart,
    Line,
    Page,
    Panel,
    Section,
    Series,
    Table,
    columns_over,
    line_chart,
    series,
)
from largebatch.runs.build import open_session
from largebatch.runs.interrupts import InterruptedStudyError, noting_requests
from largebatch.runs.options import Options
from largebatch.schedules.build import build_schedule
from largebatch.training.session import Session

_NOTE = (
    "The gradients are real, the learners and their times are simulated. Means over seeds with "
    "Student's interval of 95 %. Of many cells the best one is best by luck, too. A run that "
    "diverged counts as chance."
)
_TABLE = (
    "sigma is the staleness that a protocol aims at (0: hardsync), mu the samples of a gradient, "
    "lambda the learners. tau is how many updates late a gradient was; the paper expects at most "
    "2 sigma (arXiv:1509.04210). Seconds are those of the simulated cluster, for a whole run "
    "without its evaluations."
)
_TRADE_OFF = (
    "The mean error of each cell with its interval of 95 %. A line joins cells of a protocol with "
    "equal mu x lambda: by the paper's rule it is level."
)
_SPEED_UP = (
    "Samples per second of the simulated cluster over those of one learner alone, for the same "
    "mini-batches and times, without any training: how much sooner the same samples are done, not "
    "how much sooner an accuracy is reached."
)

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StalenessCell(Cell):
    """One point of the grid."""

    times: str
    """As the study names them."""

    cluster: Cluster
    sigma: int
    mu: int

    @property
    def learners(self) -> int:
        """Number of learners (lambda)."""
        return self.cluster.learners

    @property
    def samples(self) -> int:
        """Samples that all learners compute on at a time (mu lambda)."""
        return self.mu * self.learners

    @property
    def protocol(self) -> str:
        """The kind of protocol, and how the rate follows staleness."""
        if not self.sigma:
            return "hardsync"
        kind = "asynchronous" if self.sigma == self.learners else f"{self.sigma}-softsync"
        return f"{kind}, modulation {self.modulation}"

    @property
    def modulation(self) -> str:
        """Modulation of the learning rate."""
        protocol = self.recipe.protocol
        assert isinstance(protocol, Hardsync | Softsync)  # the grids have no other
        return protocol.modulation

    @property
    def rule(self) -> Rule:
        """The rule of its server."""
        protocol = self.recipe.protocol
        assert protocol is not None
        samples = protocol.mini_batch(self.recipe.batch.global_batch)
        return Rule.of(protocol, mini_batch=samples)

    @property
    def definition(self) -> Json:
        """Recipe and cluster."""
        cluster = json.loads(self.cluster.model_dump_json())  # keys become strings
        return {"recipe": self.recipe.model_dump(mode="json"), "cluster": cluster}

    def carry_out(self, task: Task) -> Json:
        """Train with one seed, in its stages."""
        return train(self, seed=task.slot.seed, options=Options(out=task.folder, **task.options))

    def describe(self, record: Json) -> str:
        """Describe accuracy, staleness and simulated time of a run."""
        reached = f"top-1 {record['top1']:.2%}"
        if record["diverged"] is not None:
            reached = f"diverged: {record['diverged']}"
        return (
            f"{reached}, mean tau {record['tau_mean']:.2f}, simulated "
            f"{record['simulated_seconds']:,.4g} s"
        )


def cells_of(study: Study, folder: Path) -> list[StalenessCell]:
    """Return the cells of a study whose file is in `folder`, each checked and each once.

    Raises RecipeError naming the cell whose recipe and protocol do not fit each other.
    """
    assert study.staleness is not None
    points = {point.name: point for grid in study.staleness.grids for point in _points(grid)}
    return _cells(study, folder, points.values())


def _cells(study: Study, folder: Path, points: Iterable["_Point"]) -> list[StalenessCell]:
    bases = {name: recipe_of(one, folder) for name, one in study.recipes.items()}
    cells = []
    for point in points:
        try:
            cells.append(_cell(study, bases[point.recipe], point))
        except LargebatchError as error:
            raise named_error(point.name, error) from None
    return cells


@dataclass(frozen=True, slots=True)
class _Point:
    recipe: str
    times: str
    sigma: int
    mu: int
    learners: int
    modulation: Modulation

    @property
    def variant(self) -> str:
        """Name that is the same for all modulations of hardsync."""
        rate = f"-{self.modulation}" if self.sigma else ""
        return f"{self.times}-sigma{self.sigma}-mu{self.mu}-lambda{self.learners}{rate}"

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.variant}"


def _points(grid: Grid) -> Iterator[_Point]:
    lists = grid.recipes, grid.times, grid.sigma, grid.mu, grid.learners, grid.modulation
    for recipe, times, sigma, mu, learners, modulation in product(*lists):
        number = learners if sigma == "lambda" else sigma
        yield _Point(recipe, times, number, mu, learners, modulation)


def _cell(study: Study, base: Recipe, point: _Point) -> StalenessCell:
    assert study.staleness is not None
    machines, times = study.staleness.machines, study.staleness.times[point.times]
    takes = point.learners if not point.sigma else max(1, point.learners // point.sigma)
    tree = base.model_dump(mode="json")
    tree["batch"]["global_batch"] = takes * point.mu
    protocol: Json = {"learners": point.learners, "servers": {"centralised": 1}}
    if point.sigma:
        protocol |= {"kind": "softsync", "n": point.sigma, "modulation": point.modulation}
    else:
        reference = base.batch.global_batch
        protocol |= {"kind": "hardsync", "modulation": "sqrt", "reference_batch": reference}
    tree["protocol"] = protocol
    recipe = validate_tree(Recipe, tree, source=base.name)
    alone = make_plan(recipe.model_copy(update={"protocol": None}), workers=1)
    build_schedule(recipe.schedule, alone)
    seconds = machines.overhead + machines.sample * point.mu
    cluster = Cluster(
        learners=point.learners,
        compute=times.factor,
        slow={n: seconds * times.slow.get(n, 1.0) for n in range(point.learners)},
        link=machines.link,
        server_link=machines.server_link,
        serving=machines.serving,
    )
    return StalenessCell(
        study=study.name, configuration=point.recipe, variant=point.variant, recipe=recipe,
        seeds=study.seeds, times=point.times, cluster=cluster, sigma=point.sigma, mu=point.mu,
    )  # fmt: skip


def train(cell: StalenessCell, *, seed: int, options: Options) -> Json:
    """Train a cell with one seed, in its stages, and return the record.

    A run whose loss or weights are not finite is a result with the accuracy of chance. An
    evaluation takes no simulated time; between two stages all learners wait for the last update.
    Raises InterruptedStudyError after a request to stop.
    """
    begun = time.perf_counter()
    recipe = cell.recipe.model_copy(update={"seed": seed, "protocol": None})
    with noting_requests() as was_asked_to_stop, open_session(recipe, options, {}) as session:
        learners = _Learners.of(cell, session, was_asked_to_stop, seed=seed)
        diverged = None
        try:
            plan = session.training.plan
            learners.train("train", range(plan.train_steps))
            if plan.clean_steps:
                learners.train("clean", range(plan.train_steps, plan.steps))
            learners.measure_statistics()
        except _DivergedError as error:
            diverged = str(error)
    last = learners.stages[-1] if learners.stages and diverged is None else {}
    record = {
        "seed": seed,
        "top1": last.get("top1", 1 / recipe.data.classes),
        "loss": last.get("loss"),
        "diverged": diverged,
        "stages": learners.stages,
        **learners.simulated,
        "computing_seconds": time.perf_counter() - begun,
        **circumstances(),
    }
    return cast("Json", json.loads(to_json(record, inf_nan_mode="null")))  # JSON has no NaN


def staleness_of(arrivals: Arrivals, *, sigma: int) -> Json:
    """Return counts of gradients by staleness in updates, and the part above twice sigma."""
    tau = arrivals.staleness
    return {
        "tau": np.bincount(tau).tolist(),
        "tau_mean": float(tau.mean()),
        "tau_above_2_sigma": float((tau > 2 * sigma).mean()),
    }


class _DivergedError(Exception):
    """A loss is not finite."""


@dataclass(kw_only=True)
class _Learners:
    """The server, the model that gradients are computed on, and the results so far.

    The session's own model and optimizer are the server's; the model here becomes, one after the
    other, what each learner has read. Each learner has running statistics of its own.
    """

    cell: StalenessCell
    session: Session
    seed: int
    rule: Rule
    was_asked_to_stop: Callable[[], bool]
    model: nn.Module
    reducer: Reducer
    spans: Spans
    stages: list[Json] = field(default_factory=list)
    simulations: list[Simulation] = field(default_factory=list)
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)
    """The running statistics of every learner that has computed anything."""

    @classmethod
    def of(
        cls, cell: StalenessCell, session: Session, was_asked_to_stop: Callable[[], bool], *,
        seed: int,
    ) -> "_Learners":  # fmt: skip
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
        positions = (range(m * size, (m + 1) * size) for m in arrivals.mini_batch.tolist())
        with closing(
            self.session.training.pipeline.at(positions, clean=stage == "clean")
        ) as batches:
            part = Part(server, range(len(weights)), arrivals)
            for _, applied in replay([part], weights, self._gradient(weights, batches)):
                if not all(math.isfinite(arrival.loss) for arrival in applied.arrivals):
                    raise _DivergedError(f"update {applied.update}: the loss is not finite")
                if self.was_asked_to_stop():
                    raise InterruptedStudyError
        self._average_statistics()
        self._evaluate(stage)

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
            start = self.session.state.model.buffers
            own = self.buffers.setdefault(learner, [buffer.clone() for buffer in start()])
            for buffer, kept in zip(self.model.buffers(), own, strict=True):
                buffer.copy_(kept)
            found = gradients.of(mini_batch)
            for kept, buffer in zip(own, self.model.buffers(), strict=True):
                kept.copy_(buffer)
            return found

        return of

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
            raise _DivergedError(f"after {stage} the validation loss is not finite")
        self.stages.append({"name": stage, "top1": found.top1, "loss": found.loss})

    @property
    def simulated(self) -> Json:
        """Staleness and simulated seconds so far."""
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
            self.session.evaluator.statistics(section.samples)
            self._evaluate("statistics")


@dataclass(frozen=True, slots=True)
class StalenessRow:
    """A cell with the records of its seeds."""

    cell: StalenessCell
    records: tuple[Json, ...]

    @property
    def top1(self) -> Interval:
        """Top-1 accuracy, over the seeds."""
        return interval(one["top1"] for one in self.records)

    @property
    def by_seed(self) -> dict[int, float]:
        """Top-1 accuracy, by seed."""
        return {one["seed"]: one["top1"] for one in self.records}

    @property
    def error(self) -> Interval:
        """Top-1 error, over the seeds."""
        return interval(1 - one["top1"] for one in self.records)

    @property
    def seconds(self) -> float:
        """Simulated seconds of a run, the mean over the seeds."""
        return fmean(one["simulated_seconds"] for one in self.records)

    @property
    def counts(self) -> list[int]:
        """Number of gradients that were 0, 1, 2 ... updates late, over the seeds."""
        late = zip_longest(*(one["tau"] for one in self.records), fillvalue=0)
        return [sum(numbers) for numbers in late]

    @property
    def staleness(self) -> list[float]:
        """Fraction of all gradients that was 0, 1, 2 ... updates late."""
        return [count / sum(self.counts) for count in self.counts]

    @property
    def tau(self) -> float:
        """Mean staleness in updates, the mean over the seeds."""
        return fmean(one["tau_mean"] for one in self.records)

    @property
    def late(self) -> int:
        """Number of gradients that were more than 2 sigma updates late."""
        return sum(self.counts[2 * self.cell.sigma + 1 :])

    @property
    def diverged(self) -> int:
        """Number of runs that diverged."""
        return sum(one["diverged"] is not None for one in self.records)


def panels(rows: Sequence[StalenessRow]) -> dict[str, list[StalenessRow]]:
    """Return the cells by recipe and times: only cells of one panel are compared."""
    found: dict[str, list[StalenessRow]] = defaultdict(list)
    for row in rows:
        found[f"{row.cell.configuration}, {row.cell.times}"].append(row)
    return found


def diagonals(rows: Sequence[StalenessRow]) -> dict[tuple[str, int], list[StalenessRow]]:
    """Return the cells of a panel by protocol and mu x lambda.

    One learner alone is asynchronous and every softsync at the same time. Rudra's rule
    (arXiv:1509.04210) is that the error is constant along a diagonal.
    """
    free = dict.fromkeys(row.cell.protocol for row in rows if row.cell.sigma)
    found: dict[tuple[str, int], list[StalenessRow]] = defaultdict(list)
    for row in rows:
        is_all = row.cell.sigma and row.cell.learners == 1
        for protocol in free if is_all else (row.cell.protocol,):
            found[protocol, row.cell.samples].append(row)
    return found


def findings(rows: Sequence[StalenessRow]) -> Iterator[str]:
    """Yield which cells of each panel are the best and the fastest.

    The fastest is compared with hardsync of the same mu and lambda, if the study has it.
    """
    for name, inside in panels(rows).items():
        best = min(inside, key=lambda row: row.error.mean)
        yield (
            f"{name}: the highest top-1 is {_top1(best)}, of {_where(best)}, in "
            f"{best.seconds:,.4g} s of the simulated cluster."
        )
        fastest = min(inside, key=lambda row: row.seconds)
        point = fastest.cell.mu, fastest.cell.learners
        waiting = [row for row in inside if (row.cell.mu, row.cell.learners) == point
                   and not row.cell.sigma and row is not fastest]  # fmt: skip
        for row in waiting:
            points = difference(fastest.by_seed, row.by_seed).scaled(100)
            yield (
                f"The fastest, {_where(fastest)}, takes {fastest.seconds / row.seconds:.2f} times "
                f"as long as hardsync. Its top-1 is {_top1(fastest)}; minus hardsync's, "
                f"{points.with_ends('+.2f', ' points')}."
            )
        if diverged := [row for row in inside if row.diverged]:
            yield f"Runs diverged, which counts as chance, of {'; '.join(map(_where, diverged))}."


def _where(row: StalenessRow) -> str:
    return f"{row.cell.protocol} (mu {row.cell.mu}, lambda {row.cell.learners})"


def _top1(row: StalenessRow) -> str:
    return row.top1.scaled(100).text(".2f", "%")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """A number of learners under a protocol, against one learner alone."""

    protocol: str
    cell: StalenessCell
    seconds: Mapping[int, float]
    """Simulated seconds per sample, by seed."""

    alone: Mapping[int, float]
    """The same of one learner alone."""

    @property
    def panel(self) -> str:
        """Times and mini-batch, in which protocols are compared."""
        return f"{self.cell.times}, mu {self.cell.mu:,}"

    @property
    def over_alone(self) -> Interval:
        """Samples per second over those of one learner alone, by pairs of a seed."""
        found = ratio(self.alone, self.seconds).interval
        assert found is not None  # both have the same seeds
        return found


def speed_ups(study: Study, folder: Path) -> list[SpeedUp]:
    """Simulate the speed-up of a study whose file is in `folder`; empty if it has none.

    Raises RecipeError as cells_of does.
    """
    assert study.staleness is not None
    section = study.staleness.speed_up
    if section is None:
        return []
    names = {0: "hardsync", "lambda": "asynchronous"}
    found, size = [], 0.0
    for sigma in section.sigma:
        grid = Grid(
            recipes=(section.recipe,), sigma=(sigma,), mu=section.mu,
            learners=tuple(sorted({1, *section.learners})), modulation=("n",),
            times=tuple(study.staleness.times),
        )  # fmt: skip
        cells = _cells(study, folder, _points(grid))
        if not size:
            model = build_model(cells[0].recipe, Serial().device)
            size = float(sum(weight.nbytes for weight in model.parameters()))
        seconds = {
            cell.name: {
                seed: _seconds(cell, model_bytes=size, gradients=section.gradients, seed=seed)
                for seed in range(1, study.seeds + 1)
            }
            for cell in cells
        }
        alone = {(one.times, one.mu): seconds[one.name] for one in cells if one.learners == 1}
        found += [
            SpeedUp(
                protocol=names.get(sigma, f"{sigma}-softsync"), cell=one,
                seconds=seconds[one.name], alone=alone[one.times, one.mu],
            )
            for one in cells
        ]  # fmt: skip
    return found


def _seconds(cell: StalenessCell, *, model_bytes: float, gradients: int, seed: int) -> float:
    """Return the simulated seconds per sample."""
    rule = cell.rule
    updates = max(1, gradients // rule.gradients)
    cluster = cell.cluster.model_copy(update={"model_bytes": model_bytes})
    found = simulate(rule, cluster, servers=1, updates=updates, seed=seed)
    return float(found.ends[-1]) / (updates * rule.gradients * cell.mu)


def make_page(name: str, rows: Sequence[StalenessRow], found: Sequence[SpeedUp] = ()) -> Page:
    """Return the page of the cells that have records, and of simulated speed-ups."""
    protocols = dict.fromkeys(row.cell.protocol for row in rows)
    protocols |= dict.fromkeys(one.protocol for one in found)
    looks = {protocol: series(place, protocol) for place, protocol in enumerate(protocols)}
    charts = []
    for place, (panel, inside) in enumerate(panels(rows).items()):
        charts.append(_trade_off(f"trade-off-{place}", panel, inside, looks))
        late = [row for row in inside if row.cell.sigma]
        if late:
            lines = [
                Line(series=looks[row.cell.protocol], x=range(len(row.staleness)),
                     y=[100 * share for share in row.staleness], size=3)
                for row in late
            ]  # fmt: skip
            shares = Panel(lines=lines, x="Staleness tau, updates", y="Gradients, %")
            charts.append(line_chart(f"staleness-{place}", shares, title=f"Staleness: {panel}"))
    sections = [
        Section(title="Cells", parts=[_table(rows, looks)], notes=[_TABLE]),
        Section(title="Accuracy against time, and staleness", parts=charts, notes=[_TRADE_OFF]),
    ]
    if found:
        sections.append(_speed_up_section(found, looks))
    return Page(
        title=name,
        subtitle="; ".join(panels(rows)),
        findings=list(findings(rows)),
        is_sound=not any(row.diverged for row in rows),
        note=_NOTE,
        legend=("Protocols", list(looks.values())),
        sections=sections,
        source="the records of a study",
    )


def _table(rows: Sequence[StalenessRow], looks: Mapping[str, Series]) -> Table:
    column = columns_over(rows)
    columns = [
        column("Protocol", lambda row: row.cell.protocol.partition(",")[0], None),
        column("Modulation", lambda row: row.cell.modulation, None),
        column("Recipe", lambda row: row.cell.configuration, None),
        column("Times", lambda row: row.cell.times, None),
        column("sigma", lambda row: row.cell.sigma, "d"),
        column("mu", lambda row: row.cell.mu, ",d"),
        column("lambda", lambda row: row.cell.learners, ",d"),
        column("mu x lambda", lambda row: row.cell.samples, ",d"),
        column("Top-1, %", lambda row: 100 * row.top1.mean, ".2f"),
        column("±", lambda row: row.top1.scaled(100).reach, ".2f"),
        column("Seconds", lambda row: row.seconds, ",.2f"),
        column("Mean tau", lambda row: row.tau, ".2f"),
        column("tau > 2 sigma, %", lambda row: 100 * row.late / sum(row.counts), ".4f"),
        column("Highest tau", lambda row: len(row.staleness) - 1, ",d"),
        column("Updates", lambda row: row.records[0]["updates"], ",d"),
        column("Seeds", lambda row: len(row.records), "d"),
        column("Diverged", lambda row: row.diverged, "d"),
    ]
    return Table(name="cells", columns=columns, series=[looks[row.cell.protocol] for row in rows])


def _trade_off(
    name: str, panel: str, rows: Sequence[StalenessRow], looks: Mapping[str, Series]
) -> Chart:
    """Return the error of every cell by simulated time, and the lines of equal mu x lambda."""
    lines = [
        interval_line(looks[row.cell.protocol], [row.seconds], [row.error.scaled(100)], line=False)
        for row in rows
    ]
    for (protocol, _), joined in diagonals(rows).items():
        ends = sorted((row.seconds, 100 * row.error.mean) for row in joined)
        x, y = zip(*ends, strict=True)
        lines.append(Line(series=looks[protocol], x=x, y=y, points=False))
    axes = Panel(lines=lines, x="Simulated seconds of a run", y="Error, %", log="x")
    return line_chart(name, axes, title=f"Error by time: {panel}")


def _speed_up_section(found: Sequence[SpeedUp], looks: Mapping[str, Series]) -> Section:
    column = columns_over(found)
    columns = [
        column("Protocol", lambda one: one.protocol, None),
        column("Times", lambda one: one.cell.times, None),
        column("mu", lambda one: one.cell.mu, ",d"),
        column("lambda", lambda one: one.cell.learners, ",d"),
        column("Speed-up", lambda one: one.over_alone.mean, ".2f"),
        column("±", lambda one: one.over_alone.reach, ".2f"),
        column("Seeds", lambda one: len(one.seconds), "d"),
    ]
    shown = [looks[one.protocol] for one in found]
    charts = []
    for place, panel in enumerate(dict.fromkeys(one.panel for one in found)):
        lines = []
        for protocol in dict.fromkeys(one.protocol for one in found):
            own = [one for one in found if (one.panel, one.protocol) == (panel, protocol)]
            x = [one.cell.learners for one in own]
            lines.append(interval_line(looks[protocol], x, [one.over_alone for one in own]))
        axes = Panel(lines=lines, x="Learners (lambda)", y="Speed-up", from_zero=True)
        charts.append(line_chart(f"speed-up-{place}", axes, title=f"Speed-up: {panel}"))
    table = Table(name="speed-up", columns=columns, series=shown)
    return Section(title="Speed-up", parts=[table, *charts], notes=[_SPEED_UP])
