"""The file of a study of servers: recipes x layouts x numbers of workers.

Every layout makes the same update: its workers compute gradients of equal mini-batches, and nobody
goes on before the mean of all of them is in the weights (hardsync). Only where the weights are
differs, and so what is sent to whom (Jaeger et al., DIDL 2018, compare layouts of two frameworks).

What more workers, other links and other mini-batches change is simulated, from the same bytes and
the same times of gradients: workers of a real start take turns on the cores of this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.errors import LargebatchError, RecipeError
from largebatch.lab.studies.hosts import starts
from largebatch.lab.studies.hosts.compute import Compute
from largebatch.lab.studies.hosts.measure import Placement
from largebatch.lab.studies.hosts.starts import Found
from largebatch.lab.studies.queue.study import Name, Timed, base_recipe, read_study
from largebatch.lab.studies.servers.traffic import Traffic, beside, central, ring
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.protocols import Centralised
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Batch, Section

ALONE = "alone"
"""The layout of one worker, which sends nothing: what speed-up is measured against."""

Megabits = Annotated[float, Field(ge=1, le=1e6)]
Claim = Literal["faster", "no difference"]


class Split(Section):
    """Servers that hold a part of each tensor, in place of whole ones."""

    split: Literal["decentralised"] | Centralised
    """Where they are, as protocol.servers has it."""


Layout = Literal["decentralised", "torch", "horovod"] | Centralised | Split


class Trained(Timed):
    """A recipe, and what a worker of it does in an update."""

    paper: Claim | None = None
    """What Jaeger et al. (DIDL 2018) found of servers beside the workers against central ones for
    this model, by which it is judged; null: the model is not in the paper."""

    workers: Annotated[tuple[Annotated[int, Field(ge=2, le=100)], ...], Field(min_length=1)]
    """How many compute gradients, each on a host of its own; dedicated servers have further ones.
    One worker alone is measured in any case."""

    mini_batch: Batch
    """Samples of a worker in an update."""

    megabits: Megabits | None = None
    """Megabits per second of the links; null: as in the study."""

    compute: Compute | None = None
    """Seconds of a gradient, which workers sleep; null: gradients take what they take here, where
    workers may share a core."""

    computed: Batch | None = None
    """With compute: of how many samples gradients are really computed, so that workers that share
    a core do not slow each other."""

    @model_validator(mode="after")
    def _computed_belongs_to_compute(self) -> Self:
        if (self.compute is None) != (self.computed is None):
            raise ValueError("compute and computed belong together: give both or none of them")
        if self.computed is not None and self.computed > self.mini_batch:
            raise ValueError(
                f"computed ({self.computed}) must be at most mini_batch ({self.mini_batch})"
            )
        return self


class Simulated(Section):
    """What is simulated besides what is started, with every recipe and layout but `horovod`.

    The sweeps of links and mini-batches are at the most workers that are started.
    """

    workers: Annotated[tuple[Annotated[int, Field(ge=1, le=100)], ...], Field(min_length=1)]
    """Numbers of workers."""

    megabits: tuple[Megabits, ...] = ()
    """Megabits per second of every host's link."""

    mini_batches: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = ()
    """Multiples of a recipe's mini_batch."""

    updates: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Updates of a simulation."""

    repeats: Annotated[int, Field(ge=1, le=1000)] = 5
    """Simulations of every point, each with other draws of `compute`."""


class ServersStudy(Section):
    """Cells x starts: how fast each layout is, and what it sends."""

    name: Name
    recipes: Annotated[dict[Name, Trained], Field(min_length=1)]
    """Short names, and what is trained: recipes without a protocol."""

    layouts: Annotated[dict[Name, Layout], Field(min_length=1)]
    """Short names, and where the weights are: as protocol.servers has it, the same below `split`
    for parts of each tensor, or `torch` or `horovod`, whose workers sum gradients by all-reduce."""

    megabits: Megabits
    """Megabits per second of every host's link, in each direction, headers included."""

    repeats: Annotated[int, Field(ge=1, le=1000)] = 3
    """Starts of every cell, with seeds 1, 2, 3 ...: of the weights, of the samples, and of what
    `compute` draws."""

    simulated: Simulated | None = None
    """What is simulated; null: nothing. Needs `compute` in every recipe."""

    @model_validator(mode="after")
    def _simulations_have_times(self) -> Self:
        for name, trained in self.recipes.items():
            if self.simulated is not None and trained.compute is None:
                raise ValueError(f"recipes.{name}.compute: simulated needs the time of a gradient")
        return self

    @model_validator(mode="after")
    def _alone_is_taken(self) -> Self:
        if ALONE in self.layouts:
            raise ValueError(f"layouts.{ALONE}: that is what one worker is called; rename it")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(starts.Cell):
    """One recipe with one layout on a number of workers."""

    layout: str
    """Name of the layout in the study."""

    trained: Trained

    @property
    def is_central(self) -> bool:
        """True if servers have hosts of their own."""
        return self.recipe.protocol is not None and self.recipe.protocol.dedicated > 0

    @property
    def is_split(self) -> bool:
        """True if servers hold a part of each tensor."""
        return self.recipe.protocol is not None and self.recipe.protocol.split

    @property
    def is_beside(self) -> bool:
        """True if each worker's host has a server."""
        return self.recipe.protocol is not None and not self.recipe.protocol.dedicated

    def expected(self, found: Found) -> list[Traffic]:
        """Return what the formulas have for the link of each host."""
        if self.is_central:
            return central(found.shards, learners=self.workers)
        if self.is_beside:
            return beside(found.shards)
        return ring(sum(found.shards), workers=self.workers)


