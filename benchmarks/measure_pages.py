"""Write one page per recipe in docs/recipes, and the answers over all, from the results of
measure.py.

    python benchmarks/measure_pages.py

Reads the newest benchmarks/results/recipes_<machine>_<date>.json and trains nothing. A page says of
every number how many seeds it is the mean of; what is not measured yet stands there as such.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import ARMS, NAME, SEARCH_PART, SEEDS, TRIALS, Arm
from measuring import RESULTS, newest
from polishing_tables import by_group, paired, student

from largebatch import load_recipe
from largebatch.lab.studies.metrics import interval
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.report.style import COLOURS, INK, MUTED, save_png

if TYPE_CHECKING:
    from largebatch.report.style import Figure

PAGES = Path(__file__).parents[1] / "docs" / "recipes"
TITLES = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
ENDS = {
    "control": "whole schedule on augmented images",
    "statistics": "the same, then the exact statistics pass",
    "clean": "last epochs on clean images instead",
    "clean + statistics": "the same, then the exact statistics pass",
    "ema": "moving average of the control's weights, its decay not searched",
    "ema + statistics": "the same, then the exact statistics pass",
}
UNKNOWN = "not measured yet"

Ended = tuple[str, str]
"""An arm of a data set, and its last stage."""

REACHED: dict[Ended, str] = {
    ("small", "control"): "Top-1, %: small batch, SGD",
    ("large", "control"): "Large batch, LARS",
    ("large", "clean + statistics"): "Large batch, LARS, polished",
    ("large, Nesterov", "control"): "Large batch, Nesterov SGD",
    ("large, Nesterov, straight decay", "control"): "Large batch, Nesterov SGD, straight decay",
}
SMALL, LARGE, NESTEROV = "small", "large", "large, Nesterov"
STRAIGHT = "large, Nesterov, straight decay"
LONGER = "large, 1.25 times as long"
CONTROL, CLEAN, STATISTICS, EMA = "control", "clean", "statistics", "ema"
POLISHED = "clean + statistics"


def _ends(arm: str, *, of: str, against: str = CONTROL) -> tuple[tuple[Ended, ...], ...]:
    return ((arm, of),), ((arm, against),)


def _arms(ours: str, theirs: str, end: str) -> tuple[tuple[Ended, ...], ...]:
    return ((ours, end),), ((theirs, end),)


QUESTIONS: dict[str, tuple[tuple[Ended, ...], ...]] = {
    "What does the large batch cost? LARS, against SGD at the small one": _arms(
        LARGE, SMALL, CONTROL),
    "The same with Nesterov SGD at both": _arms(NESTEROV, SMALL, CONTROL),
    "Nesterov SGD against LARS, large batch": _arms(NESTEROV, LARGE, CONTROL),
    "Nesterov SGD against LARS, both polished": _arms(NESTEROV, LARGE, POLISHED),
    "Nesterov SGD with a straight decay against LARS, large batch": _arms(
        STRAIGHT, LARGE, CONTROL),
    "Nesterov SGD with a straight decay against LARS, both polished": _arms(
        STRAIGHT, LARGE, POLISHED),
    "Nesterov SGD with a straight decay against small, both polished": _arms(
        STRAIGHT, SMALL, POLISHED),
    "Polishing (clean epochs, then statistics), small batch": _ends(SMALL, of=POLISHED),
    "Polishing, large batch, LARS": _ends(LARGE, of=POLISHED),
    "Polishing, large batch, Nesterov SGD": _ends(NESTEROV, of=POLISHED),
    "Polishing gains more at the large batch, LARS, than at the small one": (
        ((LARGE, POLISHED), (SMALL, CONTROL)), ((LARGE, CONTROL), (SMALL, POLISHED))),
    "Clean epochs, small batch": _ends(SMALL, of=CLEAN),
    "Clean epochs, large batch, LARS": _ends(LARGE, of=CLEAN),
    "The statistics pass alone, small batch": _ends(SMALL, of=STATISTICS),
    "The statistics pass alone, large batch, LARS": _ends(LARGE, of=STATISTICS),
    "The statistics pass after clean epochs, large batch, LARS": _ends(
        LARGE, of=POLISHED, against=CLEAN),
    "The moving average of weights, small batch": _ends(SMALL, of=EMA),
    "The moving average of weights, large batch, LARS": _ends(LARGE, of=EMA),
    "The moving average with statistics, large batch, LARS": _ends(LARGE, of="ema + statistics"),
    "What polishing leaves of the cost: LARS, polished, against small": (
        ((LARGE, POLISHED),), ((SMALL, CONTROL),)),
    "LARS against small, both polished": _arms(LARGE, SMALL, POLISHED),
    "A quarter more epochs instead of polishing, LARS": _arms(LONGER, LARGE, CONTROL),
    "LARS polished, against a quarter more epochs": (((LARGE, POLISHED),), ((LONGER, CONTROL),)),
}  # fmt: skip
"""Questions: top-1 of some ends minus that of others with the same seeds."""

CAVEATS = """\
Top-1 at the end of one arm minus that of another, in points: means over the seeds with their
95 % intervals by Student's t, paired by seed. The peak rate of every arm was searched with as many
trials of a shorter schedule, judged on training images held out; the arm of a quarter more epochs
has the rate of LARS at the large batch, and polished ends that of their arm.

