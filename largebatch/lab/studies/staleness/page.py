"""The page of a staleness study: its table, accuracy against time, and how late gradients were.

A protocol has one colour in all charts; filters choose the recipe with its times, and the samples
of an update of all learners.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from largebatch.errors import StudyError
from largebatch.lab.studies.metrics import difference
from largebatch.lab.studies.staleness.pictures import diagonals, panels
from largebatch.lab.studies.staleness.run import Row
from largebatch.lab.studies.staleness.speed_up import SpeedUp, lines_of
from largebatch.recipe.protocols import Hardsync, Softsync
from largebatch.report.interactive import Filter, Page, Section, Table, columns_over, tag_at
from largebatch.report.interactive_charts import DOTTED, Chart, Curve, Series, by_column, series

PAGE = "study.html"
"""Name of the page in the folder of a study."""

AXES = {
    "seconds": "Simulated seconds of a run",
    "product": "mu x lambda, samples",
    "learners": "lambda, learners",
    "mu": "mu, samples of a gradient",
}
"""What accuracy can be drawn against: columns of the chart's data by their titles."""

_NOTE = (
    "The gradients are real, the learners and their times are simulated. Means over seeds with "
    "Student's interval of 95 %. Of many cells the best one is best by luck, too. A run that "
    "diverged counts as chance."
)
_TABLE = (
    "sigma is the staleness that a protocol aims at (0: hardsync), mu "
    "the samples of a gradient, lambda the learners. tau is how many updates late a gradient was; "
    "the paper expects at most 2 sigma (arXiv:1509.04210). Seconds are those of the simulated "
    "cluster, for a whole run without its evaluations."
)
_SPEED_UP = (
    "Samples per second of the simulated cluster over those of one learner alone, for the same "
    "mini-batches and times, without any training: how much sooner the same samples are done, not "
    "how much sooner an accuracy is reached."
)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A cell, and how it looks in all charts."""

    look: Series
    row: Row

    @property
    def name(self) -> str:
        """Name of the cell within its protocol."""
        return f"mu {self.row.cell.mu}, lambda {self.row.cell.learners}"


def make_page(rows: Sequence[Row], *, title: str, speed_ups: Sequence[SpeedUp] = ()) -> Page:
    """Return the page of the cells that have records; raise StudyError if there are none."""
    if not rows:
        raise StudyError("no run of the study has ended: there is nothing to show yet")
    found = panels(rows)
    protocols = list(dict.fromkeys(row.cell.protocol for row in rows))
    drawn = [
        _Drawn(series(protocols.index(row.cell.protocol), row.cell.protocol, tags=tags), row)
        for place, inside in enumerate(found.values())
        for row in inside
        for tags in [(f"panel {place}", f"product {row.cell.samples}")]
    ]
    names = {f"panel {place}": name for place, name in enumerate(found)}
    products = {f"product {n}": f"{n:,}" for n in sorted({row.cell.samples for row in rows})}
    late = [one for one in drawn if one.row.cell.sigma]
    legend = [series(*each) for each in enumerate(protocols)]
    looks = {look.label.partition(",")[0]: look for look in reversed(legend)}
    for protocol in dict.fromkeys(one.protocol for one in speed_ups):
        if protocol not in looks:
            looks[protocol] = series(len(legend), protocol)
            legend.append(looks[protocol])
    return Page(
        title=title,
        subtitle="; ".join(found),
        findings=[text for name, inside in found.items() for text in describe(name, inside)],
        is_sound=not any(row.diverged for row in rows),
        note=_NOTE,
        legend=("Protocols", legend),
        filters=[
            Filter("Recipe and times", names),
            Filter("mu x lambda", products, "several"),
        ],
        sections=[
            Section(title="Cells", parts=[_table(drawn)], notes=[_TABLE]),
            Section(
                title="Accuracy against time",
                parts=[_trade_off(drawn)],
                filters=[Filter("Against", AXES, "axis")],
            ),
            Section(title="How late gradients were", parts=[_staleness(late)] if late else []),
            *([_speed_up(speed_ups, looks)] if speed_ups else []),
        ],
        source="the records of a study",
    )


def describe(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield in sentences which cells are the best and the quickest of a recipe with its times.

    The quickest is compared with hardsync of the same mu and lambda, where the study has it.
    """
    best = min(rows, key=lambda row: row.error.mean)
    yield (
        f"{name}: the highest top-1 is {_accuracy(best)}, of {_where(best)}, in "
        f"{best.seconds:,.4g} s of the simulated cluster."
    )
    quickest = min(rows, key=lambda row: row.seconds)
    same = [
        row
        for row in rows
        if not row.cell.sigma
        and (row.cell.mu, row.cell.learners) == (quickest.cell.mu, quickest.cell.learners)
    ]
    if same and same[0] is not quickest:
        points = difference(quickest.by_seed, same[0].by_seed).scaled(100)
        yield (
            f"The quickest, {_where(quickest)}, takes {quickest.seconds / same[0].seconds:.2f} "
            f"times as long as hardsync. Its top-1 is {_accuracy(quickest)}; minus hardsync's, "
            f"{points.with_ends('+.2f', ' points')}."
        )
    if diverged := [row for row in rows if row.diverged]:
        names = "; ".join(_where(row) for row in diverged)
        yield f"Runs diverged, which counts as chance, of {names}."


