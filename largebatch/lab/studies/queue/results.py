"""Results in a policy database, cell by cell, for comparisons.

Everything is read from the storage: the run folders may be on other machines, or deleted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from largebatch.errors import LargebatchError, StudyError, shorten
from largebatch.lab.studies.metrics import (
    Cost,
    Interval,
    Measurement,
    Robustness,
    at_every_scale,
    cost,
    interval,
    robustness,
)
from largebatch.lab.studies.queue.cells import Cell
from largebatch.lab.studies.queue.database import (
    DEFINITION,
    RESULT,
    SLOT,
    Json,
    require_format,
    trials_by_slot,
)
from largebatch.lab.studies.queue.study import Search, Setting
from largebatch.lab.studies.queue.usage import Usage
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import Measured

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Metrics by class at the last evaluation, in the order of labels."""

    names: tuple[str, ...]
    samples: tuple[int, ...]
    correct: tuple[int, ...]
    average_confidence: tuple[Measured, ...] = ()
    """Mean confidence of correct images; NaN for a class without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Record of one run in a database; accuracies are fractions."""

    seed: int
    scale: float = 1.0
    """Multiple of the best rate."""

    values: Mapping[str, float]
    """Values of the searched keys: a trial's own, else the best."""

    updates: int
    """Number of updates of the whole run, even if it was stopped early."""

    top1: float
    top5: float
    """Top-1 accuracy at the end, or where a trial was stopped; chance if the run diverged."""

    loss: Measured
    average_confidence: Measured = math.nan
    confidence_deviation: Measured = math.nan
    class_confidence_deviation: Measured = math.nan
    classes_never_correct: int | None = None
    loss_difference: Measured = math.nan
    """Validation loss minus training loss; NaN without monitor: generalization_gap."""

    diverged: str | None = None
    """Reason of the divergence; None if the run did not diverge."""

    pruned_after: int | None = None
    """Updates after which a trial was stopped early; None if it was not."""

    evaluations: tuple[Measurement, ...] = ()
    classes: Classes | None = None
    seconds: Measured = math.nan
    """Seconds of the whole run."""

    images_per_second: float | None = None
    workers: int = 1
    usage: Usage | None = None
    begun: Measured = math.nan
    ended: Measured = math.nan
    """Start and end of the run or its last part, in seconds since 1970."""

    other_cores: Measured = math.nan
    """Mean number of cores that other programs used during the run."""

    hardware: str = ""
    host: str = ""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    weights_sha256: str | None = None
    folder: str = ""
    """Run folder on its host."""

    def cost(self, target: float) -> Cost | None:
        """Return the cost of the run up to a top-1 accuracy (a fraction).

        None if the run did not reach it, or diverged and so did not keep it.
        """
        return None if self.diverged else cost(self.evaluations, target)

    def used(self, name: str) -> float:
        """Return a field of its usage; NaN where it was not measured, or the run diverged."""
        if self.usage is None or self.diverged is not None:
            return math.nan
        return float(getattr(self.usage, name))