Three seeds make wide intervals, and a few that are narrow by chance. Each holds for its question
alone: one in twenty misses. † marks those that exclude 0 also where all of a column
hold together (Bonferroni). None of them has the noise of the search, nor that of the test images:
10,000 of them leave one accuracy open by 0.5 points or so, a difference on the same images by
less. An interval that holds 0 does not say that there is nothing.

LARS and Nesterov SGD at the large batch have the same schedule, with a decay of power 2; that of
the small batch falls evenly, as that of a third arm does. The epochs that polishing saves are by a
straight line from the schedule to that of a quarter more epochs; the statistics pass, which costs
about a third of an epoch, is not taken off. The moving average has one decay, not searched.\
"""

Groups = dict[str, dict[str, dict[int, float]]]


def main() -> None:
    """Write every page and figure that has results."""
    path = newest(NAME, RESULTS)
    if path is None:
        raise SystemExit("there are no results yet: make measure")
    content = json.loads(path.read_text(encoding="utf-8"))
    runs = content["runs"]
    groups = by_group(
        {key: {**run, "group": f"{run['data']}, {run['arm']}"} for key, run in runs.items()}
    )
    PAGES.mkdir(exist_ok=True)
    text = "\n".join(answers(groups, source=path.name))
    (PAGES / "pairs.md").write_text(text + "\n", encoding="utf-8")
    print(PAGES / "pairs.md")
    for arm in ARMS:
        if arm.name in {"small", "large"} and arm.key in groups:
            draw = partial(_draw, arm=arm, runs=list(runs.values()), groups=groups)
            save_png(PAGES / f"{arm.recipe}.png", draw, size=(820, 380), pixels=1640)
            text = page(arm, groups, runs, content, source=path.name)
            (PAGES / f"{arm.recipe}.md").write_text(text, encoding="utf-8")
            print(PAGES / f"{arm.recipe}.md")


def answers(groups: Groups, *, source: str) -> list[str]:
    """Return the page with every question and the answer for each data set."""
    sets = [data for data in TITLES if f"{data}, small" in groups]
    lines = [
        *("# What the pairs of recipes answer", "", CAVEATS, ""),
        *(f"| | {' | '.join(TITLES[data] for data in sets)} |", f"|---|{'---|' * len(sets)}"),
    ]
    for (arm, end), name in REACHED.items():
        found = [groups.get(f"{data}, {arm}", {}).get(end, {}) for data in sets]
        cells = [_interval(list(one.values()), ".2f") or UNKNOWN for one in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for question, sides in QUESTIONS.items():
        cells = [_answer(groups, data, *sides) for data in sets]
        lines.append(f"| {question} | {' | '.join(cells)} |")
    saved = [_interval(saved_epochs(groups, data), ".0f") or UNKNOWN for data in sets]
    lines.append(f"| Epochs that polishing saves, % of the schedule, LARS | {' | '.join(saved)} |")
    return [*lines, "", f"Made by `make measure`: [results](../../benchmarks/results/{source})."]


def page(
    arm: Arm, groups: Groups, runs: dict[str, Any], content: dict[str, Any], *, source: str
) -> str:
    """Return the page of a recipe."""
    recipe = load_recipe(arm.recipe)
    plan = make_plan(recipe, workers=1)
    own = [run for run in runs.values() if run["data"] == arm.data and run["arm"] == arm.name]
    rate = own[0]["rate"]
    seconds = min(run.get("seconds", math.nan) for run in own)
    facts = (
        f"{TITLES[arm.data]}, {recipe.model.name}, batch {plan.global_batch:,}, "
        f"{recipe.duration.epochs:g} epochs of {plan.steps_per_epoch:.1f} updates, "
        f"{recipe.optimizer.kind}, {recipe.precision}. Peak rate {rate:g}, the best of {TRIALS} "
        f"trials of {SEARCH_PART:.0%} of the epochs, as many for every arm, judged on 5,000 "
        f"training images. {len(own)} of {SEEDS} seeds; {seconds / 60:.0f} minutes for the "
        "quickest one to the end of its schedule, on one core beside another run."
    )
    own_rate = "" if rate == recipe.schedule.peak_lr else f" --set schedule.peak_lr={rate:g}"
    results = (
        f"Results, command, versions: [benchmarks/results/{source}](../../benchmarks/results/"
        f"{source}), made by `make measure` on {content['machine']}. Intervals are Student's over "
        "the seeds, differences are paired by seed."
    )
    lines = [
        *(f"# `{arm.recipe}`", "", facts, ""),
        *(f"![Top-1 by epoch, and how each way to end differs]({arm.recipe}.png)", ""),
        *(*_table(arm, groups), ""),
        *(
            "What that says of batches, polishing and optimizers: [pairs](pairs.md).",
            "",
            "```console",
        ),
        f"$ largebatch train {arm.recipe} --data DIR{own_rate}",
        *("```", "", results, ""),
    ]
    return "\n".join(lines)


def _table(arm: Arm, groups: Groups) -> list[str]:
    arms = groups[arm.key]
    rows = ["| | top-1, % | against the control, points |", "|---|---|---|"]
    for end, what in ENDS.items():
        if end in arms:
            differences = paired(arms[end], arms["control"]) if end != "control" else []
            rows.append(
                f"| {end}: {what} | {_interval(list(arms[end].values()), '.2f')} | "
                f"{_interval(differences, '+.2f')} |"
            )
    return rows


def _answer(groups: Groups, data: str, plus: tuple[Ended, ...], minus: tuple[Ended, ...]) -> str:
    values = difference_of(groups, data, plus, minus)
    if not values:
        return UNKNOWN
    together = interval(values, together=len(QUESTIONS))
    is_sure = len(values) > 1 and (together.low > 0 or together.high < 0)
    return _interval(values, "+.2f") + " †" * is_sure


def difference_of(
    groups: Groups, data: str, plus: Sequence[Ended], minus: Sequence[Ended]
) -> list[float]:
    """Return the sum of some ends minus that of others, in points, for every seed that all have."""
    ours, theirs = (
        [groups.get(f"{data}, {arm}", {}).get(end, {}) for arm, end in side]
        for side in (plus, minus)
    )
    seeds = set.intersection(*(set(one) for one in (*ours, *theirs)))
    return [
        sum(one[seed] for one in ours) - sum(one[seed] for one in theirs) for seed in sorted(seeds)
    ]


def saved_epochs(groups: Groups, data: str) -> list[float]:
    """Return by seed how much longer a schedule would gain as much as polishing, in per cent.

    Straight between the schedule and that of a quarter more epochs, and beyond it.
    """
    polished = difference_of(groups, data, *_ends(LARGE, of=POLISHED))
    longer = difference_of(groups, data, *_arms(LONGER, LARGE, CONTROL))
    return [25 * one / other for one, other in zip(polished, longer, strict=False) if other > 0]


def _interval(values: list[float], form: str) -> str:
    if not values:
        return ""
    found = student(values)
    if found["n"] == 1:
        return f"{found['mean']:{form}} (one seed)"
    between = f"{found['low']:{form}} to {found['high']:{form}}"
    return f"{found['mean']:{form}} ({between}, n = {found['n']})"


def _draw(figure: "Figure", *, arm: Arm, runs: list[dict[str, Any]], groups: Groups) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for name, colour in (("small", MUTED), ("large", COLOURS["train"])):
        for run in runs:
            if (run["data"], run["arm"]) == (arm.data, name) and run.get("curve"):
                epochs, top1 = zip(*run["curve"], strict=True)
                left.plot(epochs, [100 * value for value in top1], color=colour, lw=1)
        left.plot([], [], color=colour, label=f"{name} batch")
    last = [run["curve"][-1][1] for run in runs if run["data"] == arm.data and run.get("curve")]
    left.set_ylim(bottom=100 * min(last) - 12)  # where the ends can be told apart
    left.legend(frameon=False)
    left.set_xlabel("Epoch")
    left.set_title(f"{TITLES[arm.data]}: top-1, %")
    arms = {end: values for end, values in groups[arm.key].items() if end in ENDS}
    ends = [end for end in ENDS if end in arms and end != "control"]
    for place, end in enumerate(ends):
        differences = paired(arms[end], arms["control"])
        found = student(differences)
        right.plot(differences, [place] * len(differences), "o", color=MUTED, ms=4, alpha=0.6)
        right.plot([found["low"], found["high"]], [place, place], color=COLOURS["statistics"])
        right.plot([found["mean"]], [place], "D", color=COLOURS["statistics"], ms=6)
    right.axvline(0, color=INK, lw=0.8)
    right.set_yticks(range(len(ends)), ends)
    right.invert_yaxis()
    right.set_title("Top-1 minus the control's, points")


if __name__ == "__main__":
    main()
