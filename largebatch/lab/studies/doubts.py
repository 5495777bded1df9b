"""What speaks against a finding: one list of doubts for all kinds of studies.

A study concludes nothing from runs that are single, unfinished or disturbed. Each kind states its
findings as `Finding`, with the doubts of `doubts_about` and those that only this kind can have,
such as a difference within the noise of seeds. A finding with a doubt is printed as the doubt; the
numbers stay in the table.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from largebatch.errors import shorten
from largebatch.formatting import plural
from largebatch.lab.studies.records import StudyRecord
from largebatch.report.run import short_commit
from largebatch.report.seeds import ENOUGH_SEEDS

LATE = 0.05
"""Largest fraction of late gradients at which times are still judged."""

OTHER_CORES = 0.25
"""Cores that other programs may use at most: what a desktop and its daemons use when idle."""

OTHER_SHARE = 0.05
"""Fraction of the cores of a run that they may use if that is more than OTHER_CORES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFinding:
    """A conclusion of a study, and what speaks against it."""

    about: str
    """What was compared, and by what: `lenet5 on 2 workers, beside against central`."""

    text: str
    """The conclusion."""

    doubts: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the conclusion as a sentence; with a doubt, the doubt in its place."""
        if self.doubts:
            return f"{self.about}: not concluded: {'; '.join(self.doubts)}."
        return f"{self.about}: {self.text}."


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuns:
    """The runs of one cell that a finding rests on."""

    name: str
    """As the finding names it."""

    runs: Mapping[int, StudyRecord]
    """By seed."""

    seeds: int
    """Number of seeds that the study has."""

    finished: bool = True
    """False if a run of its search is missing."""


def doubts_about(
    cells: Sequence[CellRuns],
    *,
    others: Sequence[CellRuns] = (),
    study: Iterable[StudyRecord],
    of_time: bool,
    run: str = "seed",
) -> list[str]:
    """Return what speaks against a finding about these cells, in the order of its weight.

    `others` are cells that it ranks below these. `study` has all records, for runs that overlap.
    `of_time`: the finding is about times, which also need a quiet machine. `run` is what a run is
    called: seed or start.
    """
    runs = [record for cell in (*cells, *others) for record in cell.runs.values()]
    doubts = []
    unfinished = [
        cell.name for cell in (*cells, *others) if not cell.finished or len(cell.runs) < cell.seeds
    ]
    if unfinished:
        doubts.append(f"not finished: {shorten(unfinished)}")
    # Cells are compared in pairs of seeds, so only the seeds of all of them count.
    common = set.intersection(*(set(cell.runs) for cell in cells)) if cells else set()
    if len(common) < ENOUGH_SEEDS:
        doubts.append(f"too few {run}s to judge: {len(common)}, and {ENOUGH_SEEDS} are needed")
    for cell in cells:
        diverged = sum(record.diverged is not None for record in cell.runs.values())
        if diverged:
            doubts.append(f"{diverged} of {plural(len(cell.runs), run)} of {cell.name} diverged")
    commits = sorted({short_commit(record.commit) for record in runs})
    if len(commits) > 1:
        doubts.append(f"made by several commits: {shorten(commits)}")
    return [*doubts, *_disturbances(runs, study)] if of_time else doubts


def _disturbances(runs: Sequence[StudyRecord], study: Iterable[StudyRecord]) -> list[str]:
    """Return what disturbed the times of runs."""
    doubts = []
    machines = sorted({f"{record.host} ({record.hardware})" for record in runs})
    if len(machines) > 1:
        doubts.append(f"measured on several machines: {shorten(machines)}")
    overlapping = number_overlapping(runs, study)
    if overlapping:
        doubts.append(
            f"{overlapping} of {plural(len(runs), 'run')} overlapped with others on the same "
            "machine"
        )
    others = [record.other_cores for record in runs]
    if any(map(math.isnan, others)):
        doubts.append("what other programs used was not measured")
    # The strictest of the runs: one disturbed run is enough to move a mean.
    allowed = min(
        (max(OTHER_CORES, OTHER_SHARE * record.cores) for record in runs), default=OTHER_CORES
    )
    busiest = max(runs, key=lambda record: record.other_cores, default=None)
    if busiest is not None and busiest.other_cores > allowed:
        doubts.append(
            f"too busy to judge: other programs used up to {busiest.other_cores:.1f} of "
            f"{plural(busiest.cores, 'core')}"
        )
    late = max((record.late for record in runs), default=0.0)
    if late > LATE:
        doubts.append(f"too busy to judge: up to {100 * late:.1f} % of gradients were late")
    return doubts


def in_no_order(best: str, level: Sequence[str], *, between: str = ", ") -> list[str]:
    """Return the doubt about a best variant that others are level with; empty without them."""
    if not level:
        return []
    names = shorten([best, *level], between=between)
    return [f"within the noise of each other, so in no order: {names}"]


def number_overlapping(runs: Sequence[StudyRecord], study: Iterable[StudyRecord]) -> int:
    """Return the number of runs during which another run of the study was on their machine."""
    every = list(study)
    return sum(
        any(
            other != record  # of two cells that share a run, both have it
            and other.host == record.host
            and other.begun < record.ended
            and record.begun < other.ended
            for other in every
        )
        for record in runs
    )