_RESULT: TypeAdapter[Result] = TypeAdapter(Result)
_VALUES = TypeAdapter(dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResults:
    """The runs of one cell of a study, and the search before them."""

    study: str
    configuration: str
    recipe: Recipe
    values: Mapping[str, float]
    """Values found; none before the search is done, or where nothing was searched."""

    search: tuple[Result, ...]
    seeds: tuple[Result, ...]
    """Runs at the values found, by seed."""

    finished: bool
    """True if every run has its result."""

    def mean(self, value: Callable[[Result], float | None]) -> Interval | None:
        """Return the mean of a value over the seeds that have it; None where none has."""
        known = [one for one in map(value, self.seeds) if one is not None and math.isfinite(one)]
        return interval(known) if known else None

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(one.diverged is not None for one in self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResults(SeedResults):
    """One recipe, as the study has it, with one policy."""

    policy: str
    settings: Search
    """How it was searched."""

    scaled: tuple[Result, ...]
    """Runs at multiples of the rate found, by seed and scale."""

    @property
    def cell(self) -> Cell:
        """The cell, with the recipes of its runs."""
        return Cell(
            configuration=self.configuration,
            variant=self.policy,
            recipe=self.recipe,
            search=self.settings,
        )

    @property
    def edges(self) -> dict[str, str]:
        """Keys whose best value is the `lowest` or the `highest` tried."""
        ends = {}
        for key, value in self.values.items():
            tried = {trial.values[key] for trial in self.search}
            if len(tried) > 1 and value in {min(tried), max(tried)}:
                ends[key] = "lowest" if value == min(tried) else "highest"
        return ends

    @property
    def by_scale(self) -> dict[int, dict[float, list[float]]]:
        """Top-1 by seed and multiple of the rate, as in metrics.at_every_scale."""
        runs = (*self.seeds, *self.scaled)
        return at_every_scale((result.seed, result.scale, result.top1) for result in runs)

    @property
    def areas(self) -> dict[int, float]:
        """Average top-1 over multiples of the rate, by seed, as metrics.Robustness.area."""
        return {seed: robustness(one).area for seed, one in self.by_scale.items()}

    @property
    def robustness(self) -> Robustness | None:
        """Robustness over the seeds that ran at every multiple of the rate; None without one."""
        every = list(self.by_scale.values())
        if not every:
            return None
        return robustness({scale: [one[scale][0] for one in every] for scale in every[0]})


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResults(SeedResults):
    """One recipe, with the changes of one setting."""

    setting: str
    """Name of the setting."""

    workers: int
    backend: str
    threads: int | None
    environment: Mapping[str, str]
    """As in study.Setting."""


def describe_machines(runs: Sequence[Result], *, hardware: bool, most: int) -> str:
    """Return where runs were made and with which torch, as the end of a sentence."""
    known = [run for run in runs if run.host]
    hosts = [f"{run.host} ({run.hardware})" if hardware else run.host for run in known]
    versions = list(dict.fromkeys(run.versions.get("torch", "") for run in runs))
    where = f", on {shorten(list(dict.fromkeys(hosts)), most=most)}" if hosts else ""
    return where + (f" with torch {shorten(versions, most=most)}" if any(versions) else "")


def read_results(storage: "BaseStorage") -> list[CellResults]:
    """Return the cells of all studies of policies in a storage, in order of their start.

    Studies of other programs are skipped. Raises StudyError for another version of the format,
    and for a record that cannot be read.
    """
    searches, seeds = _queues(storage, "policy")
    return [_cell(search, seeds.get(names)) for names, search in searches.items()]


def read_settings(storage: "BaseStorage") -> list[SettingResults]:
    """Return the cells of all studies of settings in a storage, as read_results does."""
    searches, seeds = _queues(storage, "setting")
    names = dict.fromkeys((*searches, *seeds))
    return [_setting(searches.get(name), seeds.get(name)) for name in names]


_Queues = dict[tuple[str, ...], "_Queue"]


def _queues(storage: "BaseStorage", kind: str) -> tuple[_Queues, _Queues]:
    """Return the searches and the seeds of all studies of one kind, by name."""
    import optuna

    searches: _Queues = {}
    seeds: _Queues = {}
    names = ("study", "configuration", kind)
    for name in optuna.get_all_study_names(storage):
        study = optuna.load_study(study_name=name, storage=storage)
        definition = study.user_attrs.get(DEFINITION)
        if not isinstance(definition, dict) or not definition.keys() >= {"format", *names}:
            continue
        require_format(study.study_name, definition)
        to = searches if "search" in definition else seeds
        to[tuple(str(definition[key]) for key in names)] = _read(study, definition)
    return searches, seeds


class _Queue(NamedTuple):
    """An Optuna study and its finished trials."""

    name: str
    definition: Json
    results: tuple[Result, ...]
    is_done: bool
    """True if every started slot has a result."""


def _read(study: "Study", definition: Json) -> _Queue:
    counting = trials_by_slot(study)
    done = [trial for trial in counting.values() if trial.state.is_finished()]
    return _Queue(
        name=study.study_name,
        definition=definition,
        results=tuple(read_result(study.study_name, trial) for trial in done),
        is_done=len(done) == len(counting) > 0,
    )


def read_result(name: str, trial: "FrozenTrial") -> Result:
    """Return the record of a trial; raise StudyError if it is damaged."""
    about = trial.user_attrs
    found = about.get(RESULT)
    record: dict[str, Any] = {
        "scale": about.get("scale", 1.0),
        **(found if isinstance(found, dict) else {}),
    }
    try:
        return _RESULT.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StudyError(
            f"{name}: the record of {about[SLOT]} cannot be read: {where}: {first['msg']}; "
            "another program wrote it, or it is damaged: give another --storage"
        ) from None


def _cell(search: _Queue, seeds: _Queue | None) -> CellResults:
    definition = search.definition
    try:
        recipe = validate_tree(Recipe, definition["recipe"], source=search.name)
        settings = validate_tree(Search, definition["search"], source=search.name)
    except (KeyError, TypeError, LargebatchError) as error:
        raise StudyError(f"{search.name}: its definition cannot be read: {error}") from None
    done = sorted(seeds.results, key=lambda result: (result.seed, result.scale)) if seeds else []
    searched = search.is_done and len(search.results) >= settings.trials
    return CellResults(
        study=str(definition["study"]),
        configuration=str(definition["configuration"]),
        policy=str(definition["policy"]),
        recipe=recipe,
        settings=settings,
        values=_values(seeds),
        search=search.results,
        seeds=tuple(result for result in done if result.scale == 1),
        scaled=tuple(result for result in done if result.scale != 1),
        finished=searched and seeds is not None and seeds.is_done,
    )


def _values(seeds: _Queue | None) -> dict[str, float]:
    """Return the best values; empty before there are seeds."""
    if seeds is None:
        return {}
    try:
        return _VALUES.validate_python(seeds.definition.get("values"))
    except ValidationError as error:
        first = error.errors()[0]
        raise StudyError(
            f"{seeds.name}: its definition cannot be read: values: {first['msg']}"
        ) from None


def _setting(search: _Queue | None, seeds: _Queue | None) -> SettingResults:
    of = seeds or search
    assert of is not None
    definition = of.definition
    try:
        recipe = validate_tree(Recipe, definition["recipe"], source=of.name)
        machine = validate_tree(Setting, definition["machine"], source=of.name)
    except (KeyError, TypeError, LargebatchError) as error:
        raise StudyError(f"{of.name}: its definition cannot be read: {error}") from None
    return SettingResults(
        study=str(definition["study"]),
        configuration=str(definition["configuration"]),
        setting=str(definition["setting"]),
        recipe=recipe,
        workers=machine.workers,
        backend=machine.backend,
        threads=machine.threads,
        environment=machine.environment,
        values=_values(seeds),
        search=search.results if search else (),
        seeds=tuple(sorted(seeds.results, key=lambda result: result.seed)) if seeds else (),
        finished=seeds is not None and seeds.is_done,
    )
