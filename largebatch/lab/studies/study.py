"""The file of a study: recipes x variants x seeds.

Every study has the same core: recipes, what varies (one of five sections), and seeds. A section
only says which variants there are, and which columns and findings the table has.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName
from largebatch.errors import DataError, LargebatchError, RecipeError
from largebatch.lab.protocols.cluster import ComputeTime, Constant, Link, Serving, compute_times
from largebatch.recipe.loading import load_recipe, parse_yaml, read_text, validate_tree
from largebatch.recipe.protocols import MAX_LEARNERS, Centralised
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import (
    Batch,
    Fraction,
    NonNegative,
    Positive,
    Samples,
    Section,
    Updates,
)

RATE = "schedule.peak_lr"
"""Key of the base rate: all rates of a schedule scale with it."""

PAGE = "study.html"
"""Name of the page in the folder of a study."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
"""Pattern of names, which also name folders."""

Factor = Annotated[float, Field(gt=0, le=1e6)]
Megabits = Annotated[float, Field(ge=1, le=1e6)]
Kind = Literal["policies", "settings", "staleness", "servers", "scaling"]
Metric = Literal[
    "top1",
    "top5",
    "train_seconds",
    "evaluation_seconds",
    "cpu_seconds",
    "peak_memory_bytes",
    "read_bytes",
]
"""Metrics that settings can be compared by."""


class Compute(Section):
    """Seconds of a gradient: (`overhead` + `sample` x its samples) x a draw of `factor`."""

    overhead: NonNegative = 0.0
    sample: Positive
    factor: ComputeTime = Constant(kind="constant", seconds=1.0)
    """Distribution around 1; recorded: times of single gradients over their mean."""

    def usual(self, samples: float) -> float:
        """Return the seconds of a gradient whose draw of `factor` is 1."""
        return self.overhead + self.sample * samples

    def mean(self, samples: float) -> float:
        """Return the mean seconds of a gradient."""
        return self.usual(samples) * self.factor.expectation

    def times(self, samples: float, *, seed: int, worker: int) -> Iterator[float]:
        """Yield the seconds of each gradient of a worker, the same for each variant and seed."""
        usual = self.usual(samples)
        return compute_times(self.factor, seed=seed, learner=worker, factor=usual)


class OnHosts(Section):
    """What the workers of a recipe do in an update, in studies of servers and of scaling."""

    mini_batch: Batch
    """Samples of a worker in an update; in a study of scaling those of weak scaling."""

    workers: Annotated[tuple[Annotated[int, Field(ge=2, le=100)], ...], Field(min_length=1)] = (2,)
    """For servers: numbers of workers, each on its own host; dedicated servers have further hosts.
    One worker alone is measured in any case."""

    compute: Compute | None = None
    """Seconds of a gradient, which workers sleep; null: gradients take what they take here, where
    workers may share a core."""

    computed: Batch | None = None
    """With compute: number of samples whose gradients are really computed, so that workers that
    share a core do not slow each other."""

    megabits: Megabits | None = None
    """For servers: megabits per second of the links; null: those of the study."""

    paper: Literal["faster", "no difference"] | None = None
    """For servers: what Jaeger et al. (DIDL 2018) found of servers beside the workers against
    central ones for this model; null: the model is not in the paper."""

    warm_up: Updates = 2
    updates: Updates = 10
    """Number of timed updates in each start, after the warm-up updates."""

    @model_validator(mode="after")
    def _require_both_of_compute(self) -> Self:
        if (self.compute is None) != (self.computed is None):
            raise ValueError("compute and computed need each other: give both or none of them")
        if self.computed is not None and self.computed > self.mini_batch:
            raise ValueError(
                f"computed ({self.computed}) must be at most mini_batch ({self.mini_batch})"
            )
        return self

    def require_length(self, steps: int) -> None:
        """Raise RecipeError if a recipe of `steps` updates is too short."""
        needed = self.warm_up + self.updates + 2
        if steps <= needed:
            raise RecipeError(
                f"the recipe ends after {steps} updates, and {needed} are measured; give it a "
                "longer duration, or less to measure"
            )


class StudyRecipe(Section):
    """A recipe, with its own changes."""

    recipe: str
    """File relative to the study's, or the name of an installed recipe."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes by dotted key, as --set makes them: {duration.epochs: 5}."""

    on_hosts: OnHosts | None = None
    """Needed in studies of servers and of scaling."""


