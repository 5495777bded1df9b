"""Cells whose runs are those of `largebatch train`: policies and settings, and their records.

A policy is a shape. All rates of its schedule are multiples of one base rate, which is searched for
each shape (arXiv:2603.10301): at one common rate, a study would rank base rates. The record of a
run holds everything that a reader needs, because the run folder may be on another machine, or
deleted.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.errors import (
    LONGEST_NAME,
    DivergedError,
    LargebatchError,
    RecipeError,
    WorkerFailedError,
    clip,
)
from largebatch.lab.studies.doubts import CellRuns
from largebatch.lab.studies.metrics import (
    Measurement,
    Robustness,
    has_diverged,
    measurements,
    robustness,
)
from largebatch.lab.studies.records import Json, Share, StudyRecord, as_json, read_as
from largebatch.lab.studies.study import (
    RATE,
    TRIAL_SEED,
    Cell,
    Search,
    Setting,
    Slot,
    Study,
    Values,
    naming,
    of_few_updates,
    recipe_of,
)
from largebatch.optional import require_optuna
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import validate_tree
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import scaled, shortened
from largebatch.report.run import FloatArray, Run, read_run
from largebatch.report.seeds import Interval, interval
from largebatch.runs.interrupts import InterruptedStudyError, noting_requests
from largebatch.runs.options import Options
from largebatch.runs.run import start
from largebatch.schedules.build import build_schedule
from largebatch.tracking.events import Measured

SHAPE = "schedule.decay."
"""Beginning of the keys of shapes; kinds of decays have different ones."""

FIRST_FACTORS = (1.0, 0.4, 2.5, 0.16, 6.25)
"""Multiples of the recipe's own rate that the first trials of every search have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRecord(StudyRecord):
    """Record of one run; accuracies are fractions."""

    values: Mapping[str, float]
    """Values of the searched keys: a trial's own, else the best; empty without a search."""

    scale: float = 1.0
    """Multiple of the rate found."""

    top1: Share
    top5: Share
    """Accuracies at the end; chance if the run diverged."""

    average_confidence: Measured = math.nan
    confidence_deviation: Measured = math.nan
    class_confidence_deviation: Measured = math.nan
    """Confidence of the correct images, as in training.Metrics; NaN if the run diverged."""

    loss_difference: Measured = math.nan
    """Validation loss minus training loss; NaN without monitor: generalization_gap."""

    evaluations: tuple[Measurement, ...]
    images_per_second: float | None = None
    usage: Mapping[str, Measured] = field(default_factory=dict)
    """As usage_of returns it."""

    @property
    def rate(self) -> float | None:
        """Searched base rate; None without a search."""
        return self.values.get(RATE)


def read_result(record: Json, *, source: str) -> TrainedRecord:
    """Return the record of a run; raise StudyError if it is damaged."""
    return read_as(TrainedRecord, record, source=source)


