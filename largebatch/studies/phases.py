"""The phases of a study: what runs each cell has, which are done, and what they have found.

All of it is read from the storage, so that every process sees the same.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.recipe.plan import make_plan
from largebatch.studies.cells import Cell, Values
from largebatch.studies.database import Queue, Slot
from largebatch.studies.study import RATE, SCALES, Study
from largebatch.studies.trial import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

FIRST_FACTORS = (1.0, 0.4, 2.5)
"""The first trials of every search have the recipe's own rate times these, within the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a study is carried out with; the same in all of its processes."""

    study: Study
    cells: tuple[Cell, ...]
    out: Path
    """The folder that holds the run folders."""

    machine: Machine

    @property
    def num_runs(self) -> int:
        """Trials and seeds of all cells."""
        return len(self.cells) * (self.study.search.trials + len(seed_slots(self.study)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The search of a cell, or its seeds: a queue of runs."""

    cell: Cell
    queue: Queue
    updates: int
    """Of one run."""

    values: Values | None = None
    """What was found, for the seeds; None: this is the search."""

    @property
    def is_search(self) -> bool:
        """Whether its trials are judged on images held out."""
        return self.values is None


class Progress:
    """The phases of a study as far as they can begin: seeds follow the search of their cell."""

    def __init__(self, bench: Bench, storage: "BaseStorage") -> None:
        self.bench, self._storage = bench, storage
        self._searches: dict[str, Phase] = {}
        self._seeds: dict[str, Phase] = {}

    def phases(self) -> list[Phase]:
        """Return them cell by cell; opened in the storage where they are new."""
        found = []
        for cell in self.bench.cells:
            if cell.name not in self._searches:
                self._searches[cell.name] = self._open_search(cell)
            search = self._searches[cell.name]
            found.append(search)
            if cell.name not in self._seeds and search.queue.is_done:
                self._seeds[cell.name] = self._open_seeds(cell, best_values(search.queue))
            if cell.name in self._seeds:
                found.append(self._seeds[cell.name])
        return found

    @property
    def is_done(self) -> bool:
        """Whether every run of the study has its result."""
        phases = self.phases()
        return len(phases) == 2 * len(self.bench.cells) and all(one.queue.is_done for one in phases)

    @property
    def num_done(self) -> int:
        """How many runs have their result."""
        return sum(len(phase.queue.done()) for phase in self.phases())

    def remaining_seconds(self) -> float | None:
        """Return how long the runs that are left take, by what those that are done took.

        At the seconds an update of their configuration, over as many processes as are at work, this
        one among them; None before each configuration has a run.
        """
        left = dict.fromkeys(self.bench.study.recipes, 0)
        seconds, updates, at_work = dict.fromkeys(left, 0.0), dict.fromkeys(left, 0), 1
        for phase in self.phases():
            name, done = phase.cell.configuration, phase.queue.done()
            left[name] += phase.updates * (len(phase.queue.slots) - len(done))
            running = (one.state.name == "RUNNING" for one in phase.queue.trials().values())
            at_work += sum(running)
            for one in phase.queue.results().values():
                seconds[name] += one.get("seconds", 0.0)
                updates[name] += one["updates"] if "seconds" in one else 0
        for cell in self.bench.cells:
            if cell.name not in self._seeds:
                each = make_plan(cell.recipe, workers=1).updates
                left[cell.configuration] += each * len(seed_slots(self.bench.study))
        unfinished = [name for name in left if left[name]]
        if not all(updates[name] for name in unfinished):
            return None
        return sum(left[name] * seconds[name] / updates[name] for name in unfinished) / at_work

    def _open_search(self, cell: Cell) -> Phase:
        study = self.bench.study
        slots = [
            Slot(name=f"search-{number:03}", fixed=fixed)
            for number, fixed in enumerate(first_values(cell), start=1)
        ]
        definition = {**_define(study, cell), "search": study.search.model_dump(mode="json")}
        name = f"{study.name}/{cell.name}/search"
        queue = Queue(self._storage, name, definition, slots, sampler=_sampler(study))
        return Phase(cell=cell, queue=queue, updates=trial_updates(cell))

    def _open_seeds(self, cell: Cell, values: Values) -> Phase:
        study = self.bench.study
        definition = {**_define(study, cell), "values": dict(values)}
        slots = seed_slots(study)
        queue = Queue(self._storage, f"{study.name}/{cell.name}/seeds", definition, slots)
        updates = make_plan(cell.recipe, workers=1).updates
        return Phase(cell=cell, queue=queue, updates=updates, values=values)


def _sampler(study: Study) -> "Callable[[int], BaseSampler]":
    """Return what makes the sampler of a trial: a Gaussian process over the trials so far.

    With so few trials it comes closer to the summit of a noisy bell over the logarithm of the rate
    than TPE does. The seed differs from trial to trial, so that no two processes draw the same.
    """
    from optuna.samplers import GPSampler

    first = len(FIRST_FACTORS)
    return lambda number: GPSampler(
        seed=(study.search.seed + number) % 2**32, n_startup_trials=first
    )


def _define(study: Study, cell: Cell) -> dict[str, object]:
    """Return what identifies the runs of a cell, and what a reader of the database looks for."""
    return {
        "study": study.name,
        "configuration": cell.configuration,
        "policy": cell.policy,
        "recipe": cell.recipe.mathematics.model_dump(mode="json"),
    }


def trial_updates(cell: Cell) -> int:
    """Return how many updates a trial of its search has, if it is not stopped early."""
    return make_plan(cell.trial_recipe({}), workers=1).updates


def first_values(cell: Cell) -> list[dict[str, float]]:
    """Return what every trial of a search begins with: the first ones are fixed, others drawn.

    The rate varies first, or the first key where it is not searched, and the rest stays in place.
    """
    ranges = cell.ranges
    centre = {key: min(max(cell.own(key), low), high) for key, (low, high) in ranges.items()}
    varied = RATE if RATE in ranges else next(iter(ranges))
    low, high = ranges[varied]
    rates = {rounded(rate): rate for rate in (centre[varied] * each for each in FIRST_FACTORS)}
    inside = [rate for rate in rates.values() if low <= rate <= high]
    fixed = [{**centre, varied: rate} for rate in inside][: cell.search.trials]
    return [*fixed, *({} for _ in range(cell.search.trials - len(fixed)))]


def seed_slots(study: Study) -> list[Slot]:
    """Return the runs at the rate found, then those at multiples of it."""
    slots = [
        Slot(name=f"seed-{seed}", about={"seed": seed, "scale": 1.0})
        for seed in range(1, study.seeds + 1)
    ]
    slots += [
        Slot(name=f"seed-{seed}-rate-x{scale:g}", about={"seed": seed, "scale": scale})
        for seed in range(1, study.robustness_seeds + 1)
        for scale in SCALES
        if scale != 1
    ]
    return slots


def rounded(value: float) -> float:
    """Return a value with four digits, as recipes have them.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def best_values(search: Queue) -> Values:
    """Return the values of the best trial; of equal accuracies that of the lower loss."""
    results = search.results()

    def merit(slot: str) -> tuple[float, float]:
        loss = results[slot]["loss"]
        return search.done()[slot].values[0], -math.inf if loss is None else -loss

    whole = [slot for slot, one in results.items() if "pruned_after" not in one]
    values: Values = results[max(whole, key=merit)]["values"]
    return values