class Setting(Section):
    """A setting of a recipe: changes to it, and options outside of recipes."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes by dotted key, as --set makes them: {batch.global_batch: 384, precision: bf16,
    execution.decoder: dali}."""

    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of local processes, as for --workers."""

    backend: BackendName = "auto"
    """Library that sums gradients, as for --backend; auto: the command's choice."""

    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads per worker (OMP_NUM_THREADS). null: the command's environment, else all cores."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the runs, as those that choose instructions or libraries of
    linear algebra: {ONEDNN_MAX_CPU_ISA: AVX2, TORCH_BLAS_PREFER_CUBLASLT: "1"}."""


class Search(Section):
    """Search for the base rate of every policy or setting, each with the same budget.

    Every trial is evaluated on training images that it is not trained on; the validation images
    decide nothing.
    """

    trials: Annotated[int, Field(ge=1, le=1000)]
    """Number of trials for each recipe with each variant. The first have the recipe's own rate
    and a few multiples of it, the others are drawn by Optuna's Gaussian process."""

    held_out: Samples
    """Number of held-out training images; the same ones in every trial."""

    keys: Annotated[dict[str, tuple[Factor, Factor]], Field(min_length=1)] = Field(
        default_factory=lambda: {RATE: (1 / 16, 16.0)}
    )
    """Searched keys, each between two multiples of the recipe's own value, on a logarithmic
    scale. All rates of a schedule (low_lr, end_lr, start_lr, those of pieces) scale with
    schedule.peak_lr, so that a policy keeps its shape. Other keys with a number above 0, such as
    optimizer.weight_decay, may be added. A key of a shape, such as
    schedule.decay.half_cycle.epochs, schedule.decay.gamma or schedule.decay.low_lr, is searched
    for the policies that have it; a low_lr found is that at the recipe's own peak_lr."""

    part: Fraction = 1.0
    """Length of a trial as a fraction of the run. Every length of the schedule shrinks alike,
    and decays per step are steeper to match, also because epochs without the held-out images
    have fewer updates; the best rate of a short run need not be that of a long one."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 100
    """Seed of every trial and of Optuna; the measured seeds do not have it."""

    prune: bool = True
    """Stop a trial that is below the median of earlier trials of the same recipe and variant
    after as many updates. Compared after a quarter, a half and three quarters of the run, never
    within the warm-up, and never with another variant."""

    metric: Literal["top1", "top5"] = "top1"
    """Metric to maximize on the held-out images."""

    def value_of(self, result: object) -> float:
        """Return the metric of a run or an evaluation."""
        return float(getattr(result, self.metric))

    @model_validator(mode="after")
    def _require_ordered_ranges(self) -> Self:
        for key, (low, high) in self.keys.items():
            if low >= high:
                raise ValueError(f"keys.{key}: the first factor must be below the second one")
        return self


class Machines(Section):
    """The simulated cluster: seconds of a gradient and of a message."""

    overhead: NonNegative
    sample: Positive
    """Seconds of a gradient: `overhead` once, and `sample` for each of its samples."""

    link: Link = Link()
    server_link: Link | None = None
    """As of a simulated cluster; the weights are on one server of its own."""

    serving: Serving | None = None
    """Seconds of this server by bytes; null: it takes no time."""


class Times(Section):
    """How the times of gradients differ from those of `machines`."""

    factor: ComputeTime
    """Distribution of the factor of each, with a mean or a median of 1."""

    slow: dict[int, Factor] = Field(default_factory=dict)
    """Constant factors on the time of some learners, counted from 0."""


Modulation = Literal["none", "n", "staleness"]
Sigma = Annotated[int, Field(ge=0)] | Literal["lambda"]
Learners = Annotated[int, Field(ge=1, le=MAX_LEARNERS)]


class Grid(Section):
    """Variants: every combination of the listed values."""

    recipes: Annotated[tuple[Name, ...], Field(min_length=1)]
    sigma: Annotated[tuple[Sigma, ...], Field(min_length=1)]
    """0: hardsync, its rate times sqrt(lambda mu / B), B the global batch of the recipe. n:
    n-softsync. lambda: the number of learners, which is asynchronous."""

    mu: Annotated[tuple[Batch, ...], Field(min_length=1)]
    """Samples of a gradient."""

    learners: Annotated[tuple[Learners, ...], Field(min_length=1)]
    """lambda."""

    modulation: Annotated[tuple[Modulation, ...], Field(min_length=1)] = ("staleness",)
    """Modulation of the learning rate without hardsync, as in `protocol`."""

    times: Annotated[tuple[Name, ...], Field(min_length=1)]


class SpeedUps(Section):
    """Speed-up by learners at all `times`, simulated without gradients when the page is drawn."""

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


class Staleness(Section):
    """Protocols of simulated learners with real gradients (Rudra, arXiv:1509.04210)."""

    machines: Machines
    times: Annotated[dict[Name, Times], Field(min_length=1)]
    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    """A variant that several have is one."""

    speed_up: SpeedUps | None = None


class Split(Section):
    """Servers that hold a part of each tensor, in place of whole ones."""

    split: Literal["decentralised"] | Centralised
    """Where they are, as protocol.servers has it."""


Layout = Literal["decentralised", "torch", "horovod"] | Centralised | Split


class Simulated(Section):
    """Speed that is simulated besides the starts, for every recipe and layout but `horovod`.

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


