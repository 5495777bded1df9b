"""Numbers as text, for messages, logs and pages: counts, ranges, percentages, times, tables."""

import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from html import escape

MISSING = "–"
"""Text for a value that does not exist or was not measured."""


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a number and what it counts; `nouns` is the plural where it is not NOUNs.

    >>> plural(1, "run"), plural(1_000, "run"), plural(2, "policy", "policies")
    ('1 run', '1,000 runs', '2 policies')
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def percent(part: float) -> str:
    """Return a part of 1 in percent, as accuracies are written.

    >>> percent(0.98333)
    '98.33'
    """
    return f"{100 * part:.2f}"


def four_decimals(loss: float, *, sign: bool = False) -> str:
    """Return a loss, with four significant digits in place of decimals from 1,000 on.

    >>> four_decimals(0.55), four_decimals(70119382108.4444), four_decimals(0.1, sign=True)
    ('0.5500', '7.012e+10', '+0.1000')
    """
    form = ".4f" if not abs(loss) >= 1000 else ".4g"
    return f"{loss:{'+' if sign else ''}{form}}"


TOP5 = 5
"""Classes up to which each label is among the five highest scores, so that top-5 shows nothing."""


def points(before: float, after: float) -> str:
    """Return the change of a part of 1 in percentage points, with its sign.

    >>> points(0.5, 0.4825)
    '−1.75'
    """
    change = signed(100 * (after - before), ".2f")
    return "±0.00" if change in {"+0.00", "−0.00"} else change


def signed(value: float, form: str) -> str:
    """Return a number with its sign, in this format.

    >>> signed(-2.314, ".2f"), signed(0.5, ".2f")
    ('−2.31', '+0.50')
    """
    return format(value, f"+{form}").replace("-", "−")


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or all of those before the point.

    >>> three_digits(0.01234), three_digits(11.44), three_digits(1117.2)
    ('0.0123', '11.4', '1,117')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> [duration(s) for s in (0.25, 74.7, 754, 9_000, 1e6)]
    ['0.25 s', '74.7 s', '12.6 min', '2.50 h', '11.6 days']
    """
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{_fixed(seconds / size)} {unit}"
    return f"{_fixed(seconds)} s"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges.

    >>> ranges([7, 0, 1, 2, 4])
    '0-2, 4, 7'
    """
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Container[int] = (),
    min_widths: Sequence[int] = (),
    wrap_at: int | None = None,
) -> str:
    """Return the lines of a table of text, with columns of equal width two spaces apart.

    `right` are columns of numbers; `min_widths` the smallest widths of the first columns, for
    tables that are printed row by row. The last column is continued below itself where a line would
    have more than `wrap_at` characters.

    >>> print(table([["recipe", "batch"], ["digits", "96"]], right=[1]))
    recipe  batch
    digits     96
    >>> print(table([["seed", "of the order of the samples"]], wrap_at=24))
    seed  of the order of
          the samples
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, width in enumerate(min_widths):
        widths[number] = max(widths[number], width)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if wrap_at is None:
            lines.append("  ".join(cells).rstrip())
            continue
        before = "".join(f"{cell}  " for cell in cells[:-1])
        lines += textwrap.wrap(
            row[-1], wrap_at, initial_indent=before, subsequent_indent=" " * len(before)
        )
    return "\n".join(lines)


class Tabular:
    """Base of results that print as a table, and are an HTML table in a notebook."""

    __slots__ = ()

    def _caption(self) -> str:
        raise NotImplementedError

    def _rows(self) -> list[list[str]]:
        raise NotImplementedError

    def __str__(self) -> str:
        rows = self._rows()
        return f"{self._caption()}\n{table(rows, right=range(1, len(rows[0])))}"

    def _repr_html_(self) -> str:
        head, *body = [[escape(cell) for cell in row] for row in self._rows()]
        lines = [f"<caption>{escape(self._caption())}</caption>"]
        lines += ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
        return "<table>\n" + "\n".join(lines) + "\n</table>"


def _fixed(value: float) -> str:
    decimals = 2 - min(2, max(0, math.floor(math.log10(value)))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def dotted(config: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Yield the settings by their dotted keys.

    >>> list(dotted({"seed": 1, "optimizer": {"eta": 0.001}}))
    [('seed', 1), ('optimizer.eta', 0.001)]
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
