"""The file of a study: recipes x variants x seeds.

Every study has the same core: recipes, what varies (one of five sections), and seeds. A section
only says which variants there are, and which columns and findings the table has.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from largebatch.address import Place
from largebatch.distributed.environment import BackendName
from largebatch.errors import DataError, LargebatchError, RecipeError, nearest
from largebatch.lab.protocols.simulator import (
    ComputeTime,
    ConstantTime,
    Serving,
    SimulatedLink,
    compute_times,
)
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
from largebatch.runs.options import Options

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
"""Pattern of names, which also name folders."""

Values = Mapping[str, float]
"""Values of searched keys by dotted key; empty without a search."""

Factor = Annotated[float, Field(gt=0, le=1e6)]
Megabits = Annotated[float, Field(ge=1, le=1e6)]
StudyKind = Literal["policies", "settings", "staleness", "servers", "scaling"]

RATE = "schedule.peak_lr"
"""The key of the base rate, which every search has."""

SCALES = (0.1, 0.5, 5.0, 10.0)
"""Multiples of the rate found at which robustness is measured (LRBench, arXiv:1908.06477)."""

TRIAL_SEED = 100  # seed of the trials of a search, which no measured run has


VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "GLOO_SOCKET_IFNAME",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_CYCLE_TIME",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "LARGEBATCH_KERNELS",
    "MALLOC_ARENA_MAX",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED",
)
"""Environment variables that a study may set. A study may come from a stranger, so none of them
can name code or a file: neither PYTHONPATH and LD_PRELOAD, nor plug-ins as OMP_TOOL_LIBRARIES and
NCCL_NET_PLUGIN, nor caches of compiled code."""


class Compute(Section):
    """Seconds of a gradient: (`overhead` + `sample` x its samples) x a draw of `factor`."""

    overhead: NonNegative = 0.0
    sample: Positive
    computed: Batch
    """Number of samples whose gradients are really computed, so that workers that share a core do
    not slow each other."""

    factor: ComputeTime = ConstantTime(kind="constant", seconds=1.0)
    """Distribution around 1; recorded: times of single gradients over their mean."""

    def times(self, samples: float, *, seed: int, worker: int) -> Iterator[float]:
        """Yield the seconds of each gradient of a worker, the same for each variant and seed."""
        usual = self.overhead + self.sample * samples
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

    megabits: Megabits | None = None
    """Megabits per second of the links of this recipe; null: those of the study."""

    paper: Literal["faster", "no difference"] | None = None
    """In studies of servers, what Jaeger et al. found of servers beside the workers against central
    ones for this model; null: they do not have it."""

    warm_up: Updates = 2
    updates: Updates = 10
    """Number of timed updates in each start, after the warm-up updates. Two more are not timed."""


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

    environment: dict[str, Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=1000)]] = Field(
        default_factory=dict
    )
    """Further environment variables of the runs, those of a list only, which choose threads,
    instructions and libraries of linear algebra and of communication: {ONEDNN_MAX_CPU_ISA: AVX2,
    TORCH_BLAS_PREFER_CUBLASLT: "1"}."""

    @model_validator(mode="after")
    def _require_listed_variables(self) -> Self:
        for name in self.environment:
            if name not in VARIABLES:
                hint = nearest(name, VARIABLES, otherwise=f"listed are {', '.join(VARIABLES)}")
                raise ValueError(f"environment.{name}: a study may not set this variable; {hint}")
        if self.threads is not None and "OMP_NUM_THREADS" in self.environment:
            raise ValueError("environment.OMP_NUM_THREADS: `threads` sets it; give one of the two")
        return self


class Search(Section):
    """Search for the base rate of every policy or setting, each with the same budget.

    Every trial is evaluated on training images that it is not trained on; the validation images
    decide nothing. Its seed is 100. All rates of a schedule (low_lr, end_lr, start_lr, those of
    pieces) scale with schedule.peak_lr, so that a policy keeps its shape.
    """

    trials: Annotated[int, Field(ge=1, le=1000)]
    """Number of trials for each recipe with each variant. The first have the recipe's own rate
    and a few multiples of it, the others are drawn by Optuna's Gaussian process."""

    held_out: Samples
    """Number of held-out training images; the same ones in every trial."""

    factors: tuple[Factor, Factor] = (1 / 16, 16.0)
    """Lowest and highest multiple of the recipe's own rate, on a logarithmic scale."""

    keys: dict[str, tuple[Factor, Factor]] = Field(default_factory=dict)
    """Further keys that are searched beside the rate, each between two multiples of its own value:
    parameters of a policy's range and steps, such as schedule.decay.low_lr,
    schedule.decay.half_cycle.epochs, schedule.decay.gamma and schedule.decay.at.0.epochs, or others
    with a number above 0, such as optimizer.weight_decay; a whole number only in the schedule. One
    of a shape is searched for the policies that have it. Lowest and highest values must fit each
    other in every combination. A low_lr found is that at the recipe's own peak_lr."""

    @model_validator(mode="after")
    def _require_ordered_factors(self) -> Self:
        for key, (low, high) in {"factors": self.factors, **self.keys}.items():
            if low >= high:
                raise ValueError(f"{key}: the first factor must be below the second one")
        if RATE in self.keys:
            raise ValueError(f"keys.{RATE}: is searched in any case, between `factors`")
        return self


