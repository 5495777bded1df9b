"""Scaling: what more workers bring in one host and on hosts, weak and strong.

Dell EMC compare GPUs in one server with servers (C4140, 2019): images a second against an ideal of
as many times one GPU. Here workers are in one host, or each on its own host behind a link. In weak
scaling each has the same mini-batch, in strong scaling all share the batch that the most workers
have together; so the two meet there, in one cell.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

from largebatch.errors import LargebatchError, PlanError
from largebatch.lab.planner.model import Load, step_seconds
from largebatch.lab.planner.model import Machine as Predicted
from largebatch.lab.studies.hosts import HostsCell, HostsRow, Json, Placement, Start, starts_of
from largebatch.lab.studies.lines import interval_line
from largebatch.lab.studies.namespaces import payload_bandwidth
from largebatch.lab.studies.study import Inside, Study, named_error, recipe_of
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import (
    Line,
    Page,
    Panel,
    Section,
    Table,
    columns_over,
    line_chart,
    series,
)

Place = Literal["one-host", "hosts"]
PLACES: tuple[Place, ...] = get_args(Place)
Kind = Literal["weak", "strong"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NOTE = (
    "Workers in one host, or each on its own host, which is a network namespace of one machine "
    "with a shaped link. Gradients take a time that is set and slept. Means over starts with "
    "Student's interval of 95 %."
)
_TABLE = (
    "The ideal is one worker times the number of workers; in weak scaling each has the same "
    "mini-batch, in strong scaling all share one batch. Learning rates are those that each "
    "worker's optimizer applied, compared in hexadecimal."
)


@dataclass(frozen=True, kw_only=True)
class ScalingCell(HostsCell):
    """A number of workers with a number of samples each, in one host or on hosts."""

    place: Place
    inside: Inside
    most: int
    """The most workers of the study."""

    def samples_of(self, kind: Kind, workers: int) -> int:
        """Return the samples of each worker in weak or strong scaling."""
        mini_batch = self.on_hosts.mini_batch
        return mini_batch if kind == "weak" else mini_batch * self.most // workers

    def predicted(self, *, model_bytes: int, update: float) -> float:
        """Return the planner's seconds of an update (largebatch.lab.planner.model).

        `update` is what the update of one worker alone takes besides its gradient. Nothing
        overlaps: workers sleep before backward.
        """
        compute, megabits = self.compute, self.placement.megabits
        assert compute is not None
        assert megabits is not None
        factor = compute.factor.expectation
        machine = Predicted(
            seconds_per_image=compute.sample * factor,
            launch=compute.overhead * factor,
            update=update,
            link=self.inside.gigabytes_per_second * 1e9,
            network=payload_bandwidth(megabits),
            workers_per_node=self.workers if self.place == "one-host" else 1,
            latency=self.inside.seconds,
        )
        load = Load(
            workers=self.workers,
            device_batch=self.samples,
            gradient_bytes=float(model_bytes),
            overlap=False,
        )
        return step_seconds(machine, load).seconds


def cells_of(study: Study, folder: Path) -> list[ScalingCell]:
    """Return the cells of a study whose file is in `folder`, each checked and each once.

    Raises RecipeError naming the cell that cannot be started.
    """
    assert study.scaling is not None
    cells: dict[str, ScalingCell] = {}
    most = max(study.scaling.workers)
    for name, entry in study.recipes.items():
        base, on_hosts = recipe_of(entry, folder), entry.on_hosts
        assert on_hosts is not None
        for kind in KINDS:
            for workers in (1, *study.scaling.workers):
                weak = on_hosts.mini_batch
                samples = weak if kind == "weak" else weak * most // workers
                own = (on_hosts.computed or weak) * samples // weak
                try:
                    recipe = _recipe(base, workers=workers, computed=own)
                    on_hosts.require_length(make_plan(recipe, workers=workers).steps)
                except LargebatchError as error:
                    raise named_error(f"{name}/{workers}x{samples}", error) from None
                for place in PLACES[:1] if workers == 1 else PLACES:
                    each = (workers,) if place == "one-host" else (1,) * workers
                    cell = ScalingCell(
                        study=study.name, configuration=name, recipe=recipe, seeds=study.seeds,
                        variant=f"{workers}x{samples}-{place}", workers=workers, samples=samples,
                        placement=Placement(
                            workers_per_host=each, megabits=study.scaling.megabits
                        ),
                        on_hosts=on_hosts, place=place, inside=study.scaling.inside, most=most,
                    )  # fmt: skip
                    cells.setdefault(cell.name, cell)
    return list(cells.values())


def _recipe(base: Recipe, *, workers: int, computed: int) -> Recipe:
    tree = base.model_dump(mode="json")
    tree["batch"]["global_batch"] = workers * computed
    tree["polish"], tree["evaluation"] = None, {}
    recipe = validate_tree(Recipe, tree, source=base.name)
    plan = make_plan(recipe, workers=workers)
    if plan.accumulation > 1:
        raise PlanError(
            f"{computed} samples that are really computed make {plan.accumulation} micro-batches, "
            "and a gradient is slept for once; give a smaller `computed`"
        )
    return recipe


@dataclass(frozen=True)
class ScalingRow(HostsRow):
    """A cell as a case of weak or of strong scaling; its work is counted in samples."""

    cell: ScalingCell
    kind: Kind

    @property
    def ideal(self) -> float | None:
        """Samples per second of one worker times the number of workers; None without one."""
        return self.cell.workers * fmean(self.throughputs_alone.values()) if self.alone else None

    @property
    def predicted(self) -> float | None:
        """The planner's seconds of an update, from one worker alone; None without one."""
        if not self.alone:
            return None
        assert self.cell.compute is not None
        alone = fmean(fmean(start.seconds) for start in self.alone.values())
        update = max(0.0, alone - self.cell.compute.mean(self.work_alone))
        return self.cell.predicted(model_bytes=self.model_bytes, update=update)

    @property
    def point(self) -> tuple[Kind, str, int]:
        """Identifies its case without the place."""
        return self.kind, self.cell.configuration, self.cell.workers


