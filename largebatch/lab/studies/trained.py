"""Cells whose runs are those of `largebatch train`: policies and settings, and their records.

The record holds everything that a reader needs, because the run folder may be on another machine,
or deleted.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from largebatch.distributed.environment import BackendName
from largebatch.errors import (
    CheckpointError,
    DivergedError,
    LargebatchError,
    RecipeError,
    StudyError,
    WorkerFailedError,
    nearest,
)
from largebatch.lab.studies.confidence import measure_confidence
from largebatch.lab.studies.metrics import (
    Cost,
    Interval,
    Measurement,
    Robustness,
    at_every_scale,
    cost,
    has_diverged,
    interval,
    measurements,
    robustness,
)
from largebatch.lab.studies.search import (
    RUNGS,
    Ranges,
    chosen_values,
    drawn_values,
    first_values,
    rounded,
    rungs,
    should_prune,
)
from largebatch.lab.studies.store import CellRecords
from largebatch.lab.studies.study import (
    RATE,
    Cell,
    Search,
    Setting,
    Slot,
    Study,
    Task,
    named_error,
    recipe_of,
)
from largebatch.optional import require_psutil
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import scaled, shortened
from largebatch.report.run import FloatArray, Run, read_run
from largebatch.runs.interrupts import InterruptedStudyError, noting_requests
from largebatch.runs.options import Options
from largebatch.runs.run import run
from largebatch.schedules.build import build_schedule
from largebatch.tracking.environment import source_commit, versions
from largebatch.tracking.events import Evaluation, Measured, Summary, System

_SHAPE = "schedule.decay."
"""Beginning of the keys of shapes; kinds of decays have different ones."""

_CONFIDENCES = (
    *("average_confidence", "confidence_deviation", "class_confidence_deviation"),
    "classes_never_correct",
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Usage of a run over all workers.

    All but the first two fields need monitor: system; NaN if not measured. Measured from the
    set-up of a worker to the last update, with evaluations in training.
    """

    train_seconds: Measured
    """Seconds of the updates."""

    evaluation_seconds: Measured
    """Seconds of all evaluations on validation images."""

    cpu_seconds: Measured = math.nan
    """Core-seconds, summed over the workers."""

    cores: Measured = math.nan
    """Mean number of busy cores."""

    peak_memory_bytes: Measured = math.nan
    """Peak resident bytes, summed over the workers; shared memory counts in each."""

    read_bytes: Measured = math.nan
    written_bytes: Measured = math.nan
    """Bytes read from and written to disks, without the system's file cache."""

    gpu_percent: Measured = math.nan
    """Fraction of the time in which the GPU worked, mean over the workers."""

    gpu_memory_bytes: Measured = math.nan
    """Peak GPU memory in bytes of any worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Record of one run; accuracies are fractions."""

    seed: int
    scale: float = 1.0
    """Multiple of the best rate."""

    values: Mapping[str, float]
    """Values of the searched keys: a trial's own, else the best."""

    updates: int
    """Number of updates of the whole run, even if it was stopped early."""

    top1: float
    top5: float
    """Accuracies at the end, or where a trial was stopped; chance if the run diverged."""

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


def read_result(record: Json, *, source: str) -> Result:
    """Return the record of a run; raise StudyError if it is damaged."""
    try:
        return _RESULT.validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StudyError(f"{source}: {where}: {first['msg']}; remove the file") from None


