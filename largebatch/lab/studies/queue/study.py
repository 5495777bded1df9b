"""Study files: find, read and validate them, and load their recipes.

The two kinds here are a queue of runs: recipes x policies x seeds, which searches a rate for every
policy, and recipes x settings x seeds, which measures the accuracy and cost of each recipe with
every setting of the training and of the machine.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from largebatch.distributed.environment import BackendName
from largebatch.errors import RecipeError, StudyError
from largebatch.recipe.loading import load_recipe, parse_yaml, read_text, validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import Fraction, Samples, Section, Updates

RATE = "schedule.peak_lr"
"""Key of the base rate: all rates of a schedule scale with it."""

SCALES = (0.25, 0.5, 2.0, 4.0)
"""Default multiples of the best rate for robustness; every seed runs at 1. Those of LRBench
(arXiv:1908.06477), 0.1, 0.5, 5 and 10, mostly tell that training fails at ten times a good rate."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
"""Pattern of names, which also name folders."""

_STUDIES = files("largebatch") / "lab" / "studies"

_FILES = ("study.db", "study.html")
"""Prefix of files that stand beside the folders of recipes."""

Factor = Annotated[float, Field(gt=0, le=1e6)]


class Configuration(Section):
    """A recipe, with changes of its own."""

    recipe: str
    """File relative to the study's, or the name of an installed recipe."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes by dotted key, as --set makes them: {duration.epochs: 5}."""


class Timed(Configuration):
    """A recipe of a study, and its measured updates."""

    warm_up: Updates = 2
    updates: Updates = 10
    """Number of timed updates in each start, after the warm-up updates."""

    def require_length(self, steps: int) -> None:
        """Raise RecipeError if a recipe of `steps` updates is too short."""
        needed = self.warm_up + self.updates + 2
        if steps <= needed:
            raise RecipeError(
                f"the recipe ends after {steps} updates, and {needed} are measured; give it a "
                "longer duration, or less to measure"
            )


class Search(Section):
    """Search for the base rate of every policy, each with the same budget.

    Every trial is evaluated on training images that it is not trained on; the validation images
    decide nothing.
    """

    trials: Annotated[int, Field(ge=1, le=1000)]
    """Number of trials for each recipe with each policy. The first have the recipe's own rate
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
    """Stop a trial that is below the median of earlier trials of the same recipe and policy
    after as many updates. Compared after a quarter, a half and three quarters of the run, never
    within the warm-up, and never with another policy."""

    metric: Literal["top1", "top5"] = "top1"
    """Metric to maximize on the held-out images."""

    def value_of(self, outcome: object) -> float:
        """Return the metric of a run or an evaluation."""
        return float(getattr(outcome, self.metric))

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        for key, (low, high) in self.keys.items():
            if low >= high:
                raise ValueError(f"keys.{key}: the first factor must be below the second one")
        return self


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


class _Study(Section):
    """Keys of both kinds of studies."""

    kind: ClassVar[str]
    """What is compared, as definitions in databases name it."""

    section: ClassVar[str]
    """Key of what is compared."""

    name: Name
    recipes: Annotated[dict[Name, Configuration], Field(min_length=1)]
    """Short names, and the recipes to train."""

    @model_validator(mode="after")
    def _nothing_stands_twice(self) -> Self:
        sections = self.model_dump(mode="json")[self.section]
        compared = {name: json.dumps(part, sort_keys=True) for name, part in sections.items()}
        for (one, first), (other, second) in combinations(compared.items(), 2):
            if first == second:
                raise ValueError(
                    f"{self.section}.{one} and {self.section}.{other} are the same: leave one of "
                    "them out"
                )
        for section, names in (("recipes", self.recipes), (self.section, compared)):
            for one, other in combinations(names, 2):
                if one.casefold() == other.casefold():
                    raise ValueError(
                        f"{section}.{one} and {section}.{other} name the same folder where case "
                        "makes no difference: give one another name"
                    )
        taken = [name for name in self.recipes if name.casefold().startswith(_FILES)]
        if taken:
            raise ValueError(f"recipes.{taken[0]}: a study has a file of this name; give another")
        return self


class Study(_Study):
    """Recipes x policies x seeds: every policy at its own best rate."""

    kind, section = "policy", "policies"
    policies: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    """Names of policies, and the parts of the recipe's `schedule` that each changes: {warmup:
    null, decay: {kind: cosine}}."""

    search: Search
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of runs, with seeds 1, 2, 3 ..., of every recipe with every policy at the best
    rate, on all training images, evaluated on the validation images."""

    robustness_seeds: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of these seeds that also run at `robustness_scales` times the best rate."""

    robustness_scales: Annotated[tuple[Factor, ...], Field(min_length=1)] = SCALES
    """Multiples of the best rate at which they run; every seed runs at 1."""

    targets: tuple[Fraction, ...] = ()
    """Accuracies whose cost in updates is shown."""

    @model_validator(mode="after")
    def _the_search_has_a_seed_of_its_own(self) -> Self:
        _require_own_seed(self.search, seeds=self.seeds)
        return self

    @model_validator(mode="after")
    def _robustness_is_of_seeds(self) -> Self:
        if self.robustness_seeds > self.seeds:
            raise ValueError(
                f"robustness_seeds ({self.robustness_seeds}) must not exceed seeds ({self.seeds})"
            )
        if len({*self.robustness_scales, 1.0}) <= len(self.robustness_scales):
            raise ValueError("robustness_scales: expected different multiples, without 1")
        return self


class ConfigurationStudy(_Study):
    """Recipes x settings x seeds: accuracy and cost of each recipe with every setting."""

    kind, section = "setting", "settings"
    settings: Annotated[dict[Name, Setting], Field(min_length=1)]
    """Names of settings, and their changes to the recipes."""

    search: Search | None = None
    """Search of a rate for each recipe with each setting, as in a study of policies. null: the
    rates are those of the recipe with the setting."""

    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of runs, with seeds 1, 2, 3 ..., of every recipe with every setting, on all
    training images, evaluated on the validation images."""

    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("top1", "train_seconds")
    """Metrics that choose the best setting of a recipe; each has its own transfer matrix."""

    @model_validator(mode="after")
    def _the_search_has_a_seed_of_its_own(self) -> Self:
        if self.search is not None:
            _require_own_seed(self.search, seeds=self.seeds)
        return self

    @model_validator(mode="after")
    def _no_metric_stands_twice(self) -> Self:
        twice = [metric for metric in self.metrics if self.metrics.count(metric) > 1]
        if twice:
            raise ValueError(f"metrics: {twice[0]} is given twice")
        return self