class Servers(Section):
    """Where the weights are: layouts with real starts on hosts (Jaeger et al., DIDL 2018)."""

    layouts: Annotated[dict[Name, Layout], Field(min_length=1)]
    """Short names, and where the weights are: as protocol.servers has it, the same below `split`
    for parts of each tensor, or `torch` or `horovod`, whose workers sum gradients by all-reduce."""

    megabits: Megabits
    """Megabits per second of every host's link, in each direction, headers included."""

    simulated: Simulated | None = None
    """Needs `compute` in every recipe; null: nothing is simulated."""


class Inside(Section):
    """Communication inside one host, as `largebatch plan --calibrate` measures it."""

    gigabytes_per_second: Positive
    """Gigabytes per second that an all-reduce moves."""

    seconds: NonNegative
    """Seconds of the all-reduces of an update, one for each group of gradients and one for the
    loss, however small."""


class Scaling(Section):
    """Weak and strong scaling in one host and on hosts (Dell EMC, C4140, 2019)."""

    workers: Annotated[tuple[Annotated[int, Field(ge=2, le=100)], ...], Field(min_length=1)]
    """Numbers of workers; one worker alone is measured in any case."""

    megabits: Megabits
    """Megabits per second of every host's link, in each direction, headers included."""

    inside: Inside
    """For the planner's prediction alone."""

    @model_validator(mode="after")
    def _require_equal_parts(self) -> Self:
        most = max(self.workers)
        for number in self.workers:
            if most % number:
                raise ValueError(f"workers: {number} does not divide {most}, the most workers")
        return self


_BELONG: dict[str, tuple[Kind, ...]] = {
    "search": ("policies", "settings"),
    "robustness_seeds": ("policies",),
    "robustness_scales": ("policies",),
    "targets": ("policies",),
    "metrics": ("settings",),
}
"""The kinds of studies that a key is for."""