def load_study(name: str) -> ServersStudy:
    """Read and validate a study file, or an installed study by its name, as read_study does."""
    return read_study(name, ServersStudy, suite="servers")


def cells_of(study: ServersStudy, folder: Path) -> list[Cell]:
    """Return the cells of a study whose file lies in `folder`, each checked.

    Layouts on Horovod are left out where it is not installed. Raises LargebatchError naming the
    cell that cannot be.
    """
    cells = []
    for name, trained in study.recipes.items():
        base = base_recipe(trained, folder)
        points: list[tuple[str, Layout, int]] = [(ALONE, "torch", 1)]
        points += [
            (layout, where, workers)
            for layout, where in layouts_here(study).items()
            for workers in trained.workers
        ]
        cells += [
            make_cell(study, name, base, layout=layout, where=where, workers=workers)
            for layout, where, workers in points
        ]
    return cells


def make_cell(
    study: ServersStudy, name: str, base: Recipe, *, layout: str, where: Layout, workers: int
) -> Cell:
    """Return the cell of a study's recipe with a layout; `base` is the recipe of that name."""
    trained = study.recipes[name]
    try:
        recipe = _recipe(base, trained, where, workers=workers)
    except LargebatchError as error:
        raise RecipeError(f"{name}-{layout}-{workers}: {error}") from None
    dedicated = recipe.protocol.dedicated if recipe.protocol else 0
    return Cell(
        name=f"{name}-{layout}-{workers}",
        configuration=name,
        workers=workers,
        samples=trained.mini_batch,
        recipe=recipe,
        placement=Placement(
            workers_per_host=(1,) * (workers + dedicated),
            megabits=trained.megabits or study.megabits,
            backend="horovod" if where == "horovod" else "torch",
        ),
        trained=trained,
        compute=trained.compute,
        layout=layout,
    )


def layouts_here(study: ServersStudy) -> Mapping[str, Layout]:
    """Return the layouts that this machine has the libraries for."""
    has_horovod = find_spec("horovod") is not None
    return {
        name: where for name, where in study.layouts.items() if has_horovod or where != "horovod"
    }


def _recipe(base: Recipe, trained: Trained, where: Layout, *, workers: int) -> Recipe:
    tree = base.model_dump(mode="json")
    tree["batch"]["global_batch"] = workers * (trained.computed or trained.mini_batch)
    tree["polish"], tree["evaluation"] = None, {}
    servers = where.split if isinstance(where, Split) else where
    if servers == "decentralised" or isinstance(servers, Centralised):
        tree["protocol"] = {
            "kind": "hardsync",
            "learners": workers,
            "servers": servers if isinstance(servers, str) else servers.model_dump(),
            "split": isinstance(where, Split),
        }
    recipe = validate_tree(Recipe, tree, source=base.name)
    steps = make_plan(recipe, workers=recipe.protocol.workers if recipe.protocol else workers).steps
    trained.require_length(steps)
    return recipe