def rows_of(
    cells: Sequence[ScalingCell], records: Mapping[str, Mapping[str, Json]]
) -> list[ScalingRow]:
    """Return the cells that have records, weak scaling first, by recipe and workers."""
    starts = {cell.name: starts_of(cell, records.get(cell.name, {})) for cell in cells}
    rows = []
    for kind in KINDS:
        for cell in sorted(cells, key=lambda cell: (cell.configuration, cell.workers)):
            if cell.samples == cell.samples_of(kind, cell.workers) and starts[cell.name]:
                one = cell.samples_of(kind, 1)
                alone = starts.get(f"{cell.configuration}/1x{one}-one-host", {})
                work = cell.workers * cell.samples
                rows.append(ScalingRow(cell, starts[cell.name], alone, work, one, kind))
    return rows


def unequal_rates(start: Start) -> str:
    """Return where the learning rates of workers first differ, or an empty text.

    They are compared bit for bit. A rate that arrives late on one worker (Dell EMC 2019, figure
    42) is one that differs.
    """
    first, *others = start.rates
    for worker, rates in enumerate(others, start=1):
        if len(rates) != len(first):
            return f"worker {worker} made {len(rates)} updates and worker 0 {len(first)}"
        for update, (own, other) in enumerate(zip(first, rates, strict=True)):
            if own != other:
                return f"in update {update} worker 0 has {own} and worker {worker} {other}"
    return ""


def findings(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """Yield how places compare, whether rates were equal, and how good the planner is."""
    places = {(row.point, row.cell.place): row.efficiency for row in rows}
    for row in rows:
        inside = places.get((row.point, "one-host"))
        if row.cell.place == "hosts" and inside and row.efficiency:
            yield (
                f"{row.cell.configuration}, {row.kind}, {row.cell.workers} workers: "
                f"{inside.mean:.0f}% of the ideal in one host, {row.efficiency.mean:.0f}% on hosts."
            )
    every = {
        f"{row.cell.name} seed {seed}": one for row in rows for seed, one in row.starts.items()
    }
    unequal = {name: words for name, one in every.items() if (words := unequal_rates(one))}
    updates = [len(one.rates[0]) for one in every.values() if len(one.rates) > 1]
    yield from (f"RATES DIFFER: {name}: {words}." for name, words in unequal.items())
    if sum(updates) and not unequal:
        yield (
            f"Every worker applied the same learning rate, bit for bit, in each of "
            f"{sum(updates):,} updates of {len(updates)} starts of several workers."
        )
    ratios = [
        row.predicted / row.seconds.mean for row in rows if row.cell.workers > 1 and row.predicted
    ]
    if ratios:
        yield (
            f"The planner's time of an update is {min(ratios):.2f} to {max(ratios):.2f} times the "
            f"measured one over {len(ratios)} cells of several workers."
        )


def make_page(study: Study, rows: Sequence[ScalingRow]) -> Page:
    """Return the page of a study."""
    looks = {name: series(place, name) for place, name in enumerate((*PLACES, "planner"))}
    recipes = list(dict.fromkeys(row.cell.configuration for row in rows))
    charts = []
    for kind in KINDS:
        for recipe in recipes:
            lines = []
            for place in PLACES:
                case = kind, recipe, place
                own = [
                    row
                    for row in rows
                    if (row.kind, row.cell.configuration, row.cell.place) == case and row.alone
                ]
                x = [row.cell.workers for row in own]
                means = [row.efficiency for row in own if row.efficiency is not None]
                lines.append(interval_line(looks[place], x, means))
                predicted = [
                    mean.mean * row.seconds.mean / row.predicted if row.predicted else 0.0
                    for mean, row in zip(means, own, strict=True)
                ]
                lines.append(Line(series=looks["planner"], x=x, y=predicted, points=False))
            panel = Panel(lines=lines, x="Workers", y="Efficiency, %", from_zero=True)
            charts.append(line_chart(f"{kind}-{recipe}", panel, title=f"{kind}, {recipe}"))
    column = columns_over(rows)
    columns = [
        column("Cell", lambda row: row.cell.name, None),
        column("Scaling", lambda row: row.kind, None),
        column("Workers", lambda row: row.cell.workers, "d"),
        column("Samples/s", lambda row: row.throughput.mean, ",.1f"),
        column("Ideal", lambda row: row.ideal, ",.1f"),
        column("Speed-up", lambda row: row.speed_up and row.speed_up.mean, ".2f"),
        column("±", lambda row: row.speed_up and row.speed_up.reach, ".2f"),
        column("Efficiency, %", lambda row: row.efficiency and row.efficiency.mean, ".0f"),
        column("An update, s", lambda row: row.seconds.mean, ".4f"),
        column("The planner, s", lambda row: row.predicted, ".4f"),
        column("Samples each", lambda row: row.cell.samples, "d"),
        column("Starts", lambda row: len(row.starts), "d"),
    ]
    shown = [looks[row.cell.place] for row in rows]
    table = Table(name="cells", columns=columns, series=shown)
    return Page(
        title=study.name,
        subtitle=", ".join(recipes),
        findings=list(findings(rows)),
        is_sound=not any(unequal_rates(one) for row in rows for one in row.starts.values()),
        note=_NOTE,
        legend=("Places", list(looks.values())),
        sections=[
            Section(title="Against the ideal", parts=[table], notes=[_TABLE]),
            Section(title="By workers", parts=charts),
        ],
        source="the records of a study",
    )