def _where(row: Row) -> str:
    return f"{row.cell.protocol} (mu {row.cell.mu}, lambda {row.cell.learners})"


def _accuracy(row: Row) -> str:
    return row.top1.scaled(100).text(".2f", "%")


def _table(drawn: Sequence[_Drawn]) -> Table:
    """Return a row for each cell."""
    column = columns_over([one.row for one in drawn])
    several = len(panels([one.row for one in drawn])) > 1
    where = (
        column("Recipe", lambda row: row.cell.configuration, None),
        column("Times", lambda row: row.cell.times, None),
    )
    columns = [
        column("Protocol", lambda row: row.cell.protocol.partition(",")[0], None),
        column("Modulation", _modulation, None),
        *(where if several else ()),
        column("sigma", lambda row: row.cell.sigma, "d"),
        column("mu", lambda row: row.cell.mu, ",d"),
        column("lambda", lambda row: row.cell.learners, ",d"),
        column("mu x lambda", lambda row: row.cell.samples, ",d"),
        column("Top-1, %", lambda row: 100 * row.top1.mean, ".2f"),
        column("±", lambda row: row.top1.scaled(100).reach, ".2f"),
        column("Seconds", lambda row: row.seconds, ",.2f"),
        column("Mean tau", lambda row: row.tau, ".2f"),
        column("tau > 2 sigma, %", lambda row: 100 * row.late / sum(row.counts), ".4f"),
        column("Highest tau", lambda row: len(row.staleness) - 1, ",d"),
        column("Updates", lambda row: row.found[0]["updates"], ",d"),
        column("Seeds", lambda row: len(row.found), "d"),
        column("Diverged", lambda row: row.diverged, "d"),
    ]
    return Table(name="cells", columns=columns, series=[one.look for one in drawn])


def _modulation(row: Row) -> str:
    protocol = row.cell.recipe.protocol
    assert isinstance(protocol, Hardsync | Softsync)  # the grids have no other
    return protocol.modulation


def _trade_off(drawn: Sequence[_Drawn]) -> Chart:
    """Return the error of every cell with its interval, and the lines of equal mu x lambda.

    Rudra's rule (arXiv:1509.04210) is that such a line is level.
    """
    hover = ("cell", "@cell"), ("top-1", "@text"), ("seconds", "@seconds{0,0.00}")
    curves = []
    for one in drawn:
        row, error = one.row, one.row.error.scaled(100)
        point = {
            "seconds": row.seconds, "product": row.cell.samples, "learners": row.cell.learners,
            "mu": row.cell.mu, "error": error.mean, **error.ends, "size": 10, "cell": one.name,
            "text": _accuracy(row), "tau": f"{row.tau:.2f}",
        }  # fmt: skip
        data, rows = by_column([point]), (*hover, ("mean tau", "@tau"))
        curves.append(Curve(series=one.look, data=data, line=False, hover=rows))
    for look, joined in _diagonals(drawn):
        ends = [{"seconds": row.seconds, "error": 100 * row.error.mean} for row in joined]
        ends.sort(key=lambda end: end["seconds"])
        curves.append(Curve(series=look, data=by_column(ends), points=False, x="seconds"))
    return Chart(
        name="trade_off", x="seconds", y="error", moves=True, height=460, log="x",
        x_title=AXES["seconds"], y_title="Error, %", curves=curves,
        caption="The mean error of each cell with its interval of 95 %, which may leave the chart. "
        "A dotted line joins cells of a protocol with equal mu x lambda: by the paper's rule it is "
        "level.",
    )  # fmt: skip