@dataclass(frozen=True, kw_only=True)
class TrainedCell(Cell):
    """One recipe with one policy or setting."""

    recipe: Recipe
    """Recipe in the study file; its searched keys are the centre of the search."""

    scales: tuple[float, ...] = ()
    scaled_seeds: int = 0
    """Multiples of the best rate, and the number of seeds that also run at them."""

    workers: int = 1
    backend: BackendName = "auto"
    threads: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Trials, seeds, and seeds at multiples of the best rate."""
        trials = range(1, 1 + (self.search.trials if self.search else 0))
        seed = self.search.seed if self.search else 0
        return (
            *(Slot(name=f"search-{each:03}", seed=seed, trial=each) for each in trials),
            *super().slots,
            *(
                Slot(name=f"seed-{seed}-rate-x{scale:g}", seed=seed, scale=scale)
                for seed in range(1, self.scaled_seeds + 1)
                for scale in self.scales
            ),
        )

    @property
    def definition(self) -> Json:
        """Its mathematics and search: the machine may change."""
        search = self.search and self.search.model_dump(mode="json")
        return {"recipe": self.recipe.mathematics.model_dump(mode="json"), "search": search}

    @property
    def plan(self) -> Plan:
        """Division of a run with this seed over workers."""
        return make_plan(self.recipe, workers=self.workers)

    @property
    def ranges(self) -> Ranges:
        """Lowest and highest value of every searched key that the recipe has."""
        keys = {} if self.search is None else self.search.keys
        return {
            key: (low * self.own(key), high * self.own(key))
            for key, (low, high) in keys.items()
            if self.has(key)
        }

    def has(self, key: str) -> bool:
        """Return True unless a key is one of other shapes than the recipe's."""
        if not key.startswith(_SHAPE):
            return True
        return value_at(self.recipe.model_dump(mode="json"), key) is not None

    def own(self, key: str) -> float:
        """Return the recipe's own value; raise RecipeError unless it is a number above 0."""
        value: Any = self.recipe.model_dump(mode="json")
        for word in key.split("."):
            if isinstance(value, dict) and word not in value:
                hint = nearest(word, value, otherwise=f"known keys: {', '.join(value)}")
                raise RecipeError(f"search.keys.{key}: unknown key; {hint}")
            value = value[word] if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise RecipeError(
                f"search.keys.{key}: the recipe has {json.dumps(value)} there, expected a number "
                "above 0 to search around"
            )
        return float(value)

    def at(self, values: Mapping[str, float]) -> Recipe:
        """Return the recipe with these values; all rates of the schedule scale with the peak."""
        tree = self.recipe.model_dump(mode="json")
        for key, value in values.items():
            if key != RATE:
                *words, last = key.split(".")
                section = tree
                for word in words:
                    section = section[word]
                section[last] = value
        recipe = validate_tree(Recipe, tree, source=self.name)
        return scaled(recipe, values[RATE] / self.own(RATE)) if RATE in values else recipe

    def seed_recipe(self, values: Mapping[str, float], *, seed: int, scale: float = 1.0) -> Recipe:
        """Return the recipe of one seed on all training images, at a multiple of the rate."""
        rate = values.get(RATE, self.own(RATE)) * scale
        return self.at({**values, RATE: rate}).model_copy(update={"seed": seed})

    def trial_recipe(self, values: Mapping[str, float]) -> Recipe:
        """Return the recipe of a trial, which is evaluated on held-out training images."""
        search = self.search
        assert search is not None
        left = self.recipe.train_samples - search.held_out
        share = left / self.recipe.train_samples  # of the updates in an epoch
        epochs = steps = search.part
        if self.recipe.duration.epochs is not None:
            steps *= share
        else:
            epochs /= share
        tree = shortened(self.at(values), epochs, steps=steps).model_dump(mode="json")
        tree["seed"] = search.seed
        tree["data"]["held_out"] = {"samples": search.held_out}
        for section, key in ((tree["polish"], "statistics"), (tree, "optimizer")):
            _bound_samples(section and section[key], left)
        recipe = validate_tree(Recipe, tree, source=self.name)
        if not search.prune:
            return recipe
        plan = make_plan(recipe, workers=self.workers)
        tree["evaluation"] = {"every_epochs": max(1, plan.steps // RUNGS) / plan.steps_per_epoch}
        return validate_tree(Recipe, tree, source=self.name)

    def recipe_of(self, slot: Slot, values: Mapping[str, float]) -> Recipe:
        """Return the recipe of a run."""
        if slot.trial:
            return self.trial_recipe(values)
        return self.seed_recipe(values, seed=slot.seed, scale=slot.scale)

    def check(self) -> None:
        """Raise LargebatchError if a run of the cell cannot be made."""
        for end in (0, 1):
            values = {key: bounds[end] for key, bounds in self.ranges.items()}
            trials = [self.trial_recipe(values)] if self.search else []
            for recipe in (*trials, self.seed_recipe(values, seed=1)):
                build_schedule(recipe.schedule, make_plan(recipe, workers=self.workers))

    def values(self, trials: list[Json], slot: Slot) -> dict[str, float]:
        """Return the values of a run: drawn for a trial, else those that the search found."""
        if self.search is None:
            return {}
        found = [read_result(record, source=self.name) for record in trials]
        if not slot.trial:
            return chosen_values(self.search, found)
        own = {key: self.own(key) for key in self.ranges}
        first = first_values(self.search, own, self.ranges)
        if slot.trial <= len(first):
            return {key: rounded(value) for key, value in first[slot.trial - 1].items()}
        return drawn_values(self.search, self.ranges, found, number=slot.trial)

    def carry_out(self, task: Task) -> Json:
        """Train one run in its folder, or resume there; stop a trial that is not promising."""
        slot, search = task.slot, self.search
        recipe = self.recipe_of(slot, task.values)
        stops: list[int] = []
        if slot.trial and search is not None and search.prune:
            stops = rungs(make_plan(recipe, workers=self.workers))
        so_far: list[float] = []
        others = [read_result(record, source=self.name) for record in task.trials]

        def stop_early(step: int, evaluation: Evaluation) -> bool:
            assert search is not None
            so_far.append(search.value_of(evaluation))
            known = [
                search.value_of(each)
                for other in others
                for each in other.evaluations
                if each.step == step
            ]
            return should_prune(so_far, known)

        options = {**task.options, "workers": self.workers}
        if self.backend != "auto":
            options["backend"] = self.backend
        record = train(
            recipe, task.folder, options, stops=stops, stop_early=stop_early,
            watches=self.own_process,
        )  # fmt: skip
        return {**record, "values": dict(task.values), "scale": slot.scale}

    def describe(self, record: Json) -> str:
        """Describe how a run ended, and its values."""
        ended = f"top-1 {record['top1']:.2%}"
        if record.get("diverged"):
            ended = "diverged"
        elif record.get("pruned_after"):
            ended += f", stopped after {record['pruned_after']:,} updates"
        values = (f"{key.rpartition('.')[2]} {value:g}" for key, value in record["values"].items())
        return ", ".join([ended, *values])


@dataclass(frozen=True, kw_only=True)
class PolicyCell(TrainedCell):
    """One recipe with one policy, whose seeds also have LRBench's metrics of confidence."""

    def carry_out(self, task: Task) -> Json:
        """Train one run as TrainedCell, and evaluate its confidence unless it diverged."""
        record = super().carry_out(task)
        if task.slot.trial or task.slot.scale != 1 or record.get("diverged"):
            return record
        options = Options(out=task.folder, **task.options)
        found = asdict(measure_confidence(task.folder, options))
        return {**record, **{name: found[name] for name in _CONFIDENCES}}


@dataclass(frozen=True, kw_only=True)
class SettingCell(TrainedCell):
    """One recipe with one setting, whose runs are measured in processes of their own."""

    own_process = True

    @property
    def definition(self) -> Json:
        """The machine is part of a setting."""
        search = self.search and self.search.model_dump(mode="json")
        machine = {
            "workers": self.workers, "backend": self.backend, "threads": self.threads,
            "environment": dict(self.environment),
        }  # fmt: skip
        recipe = self.recipe.model_dump(mode="json")
        return {"recipe": recipe, "search": search, "machine": machine}

    @property
    def environment_of_process(self) -> Mapping[str, str]:
        """Its environment variables and threads."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return {**self.environment, **threads}


def cells_of(study: Study, folder: Path) -> list[TrainedCell]:
    """Return the cells of a study of policies or settings whose file is in `folder`, checked.

    Settings whose library is not installed are left out. Raises RecipeError naming the recipe and
    the variant that do not fit each other.
    """
    cells: list[TrainedCell] = []
    kind, word = (PolicyCell, "policy") if study.policies else (SettingCell, "setting")
    for name, entry in study.recipes.items():
        for variant, setting in variants_of(study).items():
            try:
                recipe = recipe_of(entry, folder, setting.set)
                if kind is SettingCell:
                    monitor = tuple(dict.fromkeys((*recipe.monitor, "system")))
                    recipe = recipe.model_copy(update={"monitor": monitor})
                cell = kind(
                    study=study.name, configuration=name, variant=variant, recipe=recipe,
                    seeds=study.seeds, search=study.search, scales=study.robustness_scales,
                    scaled_seeds=study.robustness_seeds, workers=setting.workers,
                    backend=setting.backend, threads=setting.threads,
                    environment=setting.environment,
                )  # fmt: skip
                cell.check()
            except LargebatchError as error:
                raise named_error(f"recipe {name} with {word} {variant}", error) from None
            cells.append(cell)
    for key in study.search.keys if study.search else ():
        if not any(cell.has(key) for cell in cells):
            raise RecipeError(f"search.keys.{key}: no {word} of the study has this key")
    return cells


def variants_of(study: Study) -> Mapping[str, Setting]:
    """Return the variants that can run here; a policy is a setting of parts of the schedule."""
    if study.settings is not None:
        return {name: one for name, one in study.settings.items() if not _lacks_library(one)}
    return {
        name: Setting(set={f"schedule.{key}": part for key, part in parts.items()})
        for name, parts in (study.policies or {}).items()
    }


def _lacks_library(setting: Setting) -> bool:
    needed = {"horovod": setting.backend == "horovod",
              "nvidia.dali": setting.set.get("execution.decoder") == "dali"}  # fmt: skip
    return any(is_needed and not is_installed(name) for name, is_needed in needed.items())


def is_installed(name: str) -> bool:
    """Return True if a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def value_at(tree: Any, key: str) -> Any:  # noqa: ANN401 -- any JSON
    """Return the value of a recipe as JSON at a dotted key; None if it has no such key."""
    for word in key.split("."):
        tree = tree.get(word) if isinstance(tree, dict) else None
    return tree


def _bound_samples(section: Json | None, most: int) -> None:
    for key in ("samples", "statistics_samples"):
        if section and section.get(key):
            section[key] = min(section[key], most)


def train(
    recipe: Recipe,
    folder: Path,
    options: Mapping[str, Any],
    *,
    stops: Sequence[int] = (),
    stop_early: Callable[[int, Evaluation], bool] = lambda *_: False,
    watches: bool = False,
) -> Json:
    """Train in a folder, or resume there, and return the record.

    Output goes to <folder's name>.log beside the folder. After each of `stops` updates
    `stop_early` decides whether to stop. A run that diverges is a result with the accuracy of
    chance. `watches` measures the cores that other programs use. Raises InterruptedStudyError if
    it is requested to stop.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_name(f"{folder.name}.log")
    with (
        noting_requests() as was_asked_to_stop,
        output.open("a", encoding="utf-8") as log,
        redirect_stdout(log),
    ):
        begun, others = time.time(), watch_others() if watches else None
        reached: Json = {}
        try:
            for stop in (*stops, None):
                if stop is None or stop not in _evaluations(folder):
                    summary = run(
                        recipe, out=folder, resume="auto", max_steps=stop, report=False, **options
                    )
                    if summary.status == "interrupted" or was_asked_to_stop():
                        raise InterruptedStudyError
                evaluation = _evaluations(folder).get(stop or -1)
                if evaluation is not None and stop_early(evaluation.step, evaluation):
                    reached = {**_end(evaluation), "pruned_after": stop}
                    break
        except (DivergedError, WorkerFailedError) as error:
            if was_asked_to_stop():  # a process that is starting ends by the signal itself
                raise InterruptedStudyError from None
            if isinstance(error, WorkerFailedError):
                raise
            reached = {**_chance(recipe), "diverged": str(error)}
        times = {"begun": begun, "ended": time.time(), "other_cores": others() if others else None}
    read = read_run(folder)
    if "diverged" not in reached and has_diverged(read):
        reached = {**_chance(recipe), "diverged": "the validation loss at the end is not finite"}
    if not reached and read.result:
        reached = _end(read.result)
    record = {**circumstances(), **times, **_measured(read), **reached}
    record |= {"seed": recipe.seed, "folder": str(folder.resolve())}
    record["updates"] = make_plan(recipe, workers=1).updates
    return cast("Json", json.loads(to_json(record, inf_nan_mode="null")))  # JSON has no NaN


def _evaluations(folder: Path) -> dict[int, Evaluation]:
    with suppress(CheckpointError):  # nothing was logged yet
        return {evaluation.step: evaluation for evaluation in read_run(folder).evaluations}
    return {}


def circumstances() -> Json:
    """Return the part of a record that says where and by what it was made."""
    import torch

    from largebatch import accelerator

    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "host": platform.node(),
        "hardware": next(iter(accelerator.names()), threads),
        "commit": source_commit(),
        "versions": versions(),
    }


def _measured(read: Run) -> Json:
    gap = read.last_gap
    return {
        "evaluations": measurements(read),
        "loss_difference": gap and gap.gap,
        "workers": read.plan.workers,
        "usage": asdict(usage_of(read)),
        **_from_summary(read.summary),
    }


def _from_summary(summary: Summary | None) -> Json:
    if summary is None or summary.status != "finished":
        return {}
    return {
        name: getattr(summary, name) for name in ("seconds", "images_per_second", "weights_sha256")
    }


def _end(evaluation: Evaluation) -> Json:
    return {name: getattr(evaluation, name) for name in ("top1", "top5", "loss")}


def _chance(recipe: Recipe) -> Json:
    classes = recipe.data.classes
    return {"top1": 1 / classes, "top5": min(1.0, 5 / classes), "loss": None}


def watch_others() -> Callable[[], float]:
    """Return a function that gives the mean number of cores used by other programs since now.

    Other programs are all but this process and its finished children.
    """
    cpu_times = require_psutil().cpu_times

    def read() -> tuple[float, float]:
        every, own = cpu_times(), os.times()
        busy = every.user + every.nice + every.system + getattr(every, "steal", 0.0)
        return time.monotonic(), busy - sum(own[:4])

    then, before = read()

    def cores() -> float:
        now, after = read()
        return max(0.0, (after - before) / (now - then))

    return cores


def usage_of(read: Run) -> Usage:
    """Return the resources that a run used, from its log."""
    seconds = [step.step_seconds for step in read.steps]
    evaluations = [one.seconds for one in read.evaluations]
    used = _used(read.system) if read.system and all(one.seconds for one in read.system) else {}
    return Usage(train_seconds=_total(seconds), evaluation_seconds=_total(evaluations), **used)


def _total(seconds: Sequence[float]) -> float:
    return math.fsum(seconds) if seconds and all(map(math.isfinite, seconds)) else math.nan


def _used(records: Sequence[System]) -> dict[str, float]:
    """Return the sums over records and workers; one row per record, one column per worker."""

    def table(name: str) -> FloatArray:
        return np.array([getattr(record, name) for record in records], dtype=np.float64)

    seconds = table("seconds")
    cpu_seconds = float((table("cpu_percent") / 100 * seconds).sum())
    return {
        "cpu_seconds": cpu_seconds,
        "cores": cpu_seconds / float(seconds.mean(axis=1).sum()),
        "peak_memory_bytes": float(table("peak_memory_bytes").max(axis=0).sum()),
        "read_bytes": float((table("read_bytes_per_second") * seconds).sum()),
        "written_bytes": float((table("written_bytes_per_second") * seconds).sum()),
        "gpu_percent": float((table("gpu_percent") * seconds).sum() / seconds.sum()),
        "gpu_memory_bytes": float(table("gpu_memory_bytes").max()),
    }


@dataclass(frozen=True, kw_only=True)
class CellResults:
    """The runs of a cell of a study of policies or settings."""

    cell: TrainedCell
    trials: tuple[Result, ...] = ()
    seeds: tuple[Result, ...] = ()
    """Runs at the values found, by seed."""

    scaled: tuple[Result, ...] = ()
    """Runs at multiples of the rate found, by seed and scale."""

    finished: bool = True
    """True if every run has its record."""

    @property
    def configuration(self) -> str:
        """Name of its recipe."""
        return self.cell.configuration

    @property
    def variant(self) -> str:
        """Name of its policy or setting."""
        return self.cell.variant

    @property
    def recipe(self) -> Recipe:
        """Recipe as the study has it."""
        return self.cell.recipe

    @property
    def values(self) -> Mapping[str, float]:
        """Values found; empty before the search is done, or where nothing was searched."""
        return self.seeds[0].values if self.seeds else {}

    def mean(self, value: Callable[[Result], float | None]) -> Interval | None:
        """Return the mean of a value over the seeds that have it; None if none has."""
        known = [one for one in map(value, self.seeds) if one is not None and math.isfinite(one)]
        return interval(known) if known else None

    @property
    def top1(self) -> Interval | None:
        """Mean accuracy over seeds; a run that diverged counts as chance."""
        return self.mean(lambda run: run.top1)

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(one.diverged is not None for one in self.seeds)

    @property
    def edges(self) -> dict[str, str]:
        """Keys whose best value is the `lowest` or the `highest` tried."""
        ends = {}
        for key, value in self.values.items():
            tried = {trial.values[key] for trial in self.trials}
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


def results_of(cell: TrainedCell, records: Mapping[str, Json]) -> CellResults:
    """Return the results of a cell from its records by the names of runs."""
    found = {
        slot: read_result(records[slot.name], source=f"{cell.name}/{slot.name}.json")
        for slot in cell.slots
        if slot.name in records
    }
    runs = sorted(
        ((slot, one) for slot, one in found.items() if not slot.trial),
        key=lambda each: (each[0].seed, each[0].scale),
    )
    return CellResults(
        cell=cell,
        trials=tuple(one for slot, one in found.items() if slot.trial),
        seeds=tuple(one for slot, one in runs if slot.scale == 1),
        scaled=tuple(one for slot, one in runs if slot.scale != 1),
        finished=len(found) == len(cell.slots),
    )


def read_policy(there: CellRecords) -> CellResults | None:
    """Return the results of a policy in a folder; None for other kinds of studies."""
    if there.about["kind"] != PolicyCell.__name__:
        return None
    source = str(there.path)
    try:
        cell = PolicyCell(
            study=there.about["study"],
            configuration=there.about["configuration"],
            variant=there.about["variant"],
            recipe=validate_tree(Recipe, there.definition["recipe"], source=source),
            search=validate_tree(Search, there.definition["search"], source=source),
            seeds=sum(not one.trial and one.scale == 1 for one in there.slots.values()),
            scales=tuple({one.scale: None for one in there.slots.values() if one.scale != 1}),
            scaled_seeds=len({one.seed for one in there.slots.values() if one.scale != 1}),
        )
    except (KeyError, TypeError, LargebatchError) as error:
        raise StudyError(f"{source}: its definition cannot be read: {error}") from None
    return results_of(cell, there.records)