class Machines(Section):
    """The simulated cluster: seconds of a gradient and of a message."""

    overhead: NonNegative
    sample: Positive
    """Seconds of a gradient: `overhead` once, and `sample` for each of its samples."""

    link: SimulatedLink = SimulatedLink()
    server_link: SimulatedLink | None = None
    """As of a simulated cluster; the weights are on one server of its own."""

    serving: Serving | None = None
    """Seconds of this server by bytes; null: it takes no time."""


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


class SpeedUp(Section):
    """Speed-up over one learner at all `times`, simulated without gradients for the page."""

    recipe: Name
    """The recipe whose weights are sent."""

    sigma: Annotated[tuple[Sigma, ...], Field(min_length=1)] = (0, 1, "lambda")
    """As in `grids`."""

    mu: Annotated[tuple[Batch, ...], Field(min_length=1)]
    """Samples of a gradient."""

    learners: Annotated[tuple[Learners, ...], Field(min_length=1)] = (1, 4, 10, 18, 30)
    """lambda; one learner is simulated in any case."""

    gradients: Annotated[int, Field(ge=1, le=10_000_000)] = 6_000
    """Number of gradients of each simulation."""

    seeds: Annotated[int, Field(ge=1, le=100)] = 5
    """Number of simulations of each point, with seeds 1, 2, 3 ... of the times."""


class Staleness(Section):
    """Protocols of simulated learners with real gradients (Rudra, arXiv:1509.04210)."""

    machines: Machines
    times: Annotated[dict[Name, ComputeTime], Field(min_length=1)]
    """Distributions of the factor on the seconds of each gradient, with a mean or a median of 1."""

    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    """Equal variants are merged."""

    speed_up: SpeedUp | None = None


Layout = Literal["decentralised", "torch", "horovod"] | Centralised


class Simulated(Section):
    """What is simulated besides the starts, for every recipe and layout.

    Links and mini-batches are swept at the largest number of workers that is started. Needs
    `compute` in every recipe.
    """

    workers: tuple[Annotated[int, Field(ge=1, le=100)], ...] = ()
    """Numbers of workers."""

    megabits: tuple[Megabits, ...] = ()
    """Megabits per second of the links."""

    mini_batches: tuple[Factor, ...] = ()
    """Multiples of the recipe's mini-batch."""


class Servers(Section):
    """Where the weights are: layouts with real starts on hosts (Jaeger et al., DIDL 2018)."""

    layouts: Annotated[dict[Name, Layout], Field(min_length=1)]
    """Short names, and where the weights are: as protocol.servers has it, or `torch` or `horovod`,
    whose workers sum gradients by all-reduce. Layouts on Horovod are left out where it is not
    installed."""

    megabits: Megabits
    """Megabits per second of every host's link, in each direction, headers included."""

    simulated: Simulated | None = None


class Inside(Section):
    """The all-reduce of workers in one host, as `largebatch plan --calibrate` measures it."""

    gigabytes_per_second: Positive
    seconds: NonNegative
    """Seconds of an update's all-reduces besides their bytes, for each doubling of the workers."""


