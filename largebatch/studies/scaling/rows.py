"""What a study of scaling has found: tables against the ideal, rates, and the planner."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from largebatch.studies.hosts.starts import Found, Start, read_by_cell
from largebatch.studies.metrics import Interval, interval, ratio
from largebatch.studies.scaling.study import SCALINGS, Cell, Scaling, ScalingStudy, samples_of


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table: a cell as a case of weak or of strong scaling."""

    scaling: Scaling
    cell: Cell
    found: Mapping[int, Found]
    alone: Mapping[int, Found]
    """Row of one worker with its samples of this scaling."""

    @property
    def throughput(self) -> Interval:
        """Samples a second of all workers."""
        samples = self.cell.workers * self.cell.samples
        return interval(self._throughputs(self.found, samples).values())

    @property
    def ideal(self) -> float | None:
        """Samples a second: as many times one worker as there are workers; None without one."""
        if not self.alone:
            return None
        return self.cell.workers * fmean(
            self._throughputs(self.alone, self._samples_alone).values()
        )

    @property
    def speed_up(self) -> Interval | None:
        """How many times the throughput of one worker alone, over the pairs of a seed."""
        alone = self._throughputs(self.alone, self._samples_alone)
        return ratio(
            self._throughputs(self.found, self.cell.workers * self.cell.samples), alone
        ).interval

    @property
    def efficiency(self) -> float | None:
        """The speed-up over the workers; 1 is ideal."""
        found = self.speed_up
        return None if found is None else found.mean / self.cell.workers

    @property
    def seconds(self) -> Interval:
        """Seconds of an update."""
        return interval(fmean(found.seconds) for found in self.found.values())

    @property
    def predicted(self) -> float | None:
        """The planner's seconds of an update, from one worker alone; None without one."""
        if not self.alone:
            return None
        compute = self.cell.trained.compute
        gradient = (
            compute.overhead + compute.sample * self._samples_alone
        ) * compute.factor.expectation
        alone = fmean(fmean(found.seconds) for found in self.alone.values())
        model_bytes = sum(next(iter(self.found.values())).shards)
        return self.cell.predicted(model_bytes=model_bytes, update=max(0.0, alone - gradient))

    @staticmethod
    def _throughputs(starts: Mapping[int, Found], samples: int) -> dict[int, float]:
        return {seed: samples / fmean(found.seconds) for seed, found in starts.items()}

    @property
    def _samples_alone(self) -> int:
        """Number of samples of one worker in this scaling."""
        mini_batch = self.cell.trained.mini_batch
        return samples_of(self.scaling, 1, study=self.cell.study, mini_batch=mini_batch)


def rows_of(study: ScalingStudy, cells: Sequence[Cell], starts: Sequence[Start]) -> list[Row]:
    """Return the tables' lines that have a record, weak scaling first, by recipe and workers."""
    by_cell = read_by_cell(starts)
    rows = []
    for scaling in SCALINGS:
        for cell in sorted(cells, key=lambda cell: (cell.configuration, cell.workers)):
            mini_batch = cell.trained.mini_batch
            if cell.samples == samples_of(
                scaling, cell.workers, study=study, mini_batch=mini_batch
            ) and (own := by_cell.get(cell.name)):
                one = samples_of(scaling, 1, study=study, mini_batch=mini_batch)
                alone = by_cell.get(f"{cell.configuration}-1x{one}-one-host", {})
                rows.append(Row(scaling, cell, own, alone))
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
    for row in rows:
        pair = [other for other in rows if _is_the_other_place(row, other)]
        if row.cell.place == "hosts" and pair and row.efficiency and pair[0].efficiency:
            yield (
                f"{row.cell.configuration}, {row.scaling}, {row.cell.workers} workers: "
                f"{pair[0].efficiency:.0%} of the ideal in one host, {row.efficiency:.0%} on hosts."
            )
    unequal = {
        f"{row.cell.name} seed {seed}": words
        for row in rows
        for seed, found in row.found.items()
        if (words := unequal_rates(found))
    }
    updates = {
        (row.cell.name, seed): found
        for row in rows
        for seed, found in row.found.items()
        if len(found.rates) > 1
    }
    made = sum(len(found.rates[0]) for found in updates.values())
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


def _is_the_other_place(one: Row, other: Row) -> bool:
    return (one.scaling, one.cell.configuration, one.cell.workers) == (
        *(other.scaling, other.cell.configuration, other.cell.workers),
    ) and one.cell.place != other.cell.place
