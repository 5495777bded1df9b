"""Results of a study of scaling: tables against the ideal, learning rates, and the planner."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from largebatch.lab.studies.hosts import starts
from largebatch.lab.studies.hosts.starts import Found, Start, read_by_cell
from largebatch.lab.studies.scaling.study import SCALINGS, Cell, Scaling, ScalingStudy, samples_of


@dataclass(frozen=True, slots=True)
class Row(starts.Row):
    """A cell as a case of weak or of strong scaling; its work is counted in samples."""

    cell: Cell
    scaling: Scaling

    @property
    def ideal(self) -> float | None:
        """Samples per second of one worker times the number of workers; None without one."""
        return self.cell.workers * fmean(self.throughputs_alone.values()) if self.alone else None

    @property
    def predicted(self) -> float | None:
        """The planner's seconds of an update, from one worker alone; None without one."""
        if not self.alone:
            return None
        alone = fmean(fmean(found.seconds) for found in self.alone.values())
        update = max(0.0, alone - self.cell.trained.compute.mean(self.work_alone))
        return self.cell.predicted(model_bytes=self.model_bytes, update=update)


def rows_of(study: ScalingStudy, cells: Sequence[Cell], begun: Sequence[Start]) -> list[Row]:
    """Return the tables' lines that have a record, weak scaling first, by recipe and workers."""
    by_cell = read_by_cell(begun)
    rows = []
    for scaling in SCALINGS:
        for cell in sorted(cells, key=lambda cell: (cell.configuration, cell.workers)):
            mini_batch = cell.trained.mini_batch
            if cell.samples == samples_of(
                scaling, cell.workers, study=study, mini_batch=mini_batch
            ) and (own := by_cell.get(cell.name)):
                one = samples_of(scaling, 1, study=study, mini_batch=mini_batch)
                alone = by_cell.get(f"{cell.configuration}-1x{one}-one-host", {})
                rows.append(Row(cell, own, alone, cell.workers * cell.samples, one, scaling))
    return rows


def unequal_rates(found: Found) -> str:
    """Return where the learning rates of workers first differ, in words, or nothing.

    They are compared bit for bit. A rate that arrives late on one worker (Dell EMC 2019, figure
    42) is one that differs.
    """
    first, *others = found.rates
    for worker, rates in enumerate(others, start=1):
        if len(rates) != len(first):
            return f"worker {worker} made {len(rates)} updates and worker 0 {len(first)}"
        for update, (own, other) in enumerate(zip(first, rates, strict=True)):
            if own != other:
                return f"in update {update} worker 0 has {own} and worker {worker} {other}"
    return ""


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield in words how places compare, whether rates were equal, and how the planner does."""
    places = {(_point(row), row.cell.place): row.efficiency for row in rows}
    for row in rows:
        inside = places.get((_point(row), "one-host"))
        if row.cell.place == "hosts" and inside and row.efficiency:
            yield (
                f"{row.cell.configuration}, {row.scaling}, {row.cell.workers} workers: "
                f"{inside.mean:.0f}% of the ideal in one host, "
                f"{row.efficiency.mean:.0f}% on hosts."
            )
    every = {
        f"{row.cell.name} seed {seed}": found for row in rows for seed, found in row.found.items()
    }
    unequal = {name: words for name, found in every.items() if (words := unequal_rates(found))}
    updates = [len(found.rates[0]) for found in every.values() if len(found.rates) > 1]
    made = sum(updates)
    if unequal:
        yield from (f"RATES DIFFER: {name}: {words}." for name, words in unequal.items())
    elif made:
        yield (
            f"Every worker applied the same learning rate, bit for bit, in each of {made:,} "
            f"updates of {len(updates)} starts of several workers."
        )
    ratios = [
        row.predicted / row.seconds.mean for row in rows if row.cell.workers > 1 and row.predicted
    ]
    if ratios:
        yield (
            f"The planner's time of an update is {min(ratios):.2f} to {max(ratios):.2f} times the "
            f"measured one over {len(ratios)} cells of several workers."
        )


def _point(row: Row) -> tuple[Scaling, str, int]:
    return row.scaling, row.cell.configuration, row.cell.workers