class Scaling(Section):
    """Weak and strong scaling in one host and on hosts (Dell EMC, C4140, 2019)."""

    workers: Annotated[tuple[Annotated[int, Field(ge=2, le=100)], ...], Field(min_length=1)]
    """Numbers of workers; one worker alone is measured in any case."""

    megabits: Megabits
    """Megabits per second of every host's link, in each direction, headers included."""

    inside: Inside | None = None
    """Gives the planner's time of an update, for recipes with `compute`; null: it is not shown."""

    @model_validator(mode="after")
    def _require_equal_parts(self) -> Self:
        most = max(self.workers)
        for number in self.workers:
            if most % number:
                raise ValueError(f"workers: {number} does not divide {most}, the most workers")
        return self


class Study(Section):
    """Recipes x variants x seeds. What varies is one of policies to scaling."""

    name: Name
    recipes: Annotated[dict[Name, StudyRecipe], Field(min_length=1)]
    """Short names, and the recipes to train."""

    seeds: Annotated[int, Field(ge=1, lt=TRIAL_SEED)] = 3
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

    robustness_seeds: Annotated[int, Field(ge=0, lt=TRIAL_SEED)] = 0
    """For policies: number of seeds that also run at multiples of the rate found, for the accuracy
    that a policy keeps if its rate is wrong."""

    robustness_scales: Annotated[tuple[Factor, ...], Field(min_length=1)] = SCALES
    """These multiples, without 1."""

    targets: tuple[Fraction, ...] = ()
    """For policies: accuracies whose cost is shown."""

    @property
    def kind(self) -> StudyKind:
        """The section that varies."""
        (kind,) = (name for name in get_args(StudyKind) if getattr(self, name) is not None)
        return kind  # type: ignore[no-any-return]

    @property
    def simulates(self) -> bool:
        """True if its page has simulations, which need no run."""
        if self.servers is not None:
            return self.servers.simulated is not None
        return self.staleness is not None and self.staleness.speed_up is not None

    @model_validator(mode="after")
    def _require_one_kind(self) -> Self:
        given = [kind for kind in get_args(StudyKind) if getattr(self, kind) is not None]
        if len(given) != 1:
            kinds = ", ".join(get_args(StudyKind))
            raise ValueError(f"expected one of {kinds}; found {', '.join(given) or 'none'}")
        if self.search is not None and self.kind not in {"policies", "settings"}:
            raise ValueError("search: is for studies of policies and settings")
        if self.targets and self.kind != "policies":
            raise ValueError("targets: is for studies of policies")
        if self.robustness_seeds and self.kind != "policies":
            raise ValueError("robustness_seeds: is for studies of policies")
        return self

    @model_validator(mode="after")
    def _require_fitting_robustness(self) -> Self:
        if self.robustness_seeds > self.seeds:
            raise ValueError(
                f"robustness_seeds ({self.robustness_seeds}) must not exceed seeds ({self.seeds})"
            )
        if 1 in self.robustness_scales or len(set(self.robustness_scales)) < len(
            self.robustness_scales
        ):
            raise ValueError("robustness_scales: must be different numbers, without 1")
        return self

    @model_validator(mode="after")
    def _require_fitting_parts(self) -> Self:
        if self.kind == "policies" and self.search is None:
            raise ValueError("search: missing; each policy is compared at its own best rate")
        for name, recipe in self.recipes.items() if self.servers or self.scaling else ():
            if recipe.on_hosts is None:
                raise ValueError(f"recipes.{name}.on_hosts: missing; this study starts workers")
            if recipe.on_hosts.compute is None and self.servers and self.servers.simulated:
                raise ValueError(
                    f"recipes.{name}.on_hosts.compute: missing; simulations need the time of a "
                    "gradient"
                )
        if self.servers is not None and ALONE in self.servers.layouts:
            raise ValueError(f"servers.layouts.{ALONE}: one worker has this name; rename it")
        return self

    @model_validator(mode="after")
    def _require_known_names(self) -> Self:
        if self.staleness is None:
            return self
        speed_up = self.staleness.speed_up
        if speed_up is not None and speed_up.recipe not in self.recipes:
            raise ValueError(
                f"staleness.speed_up.recipe: {speed_up.recipe} is not in recipes, which has "
                f"{', '.join(self.recipes)}"
            )
        for place, grid in enumerate(self.staleness.grids):
            for key, known in (("recipes", self.recipes), ("times", self.staleness.times)):
                unknown = [name for name in getattr(grid, key) if name not in known]
                if unknown:
                    raise ValueError(
                        f"staleness.grids.{place}.{key}: {unknown[0]} is not in {key}, which has "
                        f"{', '.join(known)}"
                    )
        return self


