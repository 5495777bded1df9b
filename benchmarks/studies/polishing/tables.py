"""The tables and figures of the polishing study, from its results.

    python -m benchmarks.studies.polishing.tables

Reads the newest polishing_study_<machine>_<date>.json, draws its figures beside it and prints every
arm and its difference to the control of its cell in points. Intervals are Student's at 95 % over
the seeds, which change weights, order and crops, not the images; differences are paired by seed.
Two rows are the test: clean, then statistics, at the large batch of each set, crops from 8 %. Of
the dozens of others, some intervals exclude zero by chance.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypedDict

from benchmarks.speed.measuring import RESULTS, frozen
from benchmarks.studies.figures import save_svg
from largebatch.report.seeds import interval
from largebatch.report.style import COLOURS, INK, MUTED, PAPER, RULE

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

BASELINE = "sgd, small, area 0.35"
"""Baseline of the large batch: its group without the data set."""

RIVALS = {
    "small batch, SGD": (BASELINE, "control"),
    "small batch, SGD, polished": (BASELINE, "clean 2 + statistics"),
    "small batch, LARS": ("lars, small, area 0.35", "control"),
    "large batch, LARS, polished": ("lars, large, area 0.35", "clean 2 + statistics"),
    "large batch, LARS, 5 clean": ("lars, large, area 0.35", "clean 5 + statistics"),
    "large batch, LARS": ("lars, large, area 0.35", "control"),
    "large batch, SGD, linear rule": ("sgd, large, area 0.35", "control"),
}
"""Compared accuracies: group without the data set, and arm."""

TITLES = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
ARMS = {
    "statistics": ("statistics", COLOURS["statistics"]),
    "clean 2": ("clean", COLOURS["clean"]),
    "clean 2 + statistics": ("clean, then statistics", COLOURS["clean"]),
    "affine": ("affine *", COLOURS["affine"]),
    "affine + statistics": ("affine *, then statistics", COLOURS["affine"]),
}
"""Name and colour of each arm; arms that end with statistics have a diamond."""

BLOCKS = [("large", 0.08), ("large", 0.35), ("small", 0.08), ("small", 0.35)]
ENDS = {0.0: COLOURS["train"], 0.1: COLOURS["clean"], 0.3: COLOURS["statistics"]}
CLEAN_EPOCHS = (0, 1, 2, 5)

Table = list[dict[str, Any]]
Groups = dict[str, dict[str, dict[int, float]]]
Study = dict[str, Any]


class Spread(TypedDict):
    """A mean of n values and its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int


def student(values: list[float]) -> Spread:
    """Return the mean and its 95 % interval by Student's t; one value has none.

    >>> student([1.0, 2.0, 3.0])
    {'mean': 2.0, 'low': -0.48413771175..., 'high': 4.48413771175..., 'n': 3}
    """
    mean, low, high, n = interval(values)
    if n == 1:
        low = high = mean
    return {"mean": mean, "low": low, "high": high, "n": n}


def tables(cells: dict[str, dict[str, Any]]) -> dict[str, Table]:
    """Compare every arm with the control of its cell, and large batches with small ones."""
    groups = by_group(cells)
    polishing = [
        {
            "group": group,
            "arm": arm,
            "top1": student(list(values.values())),
            "difference": student(paired(values, arms["control"])),
        }
        for group, arms in groups.items()
        for arm, values in arms.items()
    ]
    return {"polishing": polishing, "batches": _batches(groups)}


def by_group(cells: dict[str, dict[str, Any]]) -> Groups:
    """Return top-1 in per cent by group, arm and seed."""
    groups: Groups = {}
    for cell in cells.values():
        arms = groups.setdefault(cell["group"], {})
        for arm, reached in cell["arms"].items():
            arms.setdefault(arm, {})[cell["seed"]] = 100 * reached["top1"]
    return groups


