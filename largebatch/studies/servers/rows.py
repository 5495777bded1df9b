"""Results of a study of servers: a row for each cell, and the answer to its question."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from largebatch.studies.hosts import starts
from largebatch.studies.hosts.starts import Found, Start, read_by_cell
from largebatch.studies.metrics import Interval, ratio
from largebatch.studies.servers.study import ALONE, Cell
from largebatch.studies.servers.traffic import Traffic

NEAR = 0.05
"""How far counters may be from the formulas, as a part of these."""


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


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield in words what was found about the statement of Jaeger et al. (DIDL 2018).

    Servers beside the workers are faster than central ones for small models, and there is no
    significant difference for large ones.
    """
    for place, row in enumerate(rows):
        protocol = row.cell.recipe.protocol
        if protocol is None or not protocol.dedicated:
            continue
        for other in (*rows[:place], *rows[place + 1 :]):
            if _is_beside(other.cell) and _same_point(row.cell, other.cell):
                yield _compared(row, other)
    if rows:
        worst = max(row.deviation for row in rows)
        verdict = "within" if worst <= NEAR else "NOT within"
        yield (
            f"The counters of all links are {verdict} {NEAR:.0%} of the formulas: at most "
            f"{worst:.1%} off."
        )


def _is_beside(cell: Cell) -> bool:
    return cell.recipe.protocol is not None and not cell.recipe.protocol.dedicated


def _same_point(one: Cell, other: Cell) -> bool:
    return (one.configuration, one.workers) == (other.configuration, other.workers)


def _compared(central: Row, beside: Row) -> str:
    """Return what a pair of rows has to do with the statement."""
    cell, size = central.cell, central.cell.size
    times = beside.times(central)
    head = (
        f"{cell.configuration} ({size}, {central.model_bytes / 1e6:.1f} MB) on {cell.workers} "
        f"workers, {beside.cell.layout} against {cell.layout}"
    )
    if times is None or times.number == 1:
        measured = "" if times is None else f" {times.mean:.2f} times as fast,"
        return f"{head}:{measured} too few starts to judge."
    shown = f"{head}: {times.with_ends('.2f', ' times as fast')}"
    if size == "large":
        verdict = "not refuted" if times.low <= 1 <= times.high else "refuted"
        return f"{shown}; the paper has no difference for large ones: {verdict}."
    verdict = "confirmed" if times.low > 1 else "refuted" if times.high < 1 else "not decided"
    return f"{shown}; the paper has faster for small models: {verdict}."
