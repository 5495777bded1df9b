"""Cells whose runs are those of `largebatch train`: policies and settings, and their records.

A policy is a shape. All rates of its schedule are multiples of one base rate, which is searched for
each shape (arXiv:2603.10301): at one common rate, a study would rank base rates. The record of a
run holds everything that a reader needs, because the run folder may be on another machine, or
deleted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from largebatch.errors import DivergedError, WorkerFailedError
from largebatch.lab.studies.doubts import CellRuns
from largebatch.lab.studies.metrics import (
    Interval,
    Measurement,
    has_diverged,
    interval,
    measurements,
)
from largebatch.lab.studies.records import Json, Record, Share, as_json, read_as
from largebatch.lab.studies.study import (
    TRIAL_SEED,
    Cell,
    Search,
    Setting,
    Slot,
    Study,
    naming,
    recipe_of,
)
from largebatch.optional import require_optuna
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import scaled, shortened
from largebatch.report.run import FloatArray, Run, read_run
from largebatch.runs.interrupts import InterruptedStudyError, noting_requests
from largebatch.runs.options import Options
from largebatch.runs.run import start
from largebatch.schedules.build import build_schedule
from largebatch.tracking.events import Measured

FIRST_FACTORS = (1.0, 0.4, 2.5, 0.16, 6.25)
"""Multiples of the recipe's own rate that the first trials of every search have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Record):
    """Record of one run; accuracies are fractions."""

    rate: float | None
    """Searched base rate: a trial's own, else the best; None without a search."""

    top1: Share
    """Accuracy at the end; chance if the run diverged."""

    loss_difference: Measured = math.nan
    """Validation loss minus training loss; NaN without monitor: generalization_gap."""

    evaluations: tuple[Measurement, ...]
    images_per_second: float | None = None
    usage: Mapping[str, Measured] = field(default_factory=dict)
    """As usage_of returns it."""


def read_result(record: Json, *, source: str) -> Result:
    """Return the record of a run; raise StudyError if it is damaged."""
    return read_as(Result, record, source=source)


