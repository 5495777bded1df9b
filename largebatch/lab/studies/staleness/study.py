"""The file of a staleness study: recipes x protocols x mini-batches x learners x times x seeds.

The grid is Rudra's (arXiv:1509.04210): sigma, the staleness that a protocol aims at, mu, the
samples of a gradient, and lambda, the learners. A cell is a recipe with a `protocol`, trained by
learners that are simulated: their gradients are real, and the order in which these arrive, and the
time, are those of a simulated cluster.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from largebatch.errors import LargebatchError, RecipeError
from largebatch.lab.protocols.cluster import Cluster, Link, Serving
from largebatch.lab.protocols.compute_times import ComputeTime
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.studies.queue.study import Configuration, Name, base_recipe, read_study
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.protocols import MAX_LEARNERS, Softsync
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Batch, NonNegative, Positive, Section
from largebatch.schedules.build import build_schedule

Learners = Annotated[int, Field(ge=1, le=MAX_LEARNERS)]
Modulation = Literal["none", "n", "staleness"]
Sigma = Annotated[int, Field(ge=0)] | Literal["lambda"]


class Machines(Section):
    """The cluster: what a gradient and a message take."""

    overhead: NonNegative
    sample: Positive
    """Seconds of a gradient: `overhead` once, and `sample` for each of its samples."""

    link: Link = Link()
    server_link: Link | None = None
    """As of a simulated cluster; the weights are on one server of its own."""

    serving: Serving | None = None
    """Seconds of this server by bytes; null: it takes no time."""


class Times(Section):
    """How gradients' times differ from what `machines` has."""

    factor: ComputeTime
    """What each is multiplied by, a distribution with a mean or a median of 1."""

    slow: dict[int, Annotated[float, Field(gt=0, le=1e6)]] = Field(default_factory=dict)
    """Factors on the time of some learners, counted from 0, throughout."""


class Grid(Section):
    """Cells: every combination of what is listed."""

    recipes: Annotated[tuple[Name, ...], Field(min_length=1)]
    sigma: Annotated[tuple[Sigma, ...], Field(min_length=1)]
    """0: hardsync, its rate times sqrt(lambda mu / B), B the global batch of the recipe. n:
    n-softsync. lambda: as many as there are learners, which is asynchronous."""

    mu: Annotated[tuple[Batch, ...], Field(min_length=1)]
    """Samples of a gradient."""

    learners: Annotated[tuple[Learners, ...], Field(min_length=1)]
    """lambda."""

    modulation: Annotated[tuple[Modulation, ...], Field(min_length=1)] = ("staleness",)
    """Modulation of the learning rate without hardsync, as in `protocol`."""

    times: Annotated[tuple[Name, ...], Field(min_length=1)]


class SpeedUps(Section):
    """Speed-up by learners at all `times`, simulated without gradients when the page is written."""

    recipe: Name
    """The recipe whose weights are sent."""

    sigma: Annotated[tuple[Sigma, ...], Field(min_length=1)] = (0, 1, "lambda")
    """As in `grids`."""

    mu: Annotated[tuple[Batch, ...], Field(min_length=1)]
    """Samples of a gradient."""

    learners: Annotated[tuple[Learners, ...], Field(min_length=1)] = (1, 4, 10, 18, 30)
    """lambda; one learner is simulated in any case."""

    gradients: Annotated[int, Field(ge=1, le=10_000_000)] = 3_000
    """Number of gradients of each simulation; every seed has one."""


class StalenessStudy(Section):
    """Cells x seeds: what each costs in accuracy and what it saves in time."""

    name: Name
    recipes: Annotated[dict[Name, Configuration], Field(min_length=1)]
    """Short names, and what is trained: recipes without a protocol."""

    machines: Machines
    times: Annotated[dict[Name, Times], Field(min_length=1)]
    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    """A cell that several have is one."""

    speed_up: SpeedUps | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Runs with seeds 1, 2, 3 ... of every cell: of the weights, of the samples' order, and of
    the times."""

    @model_validator(mode="after")
    def _names_are_there(self) -> Self:
        for place, grid in enumerate(self.grids):
            for key, known in (("recipes", self.recipes), ("times", self.times)):
                for name in getattr(grid, key):
                    if name not in known:
                        raise ValueError(
                            f"grids.{place}.{key}: there is no {name}; {key} has {', '.join(known)}"
                        )
        if self.speed_up is not None and self.speed_up.recipe not in self.recipes:
            raise ValueError(
                f"speed_up.recipe: there is no {self.speed_up.recipe}; recipes has "
                f"{', '.join(self.recipes)}"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid."""

    name: str
    """Name of the folder."""

    configuration: str
    times: str
    """As the study names them."""

    recipe: Recipe
    cluster: Cluster
    sigma: int
    mu: int

    @property
    def learners(self) -> int:
        """Their number (lambda)."""
        return self.cluster.learners

    @property
    def samples(self) -> int:
        """Samples that all learners compute on at a time (mu lambda)."""
        return self.mu * self.learners

    @property
    def protocol(self) -> str:
        """Who waits, and how the rate follows staleness, in words."""
        if not self.sigma:
            return "hardsync"
        is_free = self.sigma == self.learners
        kind = "asynchronous" if is_free else f"{self.sigma}-softsync"
        assert isinstance(self.recipe.protocol, Softsync)
        return f"{kind}, modulation {self.recipe.protocol.modulation}"

    def recipe_of(self, seed: int) -> dict[str, Any]:
        """Return the recipe of one seed as its record has it."""
        return self.recipe.model_copy(update={"seed": seed}).model_dump(mode="json")

    @property
    def machines(self) -> dict[str, Any]:
        """The cluster as a record has it."""
        left_out = {"serving"} if self.cluster.serving is None else None  # older records lack it
        text = self.cluster.model_dump_json(exclude=left_out)  # keys become words
        found: dict[str, Any] = json.loads(text)
        return found

    @property
    def rule(self) -> Rule:
        """What its servers follow."""
        protocol = self.recipe.protocol
        assert protocol is not None
        samples = protocol.mini_batch(self.recipe.batch.global_batch)
        return Rule.of(protocol, mini_batch=samples)


