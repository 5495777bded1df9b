"""Phases of a study: the runs of each cell, which are done, and their results.

Everything is read from the storage, so that every process sees the same.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.lab.studies.queue.cells import Cell, Values
from largebatch.lab.studies.queue.database import Queue, Slot, require_kind
from largebatch.lab.studies.queue.results import Result, read_result
from largebatch.lab.studies.queue.study import RATE, AnyStudy, Search, Study
from largebatch.lab.studies.queue.trial import Machine
from largebatch.recipe.arithmetic.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

FIRST_FACTORS = (1.0, 0.4, 2.5, 0.16, 6.25)
"""Multiples of the recipe's own rate that the first trials of every search have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A study with its cells and machine; the same in all processes."""

    study: AnyStudy
    cells: tuple[Cell, ...]
    out: Path
    """Folder of the run folders."""

    machine: Machine

    @property
    def num_runs(self) -> int:
        """Number of trials and seeds in all cells."""
        trials = self.study.search.trials if self.study.search else 0
        return len(self.cells) * (trials + len(seed_slots(self.study)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The search or the seeds of a cell: a queue of runs."""

    cell: Cell
    queue: Queue
    updates: int
    """Number of updates of one run."""

    values: Values | None = None
    """Best values, for the seeds; None for a search."""

    @property
    def is_search(self) -> bool:
        """True if its trials are evaluated on held-out images."""
        return self.values is None

    def results(self) -> dict[str, Result]:
        """Return the results of finished slots; raise StudyError if one is damaged."""
        name, done = self.queue.name, self.queue.done()
        return {slot: read_result(name, trial) for slot, trial in done.items()}


class Progress:
    """Phases of a study that can start: seeds follow the search of their cell.

    Raises StudyError if the storage holds a study of the same name and of the other kind.
    """

    def __init__(self, bench: Bench, storage: "BaseStorage") -> None:
        require_kind(storage, bench.study.name, bench.study.kind)
        self.bench, self._storage = bench, storage
        self._searches: dict[str, Phase] = {}
        self._seeds: dict[str, Phase] = {}

    def phases(self) -> list[Phase]:
        """Return the phases cell by cell; open new ones in the storage."""
        phases = []
        for cell in self.bench.cells:
            if cell.search is not None and cell.name not in self._searches:
                self._searches[cell.name] = self._open_search(cell)
            search = self._searches.get(cell.name)
            if cell.name not in self._seeds and (search is None or search.queue.is_done):
                values = chosen_values(search) if search else {}
                self._seeds[cell.name] = self._open_seeds(cell, values)
            phases += [phase for phase in (search, self._seeds.get(cell.name)) if phase is not None]
        return phases

    @property
    def is_done(self) -> bool:
        """True if every run of the study has its result."""
        phases = self.phases()  # opens the seeds that can start
        all_open = len(self._seeds) == len(self.bench.cells)
        return all_open and all(phase.queue.is_done for phase in phases)

    @property
    def num_done(self) -> int:
        """Number of runs with a result."""
        return sum(len(phase.queue.done()) for phase in self.phases())

    def remaining_seconds(self) -> float | None:
        """Estimate the seconds of the remaining runs from the finished ones.

        By the seconds per update of the same configuration, or of the same cell in a study of
        settings, divided by the number of active processes, this one included; None before each
        has a run.
        """
        left = {self._pace(cell): 0 for cell in self.bench.cells}
        seconds, updates, at_work = dict.fromkeys(left, 0.0), dict.fromkeys(left, 0), 1
        for phase in self.phases():
            name, done = self._pace(phase.cell), phase.queue.done()
            left[name] += phase.updates * (len(phase.queue.slots) - len(done))
            running = (one.state.name == "RUNNING" for one in phase.queue.trials().values())
            at_work += sum(running)
            for one in phase.results().values():
                seconds[name] += self._seconds(one)
                updates[name] += one.updates if math.isfinite(one.seconds) else 0
        for cell in self.bench.cells:
            if cell.name not in self._seeds:
                left[self._pace(cell)] += cell.plan.updates * len(seed_slots(self.bench.study))
        unfinished = [name for name in left if left[name]]
        if not all(updates[name] for name in unfinished):
            return None
        return sum(left[name] * seconds[name] / updates[name] for name in unfinished) / at_work

    def _seconds(self, result: Result) -> float:
        """Return the seconds of a run, with the start-up of its own process."""
        taken = [result.seconds]
        if not isinstance(self.bench.study, Study):
            taken.append(result.ended - result.begun)
        return max(filter(math.isfinite, taken), default=0.0)

    def _pace(self, cell: Cell) -> str:
        """Return the name shared by cells with the same time per update."""
        return cell.configuration if isinstance(self.bench.study, Study) else cell.name

    def _open_search(self, cell: Cell) -> Phase:
        study = self.bench.study
        assert study.search is not None
        slots = [
            Slot(name=f"search-{number:03}", fixed=fixed)
            for number, fixed in enumerate(first_values(cell), start=1)
        ]
        definition = {**_define(study, cell), "search": study.search.model_dump(mode="json")}
        name = f"{study.name}/{cell.name}/search"
        queue = Queue(self._storage, name, definition, slots, sampler=_sampler(study.search))
        return Phase(cell=cell, queue=queue, updates=trial_updates(cell))

    def _open_seeds(self, cell: Cell, values: Values) -> Phase:
        study = self.bench.study
        definition = {**_define(study, cell), "values": dict(values)}
        slots = seed_slots(study)
        queue = Queue(self._storage, f"{study.name}/{cell.name}/seeds", definition, slots)
        return Phase(cell=cell, queue=queue, updates=cell.plan.updates, values=values)


def _sampler(search: Search) -> "Callable[[int], BaseSampler]":
    """Return a function that makes the sampler of a trial: a Gaussian process.

    With so few trials it comes closer than TPE to the maximum of a noisy bell over the logarithm
    of the rate; started after three trials, it spends the next ones at the ends of the range.
    The seed differs between trials, so that no two processes draw the same.
    """
    from optuna.samplers import GPSampler

    first = len(FIRST_FACTORS)
    return lambda number: GPSampler(seed=(search.seed + number) % 2**32, n_startup_trials=first)


def _define(study: AnyStudy, cell: Cell) -> dict[str, object]:
    """Return the definition of a cell, which identifies it in the database.

    The machine is part of a setting, but not of the definition of a policy.
    """
    names = {"study": study.name, "configuration": cell.configuration, study.kind: cell.variant}
    if isinstance(study, Study):
        return {**names, "recipe": cell.recipe.mathematics.model_dump(mode="json")}
    machine: dict[str, object] = {
        "workers": cell.workers, "backend": cell.backend, "threads": cell.threads,
    }  # fmt: skip
    if cell.environment:  # databases of older versions have none
        machine["environment"] = dict(cell.environment)
    return {**names, "recipe": cell.recipe.model_dump(mode="json"), "machine": machine}


def trial_updates(cell: Cell) -> int:
    """Return the updates of a trial in the search of a cell, unless it is stopped early."""
    return make_plan(cell.trial_recipe({}), workers=cell.workers).updates


def first_values(cell: Cell) -> list[dict[str, float]]:
    """Return the fixed values of the first trials of a search.

    The rate varies first, or the first key if the rate is not searched; the others stay.
    """
    ranges = cell.ranges
    centre = {key: min(max(cell.own(key), low), high) for key, (low, high) in ranges.items()}
    varied = RATE if RATE in ranges else next(iter(ranges))
    low, high = ranges[varied]
    rates = {rounded(rate): rate for rate in (centre[varied] * each for each in FIRST_FACTORS)}
    inside = [rate for rate in rates.values() if low <= rate <= high]
    assert cell.search is not None
    fixed = [{**centre, varied: rate} for rate in inside][: cell.search.trials]
    return [*fixed, *({} for _ in range(cell.search.trials - len(fixed)))]


def seed_slots(study: AnyStudy) -> list[Slot]:
    """Return the runs at the best rate, then those at multiples of it."""
    slots = [
        Slot(name=f"seed-{seed}", about={"seed": seed, "scale": 1.0})
        for seed in range(1, study.seeds + 1)
    ]
    if isinstance(study, Study):
        slots += [
            Slot(name=f"seed-{seed}-rate-x{scale:g}", about={"seed": seed, "scale": scale})
            for seed in range(1, study.robustness_seeds + 1)
            for scale in study.robustness_scales
        ]
    return slots


def rounded(value: float) -> float:
    """Round a value to four digits, as recipes have them.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def chosen_values(search: Phase) -> Values:
    """Return the values of the lowest rate whose trial is as good as the best one.

    That is within the standard error of its accuracy on the held-out images (Breiman et al.
    1984, the one-standard-error rule): the best of a few trials of one seed is often close to
    divergence. Of trials at one rate the most accurate counts, then the one with the lowest
    loss.
    """
    settings = search.cell.search
    assert settings is not None
    whole = [result for result in search.results().values() if result.pruned_after is None]
    best = max(settings.value_of(result) for result in whole)
    least = best - math.sqrt(best * (1 - best) / settings.held_out)

    def merit(result: Result) -> tuple[float, float, float]:
        loss = result.loss if math.isfinite(result.loss) else math.inf
        return -result.values.get(RATE, 0.0), settings.value_of(result), -loss

    return max((result for result in whole if settings.value_of(result) >= least), key=merit).values