@dataclass(frozen=True, kw_only=True)
class TrainedCell(Cell):
    """One recipe with one policy or setting."""

    search: Search | None = None
    setting: Setting = field(default_factory=Setting)
    """Its machine; `set` is already in the recipe."""

    @property
    def environment_of_process(self) -> Mapping[str, str]:
        """Its environment variables and threads."""
        threads = self.setting.threads
        own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        return {**self.setting.environment, **own}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Trials, then seeds."""
        trials = range(1, 1 + (self.search.trials if self.search else 0))
        return (
            *(Slot(name=f"search-{each:03}", seed=TRIAL_SEED, trial=each) for each in trials),
            *super().slots,
        )

    @property
    def definition(self) -> Json:
        """Its mathematics and search, and the machine if it is measured; else it may change."""
        search = self.search and self.search.model_dump(mode="json")
        if not self.own_process:
            return {"recipe": self.recipe.mathematics.model_dump(mode="json"), "search": search}
        machine = self.setting.model_dump(mode="json", exclude={"set"})
        recipe = self.recipe.model_dump(mode="json")
        return {"recipe": recipe, "search": search, "machine": machine}

    def recipe_of(self, slot: Slot, rate: float | None) -> Recipe:
        """Return the recipe of a run; all rates of the schedule scale with the peak.

        A trial is evaluated on held-out training images. Its schedule has the same shape, although
        epochs without these images have fewer updates.
        """
        own = self.recipe.schedule.peak_lr
        recipe = scaled(self.recipe, (own if rate is None else rate) / own)
        if not slot.trial:
            return recipe.model_copy(update={"seed": slot.seed})
        assert self.search is not None
        left = recipe.train_samples - self.search.held_out
        share = left / recipe.train_samples  # of the updates in an epoch
        lengths = (1.0, share) if recipe.duration.epochs is not None else (1 / share, 1.0)
        tree = shortened(recipe, lengths[0], steps=lengths[1]).model_dump(mode="json")
        tree["seed"] = slot.seed
        tree["data"]["held_out"] = {"samples": self.search.held_out}
        for section in ((tree["polish"] or {}).get("statistics"), tree["optimizer"]):
            for key in ("samples", "statistics_samples"):
                if section and section.get(key):
                    section[key] = min(section[key], left)
        return validate_tree(Recipe, tree, source=self.name)

    def rate(self, trials: list[Json], slot: Slot) -> float | None:
        """Return the base rate of a run: drawn for a trial, else that which the search found.

        The first trials have fixed multiples of the recipe's own rate.
        """
        if self.search is None:
            return None
        found = [read_result(record, source=self.name) for record in trials]
        if not slot.trial:
            return chosen_rate(found, held_out=self.search.held_out)
        own = self.recipe.schedule.peak_lr
        low, high = self.search.factors
        first = [float(f"{own * factor:.4g}") for factor in FIRST_FACTORS if low <= factor <= high]
        if slot.trial <= len(first):
            return first[slot.trial - 1]
        return drawn_rate(found, low=low * own, high=high * own, number=slot.trial)

    def carry_out(self, slot: Slot, rate: float | None, options: Options) -> Json:
        """Train one run in its folder, or resume there."""
        options = replace(options, workers=self.setting.workers)
        if self.setting.backend != "auto":
            options = replace(options, backend=self.setting.backend)
        recipe = self.recipe_of(slot, rate)
        if recipe.tracking.trackers:
            filed = recipe.tracking.model_copy(update={"name": f"{self.name}/{slot.name}"})
            recipe = recipe.model_copy(update={"tracking": filed})
        return {**train(recipe, options), "rate": rate}


def drawn_rate(trials: Sequence[Result], *, low: float, high: float, number: int) -> float:
    """Return the rate of trial `number`, counted from 1, by Optuna's Gaussian process.

    With so few trials it comes closer than TPE to the maximum of a noisy bell over the logarithm
    of the rate; started after three trials, it spends the next ones at the ends of the range.
    The seed differs between trials, so that no two processes draw the same.
    """
    require_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = TRIAL_SEED + number - 1
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=len(FIRST_FACTORS))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    inside = optuna.distributions.FloatDistribution(low, high, log=True)
    for trial in trials:
        params = {"rate": min(max(trial.rate or low, low), high)}
        made = optuna.trial.create_trial(
            value=trial.top1, params=params, distributions={"rate": inside}
        )
        study.add_trial(made)
    drawn: float = study.ask({"rate": inside}).params["rate"]
    return float(f"{drawn:.4g}")


def chosen_rate(trials: Sequence[Result], *, held_out: int) -> float:
    """Return the lowest rate whose trial is as good as the best one.

    That is within the standard error of its accuracy on the held-out images (Breiman et al.
    1984, the one-standard-error rule): the best of a few trials of one seed is often close to
    divergence.
    """
    best = max(trial.top1 for trial in trials)
    least = best - math.sqrt(best * (1 - best) / held_out)
    return min(trial.rate or 0.0 for trial in trials if trial.top1 >= least)


def cells_of(study: Study, folder: Path) -> list[TrainedCell]:
    """Return the cells of a study of policies or settings whose file is in `folder`, checked.

    Settings whose library is not installed are left out. Raises RecipeError naming the recipe and
    the variant that do not fit each other.
    """
    variants = study.settings or {
        name: Setting(set={f"schedule.{key}": part for key, part in parts.items()})
        for name, parts in (study.policies or {}).items()
    }
    cells: list[TrainedCell] = []
    for name, entry in study.recipes.items():
        for variant, setting in variants.items():
            if _lacks_library(setting):
                continue
            with naming(f"{name}/{variant}"):
                recipe = recipe_of(entry, folder, setting.set)
                if recipe.tracking.trackers:  # else definitions would change
                    group = {"group": recipe.tracking.group or study.name}
                    tracking = recipe.tracking.model_copy(update=group)
                    recipe = recipe.model_copy(update={"tracking": tracking})
                if study.settings:
                    monitor = tuple(dict.fromkeys((*recipe.monitor, "system")))
                    recipe = recipe.model_copy(update={"monitor": monitor})
                cell = TrainedCell(
                    configuration=name, variant=variant, recipe=recipe, seeds=study.seeds,
                    search=study.search, setting=setting, own_process=study.settings is not None,
                )  # fmt: skip
                for slot in {bool(slot.trial): slot for slot in cell.slots}.values():
                    first = cell.recipe_of(slot, None)
                    build_schedule(first.schedule, make_plan(first, workers=setting.workers))
            cells.append(cell)
    return cells


def _lacks_library(setting: Setting) -> bool:
    if setting.backend == "horovod" and find_spec("horovod") is None:
        return True
    is_dali = setting.set.get("execution.decoder") == "dali"
    return is_dali and not (find_spec("nvidia") and find_spec("nvidia.dali"))


def train(recipe: Recipe, options: Options) -> Json:
    """Train in the folder `options.out`, or resume there, and return the record.

    Output goes to <folder's name>.log beside the folder. A run that diverges is a result with the
    accuracy of chance. Raises InterruptedStudyError if it is requested to stop.
    """
    folder = options.out
    folder.parent.mkdir(parents=True, exist_ok=True)
    diverged = None
    was_asked_to_stop = noting_requests()
    with (
        folder.with_name(f"{folder.name}.log").open("a", encoding="utf-8") as log,
        redirect_stdout(log),
    ):
        try:
            summary = start(recipe, replace(options, resume="auto"))
            if summary.status == "interrupted" or was_asked_to_stop():
                raise InterruptedStudyError
        except (DivergedError, WorkerFailedError) as error:
            if was_asked_to_stop():  # a process that is starting ends by the signal itself
                raise InterruptedStudyError from None
            if isinstance(error, WorkerFailedError):
                raise
            diverged = str(error)
    read = read_run(folder)
    if diverged is None and has_diverged(read):
        diverged = "the validation loss at the end is not finite"
    done, last = (read.summary, read.result) if diverged is None else (None, None)
    assert diverged is not None or last is not None
    record = {
        "top1": last.top1 if last else 1 / recipe.data.classes,
        "loss": last and last.loss,
        "seed": recipe.seed,
        "diverged": diverged,
        "evaluations": measurements(read),
        "loss_difference": read.last_gap and read.last_gap.gap,
        "usage": usage_of(read),
        "images_per_second": done and done.images_per_second,
        "weights_sha256": done and done.weights_sha256,
        "folder": str(folder.resolve()),
    }
    return as_json(record)


def usage_of(read: Run) -> dict[str, float]:
    """Return the resources that a run used, from its log.

    Seconds are those of the updates. The rest needs monitor: system, and is measured from the
    set-up of a worker to the last update, with evaluations: `cpu_seconds`, core-seconds of all
    workers; `cores`, the mean number of busy ones; `peak_memory_bytes`, resident, summed over the
    workers; `read_bytes`, those read from disks (NaN in logs without them); `gpu_percent`, the mean
    over the workers; `gpu_memory_bytes`, the peak of any worker.
    """
    used = {"train_seconds": math.fsum(step.step_seconds for step in read.steps)}
    if not read.system or not all(one.seconds for one in read.system):
        return used

    def table(name: str) -> FloatArray:  # a row per record, a column per worker
        return np.array([getattr(record, name) for record in read.system], dtype=np.float64)

    seconds, reads = table("seconds"), table("read_bytes")
    cpu_seconds = float((table("cpu_percent") / 100 * seconds).sum())
    return {
        **used,
        "cpu_seconds": cpu_seconds,
        "cores": cpu_seconds / float(seconds.mean(axis=1).sum()),
        "peak_memory_bytes": float(table("peak_memory_bytes").max(axis=0).sum()),
        "gpu_percent": float((table("gpu_percent") * seconds).sum() / seconds.sum()),
        "gpu_memory_bytes": float(table("gpu_memory_bytes").max()),
        "read_bytes": float(reads.sum()) if reads.size else math.nan,
    }


@dataclass(frozen=True, kw_only=True)
class CellResults:
    """The runs of a cell of a study of policies or settings."""

    cell: TrainedCell
    trials: tuple[Result, ...] = ()
    seeds: tuple[Result, ...] = ()
    """Runs at the rate found, by seed."""

    finished: bool = True
    """True if every run has its record."""

    @property
    def runs(self) -> CellRuns:
        """Its runs, as doubts are about them."""
        return CellRuns(
            name=self.cell.variant,
            runs={run.seed: run for run in self.seeds},
            seeds=self.cell.seeds,
            finished=self.finished,
        )

    @property
    def rate(self) -> float | None:
        """Rate found; None before the search is done, or where nothing was searched."""
        return self.seeds[0].rate if self.seeds else None

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
    def edge(self) -> str | None:
        """`lowest` or `highest` if the rate found is an end of those tried; else None."""
        tried = [trial.rate for trial in self.trials if trial.rate is not None]
        if self.rate is None or len(set(tried)) < 2:
            return None
        return {min(tried): "lowest", max(tried): "highest"}.get(self.rate)


def results_of(cell: TrainedCell, records: Mapping[str, Json]) -> CellResults:
    """Return the results of a cell from its records by the names of runs."""
    found = {
        slot: read_result(records[slot.name], source=f"{cell.name}/{slot.name}.json")
        for slot in cell.slots
        if slot.name in records
    }
    return CellResults(
        cell=cell,
        trials=tuple(one for slot, one in found.items() if slot.trial),
        seeds=tuple(one for slot, one in found.items() if not slot.trial),
        finished=len(found) == len(cell.slots),
    )