def load_study(name: str) -> StalenessStudy:
    """Read and validate a study file, or an installed study by its name, as read_study does."""
    return read_study(name, StalenessStudy, suite="staleness")


def cells_of(study: StalenessStudy, folder: Path) -> list[Cell]:
    """Return the cells of a study whose file lies in `folder`, each checked.

    Raises LargebatchError naming the cell whose recipe and protocol do not fit each other.
    """
    points = {point.name: point for grid in study.grids for point in _points(grid)}
    return _cells(study, folder, points.values())


def speed_up_cells(study: StalenessStudy, folder: Path) -> dict[str, list[Cell]]:
    """Return the cells of the speed-up by protocol, each checked as cells_of does."""
    section = study.speed_up
    if section is None:
        return {}
    names = {0: "hardsync", "lambda": "asynchronous"}
    every = Grid(
        recipes=(section.recipe,),
        sigma=section.sigma,
        mu=section.mu,
        learners=tuple(sorted({1, *section.learners})),
        modulation=("n",),
        times=tuple(study.times),
    )
    return {
        names.get(sigma, f"{sigma}-softsync"): _cells(
            study, folder, _points(every.model_copy(update={"sigma": (sigma,)}))
        )
        for sigma in section.sigma
    }


def _cells(study: StalenessStudy, folder: Path, points: Iterable["_Point"]) -> list[Cell]:
    bases = {name: base_recipe(one, folder) for name, one in study.recipes.items()}
    cells = []
    for point in points:
        try:
            cells.append(_cell(study, bases[point.recipe], point))
        except LargebatchError as error:
            raise RecipeError(f"{point.name}: {error}") from None
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
    def name(self) -> str:
        """Name of the cell, which is the same for all modulations of hardsync."""
        rate = f"-{self.modulation}" if self.sigma else ""
        size = f"sigma{self.sigma}-mu{self.mu}-lambda{self.learners}"
        return f"{self.recipe}-{self.times}-{size}{rate}"


def _points(grid: Grid) -> Iterator[_Point]:
    lists = grid.recipes, grid.times, grid.sigma, grid.mu, grid.learners, grid.modulation
    for recipe, times, sigma, mu, learners, modulation in product(*lists):
        number = learners if sigma == "lambda" else sigma
        yield _Point(recipe, times, number, mu, learners, modulation)


def _cell(study: StalenessStudy, base: Recipe, point: _Point) -> Cell:
    takes = point.learners if not point.sigma else max(1, point.learners // point.sigma)
    tree = base.model_dump(mode="json")
    tree["batch"]["global_batch"] = takes * point.mu
    tree["protocol"] = _protocol(point, reference=base.batch.global_batch)
    recipe = validate_tree(Recipe, tree, source=base.name)
    alone = make_plan(recipe.model_copy(update={"protocol": None}), workers=1)
    build_schedule(recipe.schedule, alone)
    machines, times = study.machines, study.times[point.times]
    seconds = machines.overhead + machines.sample * point.mu
    cluster = Cluster(
        learners=point.learners,
        compute=times.factor,
        slow={n: seconds * times.slow.get(n, 1.0) for n in range(point.learners)},
        link=machines.link,
        server_link=machines.server_link,
        serving=machines.serving,
    )
    return Cell(
        name=point.name,
        configuration=point.recipe,
        times=point.times,
        recipe=recipe,
        cluster=cluster,
        sigma=point.sigma,
        mu=point.mu,
    )


def _protocol(point: _Point, *, reference: int) -> dict[str, object]:
    common = {"learners": point.learners, "servers": {"centralised": 1}}
    if not point.sigma:
        return {"kind": "hardsync", "modulation": "sqrt", "reference_batch": reference, **common}
    return {"kind": "softsync", "n": point.sigma, "modulation": point.modulation, **common}