class Study(Section):
    """Recipes x variants x seeds. What varies is one of policies to scaling."""

    name: Name
    recipes: Annotated[dict[Name, StudyRecipe], Field(min_length=1)]
    """Short names, and the recipes to train."""

    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of runs, with seeds 1, 2, 3 ..., of every recipe with every variant: of the weights,
    of the order of samples, and of times that are drawn. They are trained on all training images
    and evaluated on the validation images."""

    policies: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)] | None = None
    """Names of policies, and the parts of the recipe's `schedule` that each changes: {warmup:
    null, decay: {kind: cosine}}."""

    settings: Annotated[dict[Name, Setting], Field(min_length=1)] | None = None
    """Names of settings, and their changes to the recipes and the machine. Every run has its own
    process, whose time, processor and memory are measured."""

    staleness: Staleness | None = None
    servers: Servers | None = None
    scaling: Scaling | None = None
    search: Search | None = None
    """Needed for policies; null for settings: the rates are those of the recipe."""

    robustness_seeds: Annotated[int, Field(ge=0, le=1000)] = 0
    """For policies: number of seeds that also run at `robustness_scales` times the best rate."""

    robustness_scales: Annotated[tuple[Factor, ...], Field(min_length=1)] = (0.25, 0.5, 2.0, 4.0)
    """For policies: multiples of the best rate. LRBench's (arXiv:1908.06477), 0.1, 0.5, 5 and 10,
    mostly tell that training fails at ten times a good rate."""

    targets: tuple[Fraction, ...] = ()
    """For policies: accuracies whose cost is shown; empty: chosen by the results."""

    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("top1", "train_seconds")
    """For settings: metrics that choose the best setting of a recipe; each has its own transfer
    matrix."""

    @property
    def kind(self) -> Kind:
        """The section that varies."""
        (kind,) = (each for each in get_args(Kind) if getattr(self, each) is not None)
        return kind  # type: ignore[no-any-return]

    @model_validator(mode="after")
    def _require_one_kind(self) -> Self:
        given = [kind for kind in get_args(Kind) if getattr(self, kind) is not None]
        if len(given) != 1:
            kinds = ", ".join(get_args(Kind))
            raise ValueError(f"expected one of {kinds}; found {', '.join(given) or 'none'}")
        for key, owners in _BELONG.items():
            if key in self.model_fields_set and self.kind not in owners:
                raise ValueError(f"{key}: is for studies of {' and '.join(owners)}")
        return self

    @model_validator(mode="after")
    def _require_distinct_names(self) -> Self:
        variants: dict[str, dict[str, Any]] = {
            "policies": self.policies or {},
            "settings": {key: one.model_dump() for key, one in (self.settings or {}).items()},
        }
        for section, entries in variants.items():
            texts = {name: json.dumps(part, sort_keys=True) for name, part in entries.items()}
            for (one, first), (other, second) in combinations(texts.items(), 2):
                if first == second:
                    raise ValueError(
                        f"{section}.{one} and {section}.{other} are equal: remove one of them"
                    )
        for section, names in {**variants, "recipes": dict(self.recipes)}.items():
            for one, other in combinations(names, 2):
                if one.casefold() == other.casefold():
                    raise ValueError(
                        f"{section}.{one} and {section}.{other} name the same folder where case "
                        "makes no difference: rename one of them"
                    )
        taken = [name for name in self.recipes if name.casefold() == PAGE]
        if taken:
            raise ValueError(f"recipes.{taken[0]}: the page of a study has this name; rename it")
        return self

    @model_validator(mode="after")
    def _require_fitting_parts(self) -> Self:
        match self.kind:
            case "policies":
                self._check_policies()
            case "settings":
                twice = [one for one in self.metrics if self.metrics.count(one) > 1]
                if twice:
                    raise ValueError(f"metrics: {twice[0]} is given twice")
            case "staleness":
                self._check_staleness()
            case "servers" | "scaling":
                self._check_hosts()
        if self.search is not None and 1 <= self.search.seed <= self.seeds:
            raise ValueError(
                f"search.seed ({self.search.seed}) is one of the measured seeds 1 to {self.seeds}: "
                "the search would fit to it; give another"
            )
        return self

    def _check_policies(self) -> None:
        if self.search is None:
            raise ValueError("search: missing; each policy is compared at its own best rate")
        if self.robustness_seeds > self.seeds:
            raise ValueError(
                f"robustness_seeds ({self.robustness_seeds}) must not exceed seeds ({self.seeds})"
            )
        if len({*self.robustness_scales, 1.0}) <= len(self.robustness_scales):
            raise ValueError("robustness_scales: expected different multiples, without 1")

    def _check_staleness(self) -> None:
        assert self.staleness is not None
        for place, grid in enumerate(self.staleness.grids):
            for key, known in (("recipes", self.recipes), ("times", self.staleness.times)):
                for name in getattr(grid, key):
                    if name not in known:
                        raise ValueError(
                            f"staleness.grids.{place}.{key}: {name} is not in {key}, which has "
                            f"{', '.join(known)}"
                        )
        speed_up = self.staleness.speed_up
        if speed_up is not None and speed_up.recipe not in self.recipes:
            raise ValueError(
                f"staleness.speed_up.recipe: {speed_up.recipe} is not in recipes, which has "
                f"{', '.join(self.recipes)}"
            )

    def _check_hosts(self) -> None:
        simulates = self.servers is not None and self.servers.simulated is not None
        for name, recipe in self.recipes.items():
            if recipe.on_hosts is None:
                raise ValueError(f"recipes.{name}.on_hosts: missing; this study starts workers")
            if recipe.on_hosts.compute is None and (simulates or self.scaling is not None):
                raise ValueError(
                    f"recipes.{name}.on_hosts.compute: missing; simulations and predictions need "
                    "the time of a gradient"
                )
        if self.servers is not None and ALONE in self.servers.layouts:
            raise ValueError(f"servers.layouts.{ALONE}: one worker has this name; rename it")


ALONE = "alone"
"""Layout of one worker, which sends nothing: what speed-up is measured against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine options of the runs of a study, as `run` takes them."""

    data: Path | None = None
    data_of: Mapping[str, Path] | None = None
    """Data folders of recipes, by their names in the study."""

    dataset: str | None = None
    imports: tuple[str, ...] = ()
    backend: BackendName = "auto"
    timeout: float = TIMEOUT_SECONDS

    def options(self, name: str, recipe: Recipe) -> dict[str, Any]:
        """Return the options of a run; only recipes of image folders get a data folder."""
        reads = recipe.data.source == "folder"
        return {
            "data": (self.data_of or {}).get(name, self.data) if reads else None,
            "dataset": self.dataset if reads else None,
            "imports": self.imports,
            "backend": self.backend,
            "timeout": self.timeout,
        }

    def require_data(self, cells: "list[Cell]", *, left: "list[Cell]") -> None:
        """Raise DataError if data is given that no cell reads, or one of `left` lacks its own."""
        reading = {cell.configuration for cell in cells if cell.recipe.data.source == "folder"}
        for name in self.data_of or {}:
            if name not in reading:
                raise DataError(
                    f"--data {name}=...: no recipe of this name reads a folder; those that do are "
                    f"{', '.join(sorted(reading)) or 'none'}"
                )
        given = self.data or self.dataset
        if given and not reading:
            raise DataError(f"{given} would not be read: no recipe has data.source: folder")
        if given is None:
            needed = [one.configuration for one in left if one.configuration in reading]
            lacking = [one for one in dict.fromkeys(needed) if one not in (self.data_of or {})]
            if lacking:
                options = " ".join(f"--data {name}=DIR" for name in lacking)
                raise DataError(f"these recipes read images from folders; pass {options}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One run of a cell."""

    name: str
    """Unique in the cell; also names its files."""

    seed: int
    scale: float = 1.0
    """Multiple of the best rate."""

    trial: int = 0
    """Number of a trial of a search, from 1; 0: not one."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One recipe with one variant. Each kind of study has a subclass."""

    configuration: str
    """Name of its recipe in the study."""

    variant: str
    recipe: Recipe
    seeds: int
    study: str = ""

    search: Search | None = None
    """Search of the cell; None if nothing is searched."""

    own_process = False
    """True if each run needs its own process, also if one runs at a time."""

    @property
    def name(self) -> str:
        """Name within the study, and its folder."""
        return f"{self.configuration}/{self.variant}"

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Its runs in their order: those of a search first."""
        return tuple(Slot(name=f"seed-{seed}", seed=seed) for seed in range(1, self.seeds + 1))

    @property
    def definition(self) -> dict[str, Any]:
        """What identifies its records, as JSON: they are refused if it changes."""
        raise NotImplementedError

    @property
    def environment_of_process(self) -> Mapping[str, str]:
        """Environment variables of the processes of its runs."""
        return {}

    def values(self, trials: list[dict[str, Any]], slot: Slot) -> dict[str, float]:
        """Return the values of searched keys for a run, given the records of trials so far."""
        del trials, slot
        return {}

    def carry_out(self, task: "Task") -> dict[str, Any]:
        """Make one run in its folder and return its record, as JSON."""
        raise NotImplementedError

    def describe(self, record: dict[str, Any]) -> str:
        """Describe the record of a run on a line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A claimed run."""

    cell: Cell
    slot: Slot
    values: Mapping[str, float]
    """Values of searched keys."""

    trials: list[dict[str, Any]]
    """Records of finished trials of the cell."""

    folder: Path
    """Its run folder."""

    machine: Machine

    @property
    def options(self) -> dict[str, Any]:
        """Machine options of the run."""
        return self.machine.options(self.cell.configuration, self.cell.recipe)


def load_study(name: str | Path) -> Study:
    """Read and validate a study file, or the installed study of this name.

    Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    path, name = Path(name), str(name)
    presets = files("largebatch") / "lab" / "studies" / "presets"
    if path.name == name and not path.suffix and not path.is_file():
        known = sorted(Path(each.name).stem for each in presets.iterdir())
        if name not in known:
            raise RecipeError(
                f"{name}: neither a file nor an installed study; those are {', '.join(known)}"
            )
        text = (presets / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        text = read_text(path, what="study")
    tree = parse_yaml(text, source=name)
    if not isinstance(tree, dict):
        raise RecipeError(f"{name}: a study must be a mapping with name, recipes and what varies")
    return validate_tree(Study, tree, source=name)


def recipe_of(entry: StudyRecipe, folder: Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe of a study whose file is in `folder`, with further changes.

    Raises RecipeError, also for a recipe with a protocol or with data.held_out.
    """
    every = entry.set | dict(changes or {})
    overrides = [f"{key}={json.dumps(value)}" for key, value in every.items()]
    file = folder / entry.recipe
    recipe = load_recipe(file if file.is_file() else entry.recipe, overrides)
    if recipe.protocol is not None:
        raise RecipeError(
            f"{entry.recipe}: the recipe has a protocol, which only the study's sections "
            "staleness and servers may set; remove it from the recipe"
        )
    if recipe.data.held_out is not None:
        raise RecipeError(
            f"{entry.recipe}: the recipe has data.held_out, and a study holds out images by "
            "itself; remove it from the recipe"
        )
    return recipe


def named_error(name: str, error: LargebatchError) -> RecipeError:
    """Return an error of a cell with its name."""
    return RecipeError(f"{name}: {error}")
