"""Study files: recipes x policies x seeds, and recipes x settings x seeds.

The first kind searches the rate that suits every policy. The second one measures what each recipe
reaches and costs with every setting of the training and of the machine.
"""

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from largebatch.distributed.environment import BackendName
from largebatch.errors import RecipeError
from largebatch.recipe.loading import parse_yaml, read_text, validate_tree
from largebatch.recipe.sections import Fraction, Samples, Section

RATE = "schedule.peak_lr"
"""The key that stands for all rates of a schedule: they grow and shrink with it."""

SCALES = (0.1, 0.5, 1.0, 5.0, 10.0)
"""What the found rate is multiplied by to see how much it matters (arXiv:1908.06477); 1 is what
every seed has."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
"""Names folders."""

_FILES = ("study.db", "study.html")
"""What the names of files begin with that stand beside the folders of recipes."""

Factor = Annotated[float, Field(gt=0, le=1e6)]


class Configuration(Section):
    """A recipe, with changes of its own."""

    recipe: str
    """A file, relative to the study's, or the name of an installed recipe."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes by dotted key, as --set makes them: {duration.epochs: 5}."""


class Search(Section):
    """How the base rate of every policy is found, each with the same budget.

    Every trial is judged on training images that it is not trained on; the validation images decide
    nothing here. Afterwards they do where a policy has a `plateau`: its rate changes by them.
    """

    trials: Annotated[int, Field(ge=1, le=1000)]
    """Runs for each recipe with each policy. The first ones have the recipe's own rate and a few
    factors of it, the others what Optuna draws by a Gaussian process from the results so far."""

    held_out: Samples
    """How many training images judge; the same ones in every trial."""

    keys: Annotated[dict[str, tuple[Factor, Factor]], Field(min_length=1)] = Field(
        default_factory=lambda: {RATE: (1 / 16, 16.0)}
    )
    """What is searched, each between two factors of the recipe's own value, on a logarithmic scale.
    All rates of a schedule (low_lr, end_lr, start_lr, those of pieces) move with schedule.peak_lr,
    so that a policy keeps its shape. Any other key with a number above 0, such as
    optimizer.weight_decay, may stand beside it."""

    part: Fraction = 1.0
    """Length of a trial over that of the run. Every length of the schedule shrinks alike, and
    decays by the step are as much steeper, also as epochs without the images held out have fewer
    updates; a rate found in a short run need not be that of a long one."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 100
    """Of every trial, and of what Optuna draws; none of the seeds that are measured."""

    prune: bool = True
    """Stop a trial that lies below the median of the trials before it, after as many updates of the
    same recipe with the same policy. Looked at after a quarter, a half and three quarters of the
    run, never within the warm-up, and never compared with another policy."""

    metric: Literal["top1", "top5"] = "top1"
    """What is maximized, on the images held out."""

    def value_of(self, found: object) -> float:
        """Return the metric of a run or an evaluation."""
        return float(getattr(found, self.metric))

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        for key, (low, high) in self.keys.items():
            if low >= high:
                raise ValueError(f"keys.{key}: the first factor must be below the second one")
        return self


class Setting(Section):
    """How a recipe is carried out: changes to it, and what is decided outside of recipes."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Changes by dotted key, as --set makes them: {batch.global_batch: 384, precision: bf16,
    execution.decoder: dali}."""

    workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Local processes, as --workers starts them."""

    backend: BackendName = "auto"
    """The library that sums gradients, as --backend has it; auto: as the command has it."""

    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Of the processor in each worker (OMP_NUM_THREADS). null: those of the command's
    environment, else all cores."""


Metric = Literal[
    "top1",
    "top5",
    "train_seconds",
    "evaluation_seconds",
    "cpu_seconds",
    "peak_memory_bytes",
    "read_bytes",
]
"""What settings can be compared by."""


class _Study(Section):
    """What studies of both kinds have."""

    kind: ClassVar[str]
    """What is compared, as definitions in databases name it."""

    section: ClassVar[str]
    """The key of what is compared."""

    name: Name
    recipes: Annotated[dict[Name, Configuration], Field(min_length=1)]
    """Short names, and what is trained."""

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
    """Recipes x policies x seeds: every policy at the rate that suits it."""

    kind, section = "policy", "policies"
    policies: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    """Names, and the parts of the recipe's `schedule` that each one changes:
    {warmup: null, decay: {kind: cosine}}."""

    search: Search
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    """Runs with seeds 1, 2, 3 ... of every recipe with every policy at the rate found, on all
    training images, measured on the validation images."""

    robustness_seeds: Annotated[int, Field(ge=0, le=1000)] = 0
    """So many of the seeds are run besides at 0.1, 0.5, 5 and 10 times the rate found."""

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
        return self


class ConfigurationStudy(_Study):
    """Recipes x settings x seeds: what each recipe reaches and costs with every setting."""

    kind, section = "setting", "settings"
    settings: Annotated[dict[Name, Setting], Field(min_length=1)]
    """Names, and how the recipes are carried out."""

    search: Search | None = None
    """As in a study of policies: the rate that suits each recipe with each setting is searched
    first. null: the rates are those of the recipe with the setting."""

    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Runs with seeds 1, 2, 3 ... of every recipe with every setting, on all training images,
    measured on the validation images."""

    metrics: Annotated[tuple[Metric, ...], Field(min_length=1)] = ("top1", "train_seconds")
    """By what the best setting of a recipe is chosen; each has a transfer matrix of its own."""

    @model_validator(mode="after")
    def _the_search_has_a_seed_of_its_own(self) -> Self:
        if self.search is not None:
            _require_own_seed(self.search, seeds=self.seeds)
        return self

    @model_validator(mode="after")
    def _no_metric_stands_twice(self) -> Self:
        twice = [one for one in self.metrics if self.metrics.count(one) > 1]
        if twice:
            raise ValueError(f"metrics: {twice[0]} stands there twice")
        return self


AnyStudy = Study | ConfigurationStudy
_Kind = TypeVar("_Kind", Study, ConfigurationStudy)


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


def load_study(path: Path) -> Study:
    """Read and validate the file of a study of policies.

    Raises RecipeError naming every mistake at once, each by its dotted path.
    """
    return _load(path, Study, ("policies", "lr bench"), ("settings", "bench"))


def load_configuration_study(path: Path) -> ConfigurationStudy:
    """Read and validate the file of a study of settings, as load_study does."""
    return _load(path, ConfigurationStudy, ("settings", "bench"), ("policies", "lr bench"))


def _load(path: Path, kind: type[_Kind], own: tuple[str, str], other: tuple[str, str]) -> _Kind:
    """Read a study; `own` and `other` are the section that only one kind has, and its command."""
    tree = parse_yaml(read_text(path, what="study"), source=str(path))
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{path}: a study is a mapping of sections, found "
            f"{'nothing' if tree is None else type(tree).__name__}; it begins with "
            f"name, recipes and {own[0]}"
        )
    if other[0] in tree and own[0] not in tree:
        raise RecipeError(
            f"{path}: a study of {other[0]}, expected one of {own[0]}: carry it out by "
            f"`largebatch {other[1]}`"
        )
    return validate_tree(kind, tree, source=str(path))
