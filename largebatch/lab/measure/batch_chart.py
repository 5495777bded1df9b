"""The advice about a batch as sentences, as a chart, and as a recipe with its sources."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.formatting import aligned, duration, plural, signed, three_digits
from largebatch.lab.measure.batch import CLOSE, Advice, Row
from largebatch.lab.measure.batch_parts import THEORY
from largebatch.lab.planner.forecast import name_times
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import at_batch
from largebatch.recipe.writing import dump_commented
from largebatch.report.noise import MORE_STEPS, samples
from largebatch.report.style import COLOURS, INK, MUTED, name_axes, save_png, write_title

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure


def describe(advice: Advice) -> Iterator[str]:
    """Yield the critical batch, the table of batches, the step, memory, the rate, and remarks."""
    value, low, high = advice.critical
    noise, smallest = advice.noise, advice.rows[0].batch
    yield (
        f"critical batch: {samples(value)} ({samples(low)} to {samples(high)}), which takes "
        f"{MORE_STEPS:.0%} more epochs than small batches: a fifth of the noise scale, "
        f"{samples(noise.value)} (95 %: {samples(noise.low)} to {samples(noise.high)}, of "
        f"{plural(noise.updates, 'update')}); the interval has a factor of {THEORY:g} more, by "
        "which runs may differ from the noise scale"
    )
    larger = f"; the smallest of this table, {smallest:,}, is larger" if advice.all_above else ""
    yield (
        f"efficient: batches up to {samples(value)}{larger}; one of {samples(noise.value)} takes "
        "twice the epochs of a small one"
    )
    yield from _table(advice).split("\n")
    steps = [f"{1000 * each:.3g} ms for {size:,}" for size, each in advice.step_seconds.items()]
    if steps:
        yield (
            f"step of one worker on {advice.cluster.name} by device batch: {', '.join(steps)}, on "
            "the line through measured times"
        )
    if advice.most is not None:
        yield (
            f"memory: a device batch of up to {advice.most:,} samples a worker, estimated from the "
            "activations of a few; larger batches take several device batches an update"
        )
    yield f"learning rate: {advice.rate:.12g}, {_rate_rule(advice)}, {_rate_source(advice)}"
    yield from advice.remarks
    yield from _recommended(advice)


def _recommended(advice: Advice) -> Iterator[str]:
    """Yield the recommended batch with the reason, and those at the ends of the interval."""
    chosen, first = advice.chosen, advice.rows[0]
    smallest = f"{first.batch:,}, the smallest of this table, which is above the critical batch"
    why = "the recipe's own," if advice.keeps else "the smallest batch"
    shortest = "the shortest time up to the critical batch"
    limit = f"the time of {smallest}" if advice.all_above else shortest
    reason = f"{chosen.batch:,}, {why} within {CLOSE - 1:.0%} of {limit}"
    if advice.all_above and chosen == first:
        reason = smallest
    yield f"recommended: {reason}, for {chosen.epochs:.3g} epochs"
    if set(advice.bounds) != {chosen.batch}:
        low, high = advice.bounds
        yield (
            f"the interval does not decide: at its lower end {low:,} would be recommended, at its "
            f"upper end {high:,}"
        )


def _table(advice: Advice) -> str:
    """Return a table of the batches; each change is from the batch before, half as large."""
    priced = ["cost"] if any(row.cost is not None for row in advice.rows) else []
    rows = [["batch", "epochs", "interval", "time", *priced, "doubling", "", ""]]
    for before, row in zip([None, *advice.rows[:-1]], advice.rows, strict=True):
        cost = [] if row.cost is None else [three_digits(row.cost)]
        changes = ["", ""] if before is None else _changes(before, row)
        ends = f"{three_digits(row.low)} to {three_digits(row.high)}"
        mark = "<- recommended" if row == advice.chosen else ""
        numbers = (f"{row.batch:,}", f"{row.epochs:.3g}", ends, duration(row.seconds))
        rows.append([*numbers, *cost, *changes, mark])
    return aligned(rows, right=range(len(rows[0]) - 1))


def _changes(before: Row, row: Row) -> list[str]:
    """Return what a doubling changes: epochs, and time, which the cost is proportional to."""
    pairs = {"epochs": (before.epochs, row.epochs), "time": (before.seconds, row.seconds)}
    return [
        f"{signed(100 * (new / old - 1), '.0f')} % {name}" for name, (old, new) in pairs.items()
    ]


def _rate_rule(advice: Advice) -> str:
    """Return the power law of the learning rate."""
    recipe, batch = advice.recipe, advice.recipe.batch.global_batch
    if advice.keeps:
        return "the recipe's"
    ratio = f"({advice.chosen.batch} / {batch})"
    return f"the recipe's {recipe.schedule.peak_lr:g} x {ratio}^{advice.exponent:.2g}"


def _rate_source(advice: Advice) -> str:
    """Return the origin of the exponent of the learning rate."""
    known = [(size, test.upper.value) for size, test in advice.edges if test.upper]
    found = " and ".join(f"{three_digits(rate)} at {size:,}" for size, rate in known)
    if advice.keeps:
        return f"with upper edges of range tests: {found}" if found else "no edge was found"
    if len(known) < 2:
        return "the square-root rule: no two edges were found"
    bounded = "" if 0 < advice.exponent < 1 else "; bounded to 0 to 1, as in theory"
    return f"between the upper edges of range tests, {found}{bounded}"


def write_advice(path: Path, advice: Advice) -> None:
    """Draw time and epochs by batch into a PNG file, with the recommended batch marked."""

    def draw(figure: "Figure") -> None:
        where = f"{advice.cluster.name}, {plural(advice.workers, 'worker')}"
        write_title(figure, f"{advice.recipe.name} on {where}")
        by_time, by_epochs = figure.subplots(1, 2)
        _draw_time(by_time, advice)
        _draw_epochs(by_epochs, advice)

    save_png(path, draw, size=(960, 400), pixels=1920)


def _draw_time(axes: "Axes", advice: Advice) -> None:
    times = [row.seconds for row in advice.rows]
    axes.plot(
        [row.batch for row in advice.rows], times, color=COLOURS["train"], marker="o", ms=5
    )  # fmt: skip
    axes.set_yscale("log")
    _mark(axes, advice, advice.chosen.seconds)
    name_axes(axes, y="Time of the run", x="Batch")
    name_times(axes, times)
    axes.set_ylim(bottom=min(times) / 1.6)


def _draw_epochs(axes: "Axes", advice: Advice) -> None:
    batches, epochs = [row.batch for row in advice.rows], [row.epochs for row in advice.rows]
    colour = COLOURS["clean"]
    axes.fill_between(
        batches, [row.low for row in advice.rows], [row.high for row in advice.rows],
        color=colour, alpha=0.15, lw=0,
    )  # fmt: skip
    axes.plot(batches, epochs, color=colour, marker="o", ms=5)
    axes.set_ylim(0, 1.08 * max(epochs))  # the band may be cut, the points may not
    axes.axvline(advice.critical[0], color=MUTED, lw=0.8, ls=(0, (4, 3)))
    _mark(axes, advice, advice.chosen.epochs)
    name_axes(axes, y="Epochs to the same loss; dashed: critical batch", x="Batch")


def _mark(axes: "Axes", advice: Advice, height: float) -> None:
    """Mark the recommended batch, and name the batches on the axis."""
    axes.set_xscale("log", base=2)
    shown = [row.batch for row in advice.rows][:: 1 + len(advice.rows) // 8]
    axes.set_xticks(shown, [f"{size:,}" for size in shown])
    axes.minorticks_off()
    axes.plot(advice.chosen.batch, height, color=INK, marker="D", ms=8, zorder=3)
    axes.annotate(
        f"recommended: {advice.chosen.batch:,}", (advice.chosen.batch, height), (0, -14),
        textcoords="offset points", color=INK, weight="bold", va="top",
        ha="left" if advice.chosen == advice.rows[0] else "center",
    )  # fmt: skip


def advised(advice: Advice) -> Recipe:
    """Return the recipe in the recommended batch, with its epochs and its learning rate."""
    chosen, recipe = advice.chosen, advice.recipe
    if not advice.keeps:
        recipe = at_batch(recipe, chosen.batch, epochs=chosen.epochs, rate=advice.rate)
    return recipe.model_copy(update={"name": f"{recipe.name[:80]}-{chosen.batch}"})


def draft(advice: Advice) -> str:
    """Return the text of the recommended recipe, with the source beside each changed number."""
    recipe, before = advised(advice), advice.recipe
    value, low, high = advice.critical
    interval = f"{samples(low)} to {samples(high)}"
    comments = {
        "duration": f"E (1 + B / {samples(advice.noise.value)}), from that of {before.name}",
        "batch.global_batch": f"the critical batch is {samples(value)} ({interval})",
        "schedule.peak_lr": _rate_rule(advice),
    }
    other = "its own batch" if advice.keeps else f"another than {before.batch.global_batch:,}"
    header = (
        f"{recipe.name}: written by `largebatch batch` from {before.name}, with the same shares of",
        f"the run, in {other}.",
        "Where to begin, not a result. Measured: not yet.",
    )
    return dump_commented(recipe, comments, header=header)