AnyStudy = Study | ConfigurationStudy
_Kind = TypeVar("_Kind", bound=Section)

_COMMANDS = {
    "policies": "lr bench",
    "settings": "bench",
    "staleness": "study staleness",
    "servers": "study servers",
    "scaling": "study scaling",
}
"""Commands by suite of studies."""

_SECTIONS = {"policies", "settings"}
"""Sections that only studies of one suite have, with the name of the suite."""


def _require_own_seed(search: Search, *, seeds: int) -> None:
    if 1 <= search.seed <= seeds:
        raise ValueError(
            f"search.seed ({search.seed}) is one of the seeds 1 to {seeds} that are measured: the "
            "search would choose what suits it; give another"
        )


def settings_of(study: AnyStudy) -> Mapping[str, Setting]:
    """Return what a study compares, by name; a policy is a setting of parts of the schedule."""
    if isinstance(study, ConfigurationStudy):
        return study.settings
    return {
        name: Setting(set={f"schedule.{key}": part for key, part in parts.items()})
        for name, parts in study.policies.items()
    }


def settings_here(study: ConfigurationStudy) -> ConfigurationStudy:
    """Return a study without the settings whose libraries are not installed."""
    settings = {name: setting for name, setting in study.settings.items() if not _missing(setting)}
    return study.model_copy(update={"settings": settings})


def _missing(setting: Setting) -> bool:
    needed = {"horovod": setting.backend == "horovod",
              "nvidia.dali": setting.set.get("execution.decoder") == "dali"}  # fmt: skip
    return any(is_needed and not _is_installed(name) for name, is_needed in needed.items())


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def load_study(path: Path) -> Study:
    """Read and validate a study of policies, a file or an installed one, as read_study does."""
    return read_study(str(path), Study, suite="policies")


def load_configuration_study(path: Path) -> ConfigurationStudy:
    """Read and validate a study of settings, a file or an installed one, as read_study does."""
    return read_study(str(path), ConfigurationStudy, suite="settings")


def read_study(name: str, kind: type[_Kind], *, suite: str) -> _Kind:
    """Read and validate a study file, or the study of this name that is installed in a suite.

    Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    path = Path(name)
    if path.name == name and not path.suffix and not path.is_file():
        known = _installed(suite)
        if name not in known:
            message = f"{name}: neither a file nor an installed study; those are {', '.join(known)}"
            for other, command in _COMMANDS.items():
                if name in _installed(other):
                    message = f"{name}: run this study with `largebatch {command} {name}`"
            raise RecipeError(message)
        text = (_STUDIES / suite / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        text = read_text(path, what="study")
    tree = parse_yaml(text, source=name)
    if not isinstance(tree, dict):
        required = [key for key, field in kind.model_fields.items() if field.is_required()]
        raise RecipeError(
            f"{name}: a study is a mapping of sections; this kind has {', '.join(required)}"
        )
    sections = tree.keys() & _SECTIONS
    if sections and not sections & kind.model_fields.keys():
        (section, *_) = sections
        raise RecipeError(
            f"{name}: a study of {section}; run it with `largebatch {_COMMANDS[section]}`"
        )
    return validate_tree(kind, tree, source=name)


def _installed(suite: str) -> list[str]:
    """Return the names of the studies that are installed in a suite."""
    presets = (_STUDIES / suite / "presets").iterdir()
    return sorted(Path(each.name).stem for each in presets if each.is_file())


def recipe_of(
    configuration: Configuration, folder: Path, changes: Mapping[str, Any] | None = None
) -> Recipe:
    """Load a recipe of a study whose file lies in `folder`, with further changes."""
    every = configuration.set | dict(changes or {})
    overrides = [f"{key}={json.dumps(value)}" for key, value in every.items()]
    file = folder / configuration.recipe
    return load_recipe(file if file.is_file() else configuration.recipe, overrides)


def read_record(path: Path, definition: Mapping[str, object]) -> dict[str, Any] | None:
    """Return a recorded measurement; None if there is none.

    Raises StudyError unless its keys of `definition` have the same values.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        recorded = {key: record[key] for key in definition}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise StudyError(f"{path}: is not a record of the study; remove it") from None
    if recorded != definition:
        raise StudyError(
            f"{path}: was recorded with other settings than the study has now; give another "
            "--out, or remove it"
        )
    return record


def base_recipe(configuration: Configuration, folder: Path) -> Recipe:
    """Load a recipe whose cells have protocols of the study; it must have none of its own.

    Raises RecipeError.
    """
    recipe = recipe_of(configuration, folder)
    if recipe.protocol is not None:
        raise RecipeError(
            f"{configuration.recipe}: the recipe has a protocol, and the study gives each cell its "
            "own; leave it out of the recipe"
        )
    return recipe
