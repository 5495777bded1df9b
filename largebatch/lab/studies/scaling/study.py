"""The file of a study of scaling: recipes x numbers of workers x places, weak and strong.

Dell EMC compare GPUs in one server with servers (C4140, 2019): images a second against an ideal of
as many times one GPU. Here workers are in one host, or each on a host of its own behind a link. In
weak scaling each has the same mini-batch, in strong scaling all share the batch that the most
workers have together; so the two meet there, in one cell.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from largebatch.errors import LargebatchError, PlanError, RecipeError
from largebatch.lab.planner.model import Load, Machine, step_seconds
from largebatch.lab.studies.hosts import starts
from largebatch.lab.studies.hosts.compute import Compute
from largebatch.lab.studies.hosts.measure import Placement
from largebatch.lab.studies.hosts.namespaces import payload_bandwidth
from largebatch.lab.studies.queue.study import Name, Timed, base_recipe, read_study
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Batch, NonNegative, Positive, Section

Place = Literal["one-host", "hosts"]
PLACES: tuple[Place, ...] = get_args(Place)
Scaling = Literal["weak", "strong"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)


class Trained(Timed):
    """A recipe, and what a worker of it does in an update."""

    mini_batch: Batch
    """Samples of a worker in weak scaling; strong scaling has as many times these as the most
    workers."""

    compute: Compute
    """Seconds of a gradient, which workers sleep."""

    computed: Batch
    """Number of samples of `mini_batch` whose gradients are really computed, so that workers that
    share a core do not slow each other."""


class Inside(Section):
    """The way between workers of one host, as `largebatch plan --calibrate` measures it."""

    gigabytes_per_second: Positive
    """Gigabytes per second that an all-reduce moves."""

    seconds: NonNegative
    """Seconds of the all-reduces of an update, one for each group of gradients and one for the
    loss, however small."""


class ScalingStudy(Section):
    """Cells x starts: what more workers bring, in one host and on hosts."""

    name: Name
    recipes: Annotated[dict[Name, Trained], Field(min_length=1)]
    """Short names, and what is trained: recipes without a protocol."""

    workers: Annotated[tuple[Annotated[int, Field(ge=2, le=100)], ...], Field(min_length=1)]
    """Numbers of workers; one worker alone is measured in any case."""

    megabits: Annotated[float, Field(ge=1, le=1e6)]
    """Megabits per second of every host's link, in each direction, headers included."""

    inside: Inside
    """Communication inside one host, for the planner's prediction alone."""

    repeats: Annotated[int, Field(ge=1, le=1000)] = 3
    """Starts of every cell, with seeds 1, 2, 3 ...: of the weights, of the samples, and of what
    `compute` draws."""

    @model_validator(mode="after")
    def _workers_share_the_batch(self) -> "ScalingStudy":
        most = max(self.workers)
        for number in self.workers:
            if most % number:
                raise ValueError(f"workers: {number} do not share the batch of {most} evenly")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(starts.Cell):
    """A number of workers with a number of samples each, in one host or on hosts."""

    place: Place
    trained: Trained
    study: ScalingStudy

    def predicted(self, *, model_bytes: int, update: float) -> float:
        """Return the planner's seconds of an update (largebatch.lab.planner.model).

        `update` is what the update of one worker alone takes besides its gradient. Nothing
        overlaps: workers sleep before backward.
        """
        compute, inside = self.trained.compute, self.study.inside
        factor = compute.factor.expectation
        machine = Machine(
            seconds_per_image=compute.sample * factor,
            launch=compute.overhead * factor,
            update=update,
            link=inside.gigabytes_per_second * 1e9,
            network=payload_bandwidth(self.study.megabits),
            workers_per_node=self.workers if self.place == "one-host" else 1,
            latency=inside.seconds,
        )
        load = Load(
            workers=self.workers,
            device_batch=self.samples,
            gradient_bytes=float(model_bytes),
            overlap=False,
        )
        return step_seconds(machine, load).seconds


def load_study(name: str) -> ScalingStudy:
    """Read and validate a study file, or an installed study by its name, as read_study does."""
    return read_study(name, ScalingStudy, suite="scaling")


def cells_of(study: ScalingStudy, folder: Path) -> list[Cell]:
    """Return the cells of a study whose file lies in `folder`, each checked and each once.

    Raises LargebatchError naming the cell that cannot be.
    """
    cells: dict[str, Cell] = {}
    for name, trained in study.recipes.items():
        base = base_recipe(trained, folder)
        for workers, samples, place in _points(study, trained):
            try:
                recipe = _recipe(base, trained, workers=workers, samples=samples)
            except LargebatchError as error:
                raise RecipeError(f"{name}-{workers}x{samples}: {error}") from None
            each = (workers,) if place == "one-host" else (1,) * workers
            cell = Cell(
                name=f"{name}-{workers}x{samples}-{place}",
                configuration=name,
                workers=workers,
                samples=samples,
                recipe=recipe,
                placement=Placement(workers_per_host=each, megabits=study.megabits),
                trained=trained,
                compute=trained.compute,
                place=place,
                study=study,
            )
            cells.setdefault(cell.name, cell)
    return list(cells.values())


def samples_of(scaling: Scaling, workers: int, *, study: ScalingStudy, mini_batch: int) -> int:
    """Return the samples of each worker."""
    return mini_batch if scaling == "weak" else mini_batch * max(study.workers) // workers


def _points(study: ScalingStudy, trained: Trained) -> Iterator[tuple[int, int, Place]]:
    for scaling in SCALINGS:
        for workers in (1, *study.workers):
            samples = samples_of(scaling, workers, study=study, mini_batch=trained.mini_batch)
            for place in PLACES[:1] if workers == 1 else PLACES:
                yield workers, samples, place


def _recipe(base: Recipe, trained: Trained, *, workers: int, samples: int) -> Recipe:
    tree = base.model_dump(mode="json")
    own = trained.computed * samples // trained.mini_batch
    tree["batch"]["global_batch"] = workers * own
    tree["polish"], tree["evaluation"] = None, {}
    recipe = validate_tree(Recipe, tree, source=base.name)
    plan = make_plan(recipe, workers=workers)
    if plan.accumulation > 1:
        raise PlanError(
            f"{own} samples that are really computed make {plan.accumulation} micro-batches, and "
            "a gradient is slept for once; give a smaller `computed`"
        )
    trained.require_length(plan.steps)
    return recipe