def paired(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return ours - theirs for every seed that both have."""
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def _batches(groups: Groups) -> Table:
    rows = []
    for name in sorted({group.split(", ")[0] for group in groups}):
        baseline = groups.get(f"{name}, {BASELINE}", {}).get("control", {})
        for label, (group, arm) in RIVALS.items():
            values = groups.get(f"{name}, {group}", {}).get(arm, {})
            differences = paired(values, baseline)
            if differences:
                rows.append(
                    {
                        "data": name,
                        "rival": label,
                        "top1": student(list(values.values())),
                        "difference": student(differences),
                    }
                )
    return rows


def draw_all(study: Study, folder: Path) -> None:
    """Draw each figure that has results."""
    groups = by_group(study["cells"])
    figures: dict[str, tuple[Callable[..., None], tuple[int, int], str]] = {
        "polishing_study": (_draw_polishing, (500, 1150), "affine"),
        "polishing_study_rates": (_draw_rates, (480, 680), "clean 5"),
        "polishing_study_batches": (_draw_batches, (520, 620), "sgd"),
    }
    for name, (draw, size, needed) in figures.items():
        if any(needed in group or needed in arms for group, arms in groups.items()):
            drawn = partial(draw, study=study, groups=groups)
            save_svg(folder / f"{name}.svg", drawn, size=size)


def _title(figure: "Figure", title: str, note: str, *, study: Study, groups: Groups) -> None:
    numbers = sorted({len(values) for arms in groups.values() for values in arms.values()})
    seeds = f"{numbers[0]}" + (f" to {numbers[-1]}" if len(numbers) > 1 else "")
    figure.suptitle(fill(title, 58), x=0.01, ha="left", size=13, weight="bold", color=INK)
    figure.supxlabel(
        fill(
            f"{note} Top-1 on the test set of {study['test_images']:,}; ResNet of 8 layers, "
            f"{study['images']:,} training images, {study['epochs']} epochs. Faint: each of "
            f"{seeds} seeds. Bars: mean and its 95 % interval (Student's t).",
            84,
        ),
        x=0.01, ha="left", size=9.5, color=MUTED,
    )  # fmt: skip


def _draw_polishing(figure: "Figure", *, study: Study, groups: Groups) -> None:
    """Draw the difference of each way to polish to the control with the same seeds."""
    title = f"What polishing changes, against {study['epochs']} epochs on augmented images"
    note = "LARS. clean: the last 2 epochs. * 2 epochs more than the control."
    _title(figure, title, note, study=study, groups=groups)
    panels = figure.subplots(2, 1, sharex=True)
    labels: dict[float, str] = {}
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        height = 0.0
        for batch, area in BLOCKS:
            arms = groups.get(f"{name}, lars, {batch}, area {area:g}", {})
            text = f"{_batch(study, batch)}, crops from {100 * area:g} % of the area"
            _head(axes, height, text, arms)
            for arm, (label, colour) in ARMS.items():
                height += 1
                labels[height] = label
                differences = paired(arms.get(arm, {}), arms.get("control", {}))
                _draw_row(axes, height, differences, colour, diamond="statistics" in arm)
            height += 1.6
        _finish(axes, height - 1, title, "Top-1 minus the control's, percentage points")
        axes.set_yticks(list(labels), list(labels.values()))


def _draw_batches(figure: "Figure", *, study: Study, groups: Groups) -> None:
    """Draw the difference of large batches to a small one of plain SGD."""
    ratio = study["large_batch"] // study["small_batch"]
    title = f"Batches {ratio} times as large, against SGD with batches of {study['small_batch']}"
    note = (
        "Crops from 35 %. polished: 2 clean epochs at the end, then statistics; 5 clean: 5. "
        "Rates were searched,\nbut not that of SGD in large batches."
    )
    _title(figure, title, note, study=study, groups=groups)
    panels = figure.subplots(2, 1)
    for axes, (name, heading) in zip(panels, TITLES.items(), strict=True):
        baseline = groups.get(f"{name}, {BASELINE}", {}).get("control", {})
        labels = []
        for height, (label, (group, arm)) in enumerate(RIVALS.items(), 1):
            values = groups.get(f"{name}, {group}", {}).get(arm, {})
            top1 = f"  {student(list(values.values()))['mean']:.1f} %" if values else ""
            labels.append(label + top1)
            polished = "statistics" in arm
            colour = COLOURS["clean" if polished else "train"]
            _draw_row(axes, height, paired(values, baseline), colour, diamond=polished)
        axes.axvline(-1, color=MUTED, lw=0.8, ls=(0, (5, 4)))
        axes.set_yticks(range(1, len(labels) + 1), labels)
        axes.annotate("target", (-1, 0.4), (-3, 0), textcoords="offset points", ha="right",
                      va="top", color=MUTED, size=9)  # fmt: skip
        _finish(axes, len(labels) + 0.6, heading, "Top-1 minus small-batch SGD's, points")


def _draw_rates(figure: "Figure", *, study: Study, groups: Groups) -> None:
    """Draw top-1 against the number of clean epochs, one line for each final rate."""
    title = f"How many of {study['epochs']} epochs to train on clean images, and at which rate"
    batch = _batch(study, "large").lower()
    note = f"CIFAR-10, LARS, {batch}, crops from 8 % of the area."
    _title(figure, title, note, study=study, groups=groups)
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, after in zip(panels, ("", " + statistics"), strict=True):
        for number, (end, colour) in enumerate(ENDS.items()):
            suffix = f", end {end:g}" if end else ""
            arms = groups.get(f"cifar10, lars, large, area 0.08{suffix}", {})
            _draw_line(axes, arms, after, colour, shift=0.06 * (number - 1), end=end)
        axes.set_xticks(CLEAN_EPOCHS)
        axes.set_xlabel("Clean epochs at the end of the schedule →", loc="right")
        axes.set_title("↑ Top-1, %" + (", exact statistics afterwards" if after else ""))
    panels[0].legend(title="Last rate, of the peak", frameon=False, alignment="left")


def _draw_line(
    axes: "Axes",
    arms: dict[str, dict[int, float]],
    after: str,
    colour: str,
    *,
    shift: float,
    end: float,
) -> None:
    names = {0: "statistics" if after else "control"} | {
        k: f"clean {k}{after}" for k in CLEAN_EPOCHS[1:]
    }
    found = [(k, arms[names[k]]) for k in CLEAN_EPOCHS if names[k] in arms]
    means = [student(list(values.values())) for _, values in found]
    x = [place + shift for place, _ in found]
    axes.plot(
        x, [m["mean"] for m in means], color=colour, marker="o", ms=6, label=f"{100 * end:g} %"
    )
    for place, (_, values), spread in zip(x, found, means, strict=True):
        axes.plot([place] * len(values), list(values.values()), color=colour, alpha=0.3, marker="o",
                  ms=3.5, lw=0, markeredgewidth=0)  # fmt: skip
        if spread["n"] > 1:
            axes.plot([place] * 2, [spread["low"], spread["high"]], color=colour, lw=1.2)


def _head(axes: "Axes", height: float, text: str, arms: dict[str, dict[int, float]]) -> None:
    """Write the title of a block of rows, with the accuracy of its control."""
    control = arms.get("control", {})
    reached = f": control {student(list(control.values()))['mean']:.1f} %" if control else ""
    axes.annotate(text + reached, (0, height), xycoords=axes.get_yaxis_transform(), va="center",
                  size=10.5, color=INK, weight="bold",
                  bbox={"color": PAPER, "lw": 0, "pad": 1})  # fmt: skip


def _draw_row(
    axes: "Axes", height: float, values: list[float], colour: str, *, diamond: bool
) -> None:
    """Draw the differences of all seeds, their mean with its interval, and the mean as text."""
    if not values:
        return
    spread = student(values)
    mean = spread["mean"]
    axes.plot(values, [height + 0.36] * len(values), color=colour, alpha=0.4, marker="o", ms=3.5,
              lw=0, markeredgewidth=0)  # fmt: skip
    if spread["n"] > 1:
        axes.plot([spread["low"], spread["high"]], [height] * 2, color=colour, lw=2)
    axes.plot([mean], [height], color=colour, marker="D" if diamond else "o", ms=7)
    axes.annotate(f"{mean:+.1f}", (1, height), (4, 0), xycoords=axes.get_yaxis_transform(),
                  textcoords="offset points", va="center", size=10.5, color=colour)  # fmt: skip


def _finish(axes: "Axes", bottom: float, title: str, x: str) -> None:
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_ylim(bottom, -0.7 if bottom > 10 else 0.4)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=RULE)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, color=INK, weight="bold", size=12.5)
    axes.set_xlabel(f"{x} →", loc="right")


def _batch(study: Study, batch: str) -> str:
    return f"{batch.capitalize()} batch, {study[f'{batch}_batch']}"


def main() -> None:
    """Draw the figures and print the tables."""
    study = frozen("polishing_study")
    draw_all(study, RESULTS)
    print("| cell | arm | top-1, % | against the control, points |\n|---|---|---|---|")
    for row in tables(study["cells"])["polishing"]:
        top1, points = (
            f"{it['mean']:.2f} ({it['low']:.2f} to {it['high']:.2f})"
            for it in (row["top1"], row["difference"])
        )
        print(f"| {row['group']} | {row['arm']} | {top1} | {points} |")


if __name__ == "__main__":
    main()
