"""Results of a study of servers: a row for each cell, and the answer to its question."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from largebatch.lab.studies.hosts import starts
from largebatch.lab.studies.hosts.starts import Found, Start, read_by_cell
from largebatch.lab.studies.metrics import Interval, ratio
from largebatch.lab.studies.servers.study import ALONE, Cell, Claim
from largebatch.lab.studies.servers.traffic import Traffic

NEAR = 0.05
"""How far counters may be from the formulas, as a part of these."""

LEVEL = 1.1
"""Ratio of speeds up to which two layouts count as level."""

BUSY = 0.05
"""Share of late gradients from which on a machine is too busy to judge by it."""


@dataclass(frozen=True, slots=True)
class Row(starts.Row):
    """A cell; its work is counted in mini-batches."""

    cell: Cell

    def times(self, other: "Row") -> Interval | None:
        """Return how many times as fast as another layout, over the pairs of a seed."""
        return ratio(self.throughputs, other.throughputs).interval

    @property
    def busiest(self) -> int:
        """The host whose link carries most by the formulas, by its place."""
        return max(range(len(self.expected)), key=lambda place: sum(self.expected[place]))

    @property
    def expected(self) -> list[Traffic]:
        """What the formulas have for each host's link."""
        return self.cell.expected(self.first)

    @property
    def measured(self) -> list[Traffic]:
        """What the counters of each host's link have, the mean over the starts."""
        return [
            Traffic(
                fmean([one.received[host] for one in self.found.values()]),
                fmean([one.sent[host] for one in self.found.values()]),
            )
            for host in self.first.sent
        ]

    @property
    def deviation(self) -> float:
        """The largest |measured / formula - 1| over hosts and both directions."""
        pairs = zip(self.measured, self.expected, strict=True)
        ratios = [
            abs(measured / formula - 1)
            for own, by in pairs
            for measured, formula in zip(own, by, strict=True)
            if formula
        ]
        return max(ratios, default=0.0)

    @property
    def late(self) -> float:
        """The share of gradients that took longer than was set."""
        return fmean([one.late for one in self.found.values()])


def rows_of(cells: Sequence[Cell], begun: Sequence[Start]) -> list[Row]:
    """Return the cells that have a record."""
    by_cell = read_by_cell(begun)
    return [
        row_of(cell, by_cell[cell.name], by_cell.get(f"{cell.configuration}-{ALONE}-1", {}))
        for cell in cells
        if cell.name in by_cell
    ]


def row_of(cell: Cell, found: Mapping[int, Found], alone: Mapping[int, Found]) -> Row:
    """Return the row of a cell; each worker has one mini-batch in an update."""
    return Row(cell, found, alone, work=cell.workers, work_alone=1)


def slower(rows: Sequence[Row], how: str) -> Iterator[str]:
    """Yield in words on how many workers each layout is slower than one worker."""
    slow = [
        row
        for row in rows
        if row.cell.workers > 1 and row.speed_up and round(row.speed_up.mean, 2) < 1
    ]
    for recipe in dict.fromkeys(row.cell.configuration for row in slow):
        own = [row for row in slow if row.cell.configuration == recipe]
        layouts = dict.fromkeys(row.cell.layout for row in own)
        listed = (_slow([row for row in own if row.cell.layout == layout]) for layout in layouts)
        yield f"SLOWER THAN ONE WORKER: {recipe}, {how}: {'; '.join(listed)}."


def _slow(rows: Sequence[Row]) -> str:
    """Return a layout with its numbers of workers, and its speed-ups there."""
    means = [row.speed_up.mean for row in rows if row.speed_up]
    ends = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(means), max(means))))
    return (
        f"{rows[0].cell.layout} on {_listed([row.cell.workers for row in rows])} workers ({ends})"
    )


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers in rising order as a range, or one by one if some are missing.

    >>> _listed([2, 3, 4]), _listed([2, 4]), _listed([2])
    ('2 to 4', '2, 4', '2')
    """
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield in words what became of the paper's statements, and how far the formulas are off.

    Jaeger et al. (DIDL 2018) found servers beside the workers faster than central ones for their
    smaller model, and no significant difference for their larger one. One pair of layouts judges a
    model: whole tensors, one central server, and its most workers. Other pairs are only compared.
    """
    for row in rows:
        if row.cell.is_central:
            for other in rows:
                if other.cell.is_beside and _point(row.cell) == _point(other.cell):
                    yield _compared(row, other)
    if rows:
        worst = max(row.deviation for row in rows)
        verdict = "within" if worst <= NEAR else "NOT within"
        yield (
            f"The counters of all links are {verdict} {NEAR:.0%} of the formulas: at most "
            f"{worst:.1%} off."
        )


def _point(cell: Cell) -> tuple[str, int, bool]:
    return cell.configuration, cell.workers, cell.is_split


def _compared(central: Row, beside: Row) -> str:
    """Return how a pair of rows compares, and the verdict on the paper's statement."""
    cell = central.cell
    times = beside.times(central)
    head = (
        f"{cell.configuration} ({central.model_bytes / 1e6:.1f} MB) on {cell.workers} workers, "
        f"{beside.cell.layout} against {cell.layout}"
    )
    if times is None or times.number == 1:
        measured = "" if times is None else f" {times.mean:.2f} times as fast,"
        return f"{head}:{measured} too few starts to judge."
    shown = f"{head}: {times.with_ends('.2f', ' times as fast')}"
    if cell.is_split or len(central.first.shards) > 1 or cell.workers < max(cell.trained.workers):
        return f"{shown}."
    late = max(central.late, beside.late)
    if late > BUSY:
        return f"{shown}; {late:.0%} of gradients were late, so the machine was too busy to judge."
    return f"{shown}; {verdict(cell.trained.paper, times.low, times.high)}."


def verdict(paper: Claim | None, low: float, high: float) -> str:
    """Return the paper's statement on a model, and how a range of ratios bears it out, in words.

    Layouts count as level within LEVEL.
    """
    if paper is None:
        return "the paper does not have this model"
    differ = low > 1 or high < 1
    if paper == "no difference":
        level = low >= 1 / LEVEL and high <= LEVEL
        found = "confirmed" if level else "refuted" if differ else "not decided"
        return f"the paper has no difference for this model: {found} (level: up to {LEVEL:g} times)"
    found = "not decided" if not differ else "confirmed" if low > 1 else "refuted"
    return f"the paper has faster for this model: {found}"