@dataclass(frozen=True, kw_only=True)
class TrainedCell(Cell):
    """One recipe with one policy or setting."""

    search: Search | None = None
    scaled_seeds: int = 0
    scales: tuple[float, ...] = ()
    """Number of seeds that also run at these multiples of the rate found."""

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
        """Trials, seeds, and seeds at multiples of the rate found."""
        trials = range(1, 1 + (self.search.trials if self.search else 0))
        return (
            *(Slot(name=f"search-{number:03}", seed=TRIAL_SEED, trial=number) for number in trials),
            *super().slots,
            *(
                Slot(name=f"seed-{seed}-rate-x{scale:g}", seed=seed, scale=scale)
                for seed in range(1, self.scaled_seeds + 1)
                for scale in self.scales
            ),
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

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest value of each searched key that its recipe has, the rate first."""
        if self.search is None:
            return {}
        factors = {RATE: self.search.factors, **self.search.keys}
        return {
            key: (low * self.own(key), high * self.own(key))
            for key, (low, high) in factors.items()
            if self.has(key)
        }

    def has(self, key: str) -> bool:
        """Return True unless a key is one of other shapes than its policy's."""
        if not key.startswith(SHAPE):
            return True
        try:
            return value_at(self.recipe.model_dump(mode="json"), key) is not None
        except LookupError:
            return False

    def own(self, key: str) -> float:
        """Return the recipe's own value; raise RecipeError unless it is a number above 0."""
        try:
            value = value_at(self.recipe.model_dump(mode="json"), key)
        except LookupError:
            raise RecipeError(f"search.keys.{key}: the recipe has no such key") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise RecipeError(
                f"search.keys.{key}: the recipe has {clip(json.dumps(value), LONGEST_NAME)} there, "
                "expected a number above 0 to search around"
            )
        if isinstance(value, int) and not key.startswith("schedule."):
            # Such as a batch, which not every number of workers or span divides.
            raise RecipeError(
                f"search.keys.{key}: the recipe has the whole number {value} there, and these are "
                "searched in the schedule only; compare some values of it as settings"
            )
        return float(value)

    def at(self, values: Values, *, scale: float = 1.0) -> Recipe:
        """Return the recipe with these values, its rate times `scale`.

        All rates of the schedule scale with the peak; a whole number stays one.
        """
        tree = self.recipe.model_dump(mode="json")
        for key, value in values.items():
            if key != RATE:
                *words, last = key.split(".")
                section = value_at(tree, ".".join(words))
                place = int(last) if isinstance(section, list) else last
                is_whole = isinstance(section[place], int)
                section[place] = max(1, round(value)) if is_whole else value
        recipe = validate_tree(Recipe, tree, source=self.name)
        peak = self.recipe.schedule.peak_lr
        return scaled(recipe, values.get(RATE, peak) * scale / peak)

    def recipe_of(self, slot: Slot, values: Values) -> Recipe:
        """Return the recipe of a run with these values of the searched keys.

        A trial is evaluated on held-out training images. Its schedule has the same shape, although
        epochs without these images have fewer updates.
        """
        recipe = self.at(values, scale=slot.scale)
        if not slot.trial:
            return recipe.model_copy(update={"seed": slot.seed})
        assert self.search is not None
        left = recipe.train_samples - self.search.held_out
        share = left / recipe.train_samples  # of the updates in an epoch
        # If epochs are fixed, a run without these images has fewer updates, and its lengths in
        # steps become shorter too; if steps are fixed, it has more epochs.
        lengths = (1.0, share) if recipe.duration.epochs is not None else (1 / share, 1.0)
        tree = shortened(recipe, lengths[0], steps=lengths[1]).model_dump(mode="json")
        tree["seed"] = slot.seed
        tree["data"]["held_out"] = {"samples": self.search.held_out}
        for section in ((tree["polish"] or {}).get("statistics"), tree["optimizer"]):
            for key in ("samples", "statistics_samples"):
                if section and section.get(key):
                    section[key] = min(section[key], left)
        return validate_tree(Recipe, tree, source=self.name)

    def check(self) -> None:
        """Raise LargebatchError if a run of the cell cannot be made, at any ends of the search."""
        # Before hours of runs: what a search may draw must be valid, in every combination.
        ends = [[(key, end) for end in bounds] for key, bounds in self.ranges.items()]
        kinds = {(slot.trial > 0, slot.scale): slot for slot in self.slots}
        for slot in kinds.values():
            # One key at its lowest and another at its highest value may not fit each other.
            for values in ({}, *map(dict, product(*ends))):
                try:
                    recipe = self.recipe_of(slot, values)
                    plan = make_plan(recipe, workers=self.setting.workers)
                    build_schedule(recipe.schedule, plan)
                except LargebatchError as error:
                    shown = ", ".join(f"{key} {value:g}" for key, value in values.items())
                    raise RecipeError(f"with {shown}: {error}" if shown else str(error)) from None

    def values(self, trials: list[Json], slot: Slot) -> Values:
        """Return the values of the searched keys in a run: drawn for a trial, else those found.

        The first trials have the recipe's own values, and fixed multiples of its rate.
        """
        if self.search is None:
            return {}
        results = [read_result(record, source=self.name) for record in trials]
        if not slot.trial:
            return chosen_values(results, held_out=self.search.held_out)
        ranges = self.ranges
        own = {key: min(max(self.own(key), low), high) for key, (low, high) in ranges.items()}
        low, high = ranges[RATE]
        rates = [rounded(self.own(RATE) * factor) for factor in FIRST_FACTORS]
        first = [rate for rate in rates if low <= rate <= high]
        if slot.trial <= len(first):
            return {**own, RATE: first[slot.trial - 1]}
        return drawn_values(results, ranges, number=slot.trial)

    def carry_out(self, slot: Slot, values: Values, options: Options) -> Json:
        """Train one run in its folder, or resume there."""
        options = replace(options, workers=self.setting.workers)
        if self.setting.backend != "auto":
            options = replace(options, backend=self.setting.backend)
        recipe = self.recipe_of(slot, values)
        if recipe.tracking.trackers:
            filed = recipe.tracking.model_copy(update={"name": f"{self.name}/{slot.name}"})
            recipe = recipe.model_copy(update={"tracking": filed})
        return {**train(recipe, options), "values": dict(values), "scale": slot.scale}

    @property
    def probe(self) -> "TrainedCell":
        """The cell with few updates; all policies of a recipe have the same one."""
        recipe = of_few_updates(self.recipe)
        return replace(self, variant="probe", recipe=recipe, search=None, scaled_seeds=0)

    def seconds_of(self, probed: Json) -> float:
        """Return the seconds of a run: the start, the updates and the evaluations."""
        plan = make_plan(self.recipe, workers=self.setting.workers)
        usage = probed["usage"]
        measured = probed["evaluations"][-1]["seconds"] if probed["evaluations"] else math.nan
        evaluation = max(0.0, measured - usage["train_seconds"])
        start = max(0.0, probed["ended"] - probed["begun"] - measured)
        evaluations = len({*plan.evaluate_after, plan.steps})
        seconds = start + plan.updates * usage["update_seconds"] + evaluations * evaluation
        return float(seconds)


def value_at(tree: Any, key: str) -> Any:  # noqa: ANN401 -- any JSON
    """Return the value at a dotted key of a recipe as JSON; a number is a place of a list.

    Raises LookupError without it.
    """
    for word in key.split("."):
        if isinstance(tree, list) and word.isdecimal():
            tree = dict(enumerate(tree))[int(word)]
        elif not isinstance(tree, dict) or word not in tree:
            raise LookupError(key)
        else:
            tree = tree[word]
    return tree


def rounded(value: float) -> float:
    """Return a value with the four digits that recipes have.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def drawn_values(
    trials: Sequence[TrainedRecord], ranges: Mapping[str, tuple[float, float]], *, number: int
) -> dict[str, float]:
    """Return the values of trial `number`, counted from 1, by Optuna's Gaussian process.

    With so few trials it comes closer than TPE to the maximum of a noisy bell over the logarithm
    of the rate; started after three trials, it spends the next ones at the ends of the range.
    The first trials vary the rate alone, so two trials are drawn at random for each further key
    before: of a key that never varied the process has nothing to learn from, and leaves it.
    The seed differs between trials, so that no two processes draw the same.
    """
    require_optuna()
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = TRIAL_SEED + number - 1
    startup = len(FIRST_FACTORS) + 2 * (len(ranges) - 1)
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=startup)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    inside: dict[str, BaseDistribution] = {
        key: FloatDistribution(low, high, log=True) for key, (low, high) in ranges.items()
    }
    for trial in trials:
        params = {
            # Trials of an earlier range may be outside of this one, which Optuna refuses.
            key: min(max(trial.values.get(key, low), low), high)
            for key, (low, high) in ranges.items()
        }
        past = optuna.trial.create_trial(value=trial.top1, params=params, distributions=inside)
        study.add_trial(past)
    drawn = study.ask(inside).params
    return {key: rounded(drawn[key]) for key in ranges}


def chosen_values(trials: Sequence[TrainedRecord], *, held_out: int) -> Values:
    """Return the values of the lowest rate whose trial is as good as the best one.

    That is within the standard error of its accuracy on the held-out images (Breiman et al.
    1984, the one-standard-error rule): the best of a few trials of one seed is often close to
    divergence. Of trials at one rate the most accurate counts.
    """
    best = max(trial.top1 for trial in trials)
    # The standard error of a fraction of these images that are right.
    least = best - math.sqrt(best * (1 - best) / held_out)
    good = [trial for trial in trials if trial.top1 >= least]
    return min(good, key=lambda trial: (trial.rate or 0.0, -trial.top1)).values


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
                    scaled_seeds=study.robustness_seeds, scales=study.robustness_scales,
                )  # fmt: skip
                cell.check()
            cells.append(cell)
    for key in study.search.keys if study.search else ():
        if cells and not any(cell.has(key) for cell in cells):
            raise RecipeError(f"search.keys.{key}: no policy of the study has this key")
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
    # From its log, as for any finished run, so the record needs nothing of this process.
    read = read_run(folder)
    if diverged is None and has_diverged(read):
        diverged = "the validation loss at the end is not finite"
    done, last = (read.summary, read.result) if diverged is None else (None, None)
    assert diverged is not None or last is not None
    record = {
        "top1": last.top1 if last else 1 / recipe.data.classes,
        "top5": last.top5 if last else min(1.0, 5 / recipe.data.classes),
        "loss": last and last.loss,
        "average_confidence": last and last.average_confidence,
        "confidence_deviation": last and last.confidence_deviation,
        "class_confidence_deviation": last and last.class_confidence_deviation,
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

    `train_seconds` are those of the updates, `update_seconds` the median of all but the first. The
    rest needs monitor: system, and is measured from the set-up of a worker to the last update, with
    evaluations: `cpu_seconds`, core-seconds of all workers; `cores`, the mean number of busy ones;
    `peak_memory_bytes`, resident, summed over the workers; `read_bytes`, those read from disks (NaN
    in logs without them); `gpu_percent`, the mean over the workers; `gpu_memory_bytes`, the peak of
    any worker.
    """
    steps = [step.step_seconds for step in read.steps]
    used = {"train_seconds": math.fsum(steps)}
    if steps:
        # The first update has the start of the input, and the compilation of kernels.
        used["update_seconds"] = float(np.median(steps[1:] or steps))
    if not read.system or not all(one.seconds for one in read.system):
        return used

    def table(name: str) -> FloatArray:  # a row per record, a column per worker
        return np.array([getattr(record, name) for record in read.system], dtype=np.float64)

    seconds = table("seconds")
    reads = table("read_bytes")
    cpu_seconds = float((table("cpu_percent") / 100 * seconds).sum())
    return {
        **used,
        "cpu_seconds": cpu_seconds,
        "cores": cpu_seconds / float(seconds.mean(axis=1).sum()),
        # The peak of each worker, although they need not be at the same time: at most this much is
        # needed.
        "peak_memory_bytes": float(table("peak_memory_bytes").max(axis=0).sum()),
        "gpu_percent": float((table("gpu_percent") * seconds).sum() / seconds.sum()),
        "gpu_memory_bytes": float(table("gpu_memory_bytes").max()),
        "read_bytes": float(reads.sum()) if reads.size else math.nan,
    }


@dataclass(frozen=True, kw_only=True)
class CellResults:
    """The runs of a cell of a study of policies or settings."""

    cell: TrainedCell
    trials: tuple[TrainedRecord, ...] = ()
    seeds: tuple[TrainedRecord, ...] = ()
    """Runs at the rate found, by seed."""

    scaled: tuple[TrainedRecord, ...] = ()
    """Runs at multiples of the rate found."""

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

    def mean(self, value: Callable[[TrainedRecord], float | None]) -> Interval | None:
        """Return the mean of a value over the seeds that have it; None if none has."""
        known = [
            number
            for number in map(value, self.seeds)
            if number is not None and math.isfinite(number)
        ]
        return interval(known) if known else None

    @property
    def top1(self) -> Interval | None:
        """Mean accuracy over seeds; a run that diverged counts as chance."""
        return self.mean(lambda run: run.top1)

    @property
    def robustness(self) -> Robustness | None:
        """Accuracy over the seeds that ran at every multiple of the rate; None without one."""
        return robustness((run.seed, run.scale, run.top1) for run in (*self.seeds, *self.scaled))

    @property
    def diverged(self) -> int:
        """Number of seeds that diverged."""
        return sum(run.diverged is not None for run in self.seeds)

    @property
    def edge(self) -> str | None:
        """`lowest` or `highest` if the rate found is an end of those tried; else None."""
        tried = [trial.rate for trial in self.trials if trial.rate is not None]
        if self.rate is None or len(set(tried)) < 2:
            return None
        return {min(tried): "lowest", max(tried): "highest"}.get(self.rate)


def results_of(cell: TrainedCell, records: Mapping[str, Json]) -> CellResults:
    """Return the results of a cell from its records by the names of runs."""
    results = {
        slot: read_result(records[slot.name], source=f"{cell.name}/{slot.name}.json")
        for slot in cell.slots
        if slot.name in records
    }
    return CellResults(
        cell=cell,
        trials=tuple(result for slot, result in results.items() if slot.trial),
        seeds=tuple(
            result for slot, result in results.items() if not slot.trial and slot.scale == 1
        ),
        scaled=tuple(result for slot, result in results.items() if slot.scale != 1),
        finished=len(results) == len(cell.slots),
    )