ALONE = "alone"
"""Layout of one worker, which sends nothing: what speed-up is measured against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyMachine:
    """Machine options of the runs of a study, as `run` takes them."""

    data: Mapping[str, Place] = field(default_factory=dict)
    """Data folders of recipes, by their names in the study; that of "" is for all others."""

    options: Options = Options()
    """All other options of the runs."""

    def of(self, cell: "Cell", folder: Path) -> Options:
        """Return the options of a run in a folder; only recipes of image folders get data."""
        reads = cell.recipe.data.source == "folder"
        data = self.data.get(cell.configuration, self.data.get("")) if reads else None
        dataset = self.options.dataset if reads else None
        return replace(self.options, out=folder, data=data, dataset=dataset, report=False)

    def require_data(self, cells: "Sequence[Cell]", *, left: "Sequence[Cell]") -> None:
        """Raise DataError if data is given that no cell reads, or one of `left` lacks its own."""
        reading = {cell.configuration for cell in cells if cell.recipe.data.source == "folder"}
        unread = [f"--data {name}=..." for name in self.data if name and name not in reading]
        every = self.data.get("") or self.options.dataset
        if every and not reading:
            unread.append(str(every))
        if unread:
            raise DataError(
                f"{unread[0]} would not be read; recipes that read a folder: "
                f"{', '.join(sorted(reading)) or 'none'}"
            )
        lacking = reading.intersection(one.configuration for one in left) - self.data.keys()
        if not every and lacking:
            options = " ".join(f"--data {name}=DIR" for name in sorted(lacking))
            raise DataError(f"these recipes read images from folders; pass {options}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One run of a cell."""

    name: str
    """Unique in the cell; also names its files."""

    seed: int
    scale: float = 1.0
    """Multiple of the rate found."""

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
    own_process: bool = False
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

    def values(self, trials: list[dict[str, Any]], slot: Slot) -> Values:
        """Return the values of the searched keys in a run, given the records of trials so far."""
        del trials, slot
        return {}

    def carry_out(self, slot: Slot, values: Values, options: Options) -> dict[str, Any]:
        """Make one run in the folder `options.out` and return its results, as JSON."""
        raise NotImplementedError

    @property
    def probe(self) -> "Cell":
        """The same cell with PROBED updates and one evaluation, to measure how long runs take.

        Equal probes are measured once.
        """
        raise NotImplementedError

    def seconds_of(self, probed: dict[str, Any]) -> float:
        """Return the seconds of one of its runs, from the record of a run of its probe."""
        raise NotImplementedError


def load_study(name: str | Path) -> Study:
    """Read and validate a study file, or the installed study of this name.

    Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    path = Path(name)
    name = str(name)
    if not path.exists():
        presets = (files("largebatch") / "lab" / "studies" / "presets").iterdir()
        known = {Path(preset.name).stem: preset for preset in presets}
        if name not in known:
            names = ", ".join(sorted(known))
            raise RecipeError(f"{name}: neither a file nor an installed study; those are {names}")
        text = known[name].read_text(encoding="utf-8")
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
    changed = entry.set | dict(changes or {})
    overrides = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
    file = folder / entry.recipe
    recipe = load_recipe(file if file.is_file() else entry.recipe, overrides)
    for key, value in (("protocol", recipe.protocol), ("data.held_out", recipe.data.held_out)):
        if value is not None:
            raise RecipeError(f"{entry.recipe}: a study sets {key} itself; remove it")
    return recipe


PROBED = 3
"""Updates of a probe: one that warms up, and two that are measured."""


def of_few_updates(recipe: Recipe) -> Recipe:
    """Return the recipe with PROBED updates at a constant rate and one evaluation, untracked."""
    tree = recipe.model_dump(mode="json")
    tree["duration"] = {"steps": PROBED}
    constant = {"warmup": None, "start_lr": 0.0, "decay": {"kind": "constant"}}
    tree["schedule"] = {**tree["schedule"], **constant}
    tree["batch"]["schedule"] = []
    tree["data"] = recipe.data.unscheduled.model_dump(mode="json")
    tree["polish"] = None
    tree["evaluation"] = {}
    tree["tracking"] = []
    return validate_tree(Recipe, tree, source=recipe.name)


@contextmanager
def naming(cell: str) -> Iterator[None]:
    """Add the name of a cell to errors inside."""
    try:
        yield
    except LargebatchError as error:
        raise RecipeError(f"{cell}: {error}") from None