def _diagonals(drawn: Sequence[_Drawn]) -> Iterator[tuple[Series, list[Row]]]:
    """Yield the cells that a line joins, and how it looks."""
    looks = {one.row.cell.protocol: one.look for one in drawn}
    tags = {one.row.cell.name: one.look.tags for one in drawn}
    for inside in panels([one.row for one in drawn]).values():
        for (protocol, _), joined in diagonals(inside).items():
            own = (*tags[joined[0].cell.name], tag_at("seconds"))
            yield replace(looks[protocol], tags=own, dash=DOTTED), joined


def _staleness(drawn: Sequence[_Drawn]) -> Chart:
    """Return what share of the gradients was how many updates late, and where 2 sigma is."""
    hover = ("cell", "@cell"), ("tau", "@tau"), ("gradients", "@share{0.[0000]} %")
    curves = []
    for one in drawn:
        points = [
            {"tau": tau, "share": 100 * share, "cell": one.name, "size": 5}
            for tau, share in enumerate(one.row.staleness)
        ]
        end = 2 * one.row.cell.sigma
        bound = {"tau": [end, end], "share": [0.0, 100 * max(one.row.staleness)]}
        dotted = replace(one.look, dash=DOTTED)
        curves.append(Curve(series=one.look, data=by_column(points), hover=hover))
        curves.append(Curve(series=dotted, data=bound, points=False))
    return Chart(
        name="staleness", x="tau", y="share", height=380, from_zero=True,
        x_title="tau, updates", y_title="Gradients, %", curves=curves,
        caption="The share of all gradients of a cell by the number of updates that they were "
        "late. A dotted line stands at 2 sigma.",
    )  # fmt: skip


def _speed_up(found: Sequence[SpeedUp], looks: Mapping[str, Series]) -> Section:
    """Return the speed-up by learners: a table and a chart of the chosen times and mini-batch."""
    tags = {name: f"speed-up {place}" for place, name in enumerate(lines_of(found))}

    def look(one: SpeedUp) -> Series:
        return replace(looks[one.protocol], tags=(tags[one.panel],))

    hover = ("lambda", "@learners"), ("speed-up", "@value{0.00}")
    curves = [
        Curve(series=look(line[0]), hover=hover, data=by_column([
            {"learners": one.cell.learners, "value": one.over_alone.mean, **one.over_alone.ends}
            for one in line
        ]))
        for lines in lines_of(found).values()
        for line in lines.values()
    ]  # fmt: skip
    column = columns_over(found)
    columns = [
        column("Protocol", lambda one: one.protocol, None),
        column("Times", lambda one: one.cell.times, None),
        column("mu", lambda one: one.cell.mu, ",d"),
        column("lambda", lambda one: one.cell.learners, ",d"),
        column("Speed-up", lambda one: one.over_alone.mean, ".2f"),
        column("±", lambda one: one.over_alone.reach, ".2f"),
        column("Seeds", lambda one: len(one.seconds), "d"),
    ]
    return Section(
        title="Speed-up",
        parts=[
            Table(name="speed_up", columns=columns, series=[look(one) for one in found]),
            Chart(
                name="speed_up_by_learners", x="learners", y="value", x_title="lambda, learners",
                y_title="Speed-up", ticks=sorted({one.cell.learners for one in found}),
                from_zero=True, curves=curves,
            ),
        ],
        filters=[
            Filter("Times and mu", {tag: name for name, tag in tags.items()}),
        ],
        notes=[_SPEED_UP],
    )  # fmt: skip
