"""The results of measure.py -> one page for each recipe in docs/recipes, with a curve and a table.

    python benchmarks/measure_pages.py

Reads the newest benchmarks/results/recipes_<machine>_<date>.json and trains nothing. A page says of
every number how many seeds it is the mean of; what is not measured yet stands there as such.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import ARMS, NAME, SEARCH_PART, SEEDS, TRIALS, Arm
from measuring import RESULTS, newest
from polishing_tables import by_group, paired, student

from largebatch import load_recipe
from largebatch.recipe.plan import make_plan
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
    "ema": "moving average of the control's weights",
    "ema + statistics": "the same, then the exact statistics pass",
}
UNKNOWN = "not measured yet"

Groups = dict[str, dict[str, dict[int, float]]]


def main() -> None:
    """Write every page and figure that there are results for."""
    path = newest(NAME, RESULTS)
    if path is None:
        raise SystemExit("there are no results yet: make measure")
    content = json.loads(path.read_text(encoding="utf-8"))
    runs = content["runs"]
    groups = by_group(
        {key: {**run, "group": f"{run['data']}, {run['arm']}"} for key, run in runs.items()}
    )
    PAGES.mkdir(exist_ok=True)
    for arm in ARMS:
        if arm.name in {"small", "large"} and arm.key in groups:
            draw = partial(_draw, arm=arm, runs=list(runs.values()), groups=groups)
            save_png(PAGES / f"{arm.recipe}.png", draw, size=(820, 380), pixels=1640)
            text = page(arm, groups, runs, content, source=path.name)
            (PAGES / f"{arm.recipe}.md").write_text(text, encoding="utf-8")
            print(PAGES / f"{arm.recipe}.md")


def page(
    arm: Arm, groups: Groups, runs: dict[str, Any], content: dict[str, Any], *, source: str
) -> str:
    """Return the page of a recipe."""
    recipe = load_recipe(arm.recipe)
    plan = make_plan(recipe, workers=1)
    own = [run for run in runs.values() if run["data"] == arm.data and run["arm"] == arm.name]
    rate = own[0]["rate"]
    seconds = sum(run["seconds"] for run in own) / len(own) if "seconds" in own[0] else math.nan
    facts = (
        f"{TITLES[arm.data]}, {recipe.model.name}, batch {plan.global_batch:,}, "
        f"{recipe.duration.epochs:g} epochs of {plan.steps_per_epoch:.1f} updates, "
        f"{recipe.optimizer.kind}. Peak rate {rate:g}, the best of {TRIALS} by a search in which "
        f"every arm had as many trials of {SEARCH_PART:.0%} of the epochs, judged on 5,000 "
        f"training images. {len(own)} of {SEEDS} seeds; {seconds / 60:.0f} minutes a seed on one "
        "core, beside another run."
    )
    results = (
        f"Results, command, versions: [benchmarks/results/{source}](../../benchmarks/results/"
        f"{source}), made by `make measure` on {content['machine']}. Intervals are Student's over "
        "the seeds, differences are paired by seed."
    )
    lines = [
        *(f"# `{arm.recipe}`", "", facts, ""),
        *(f"![Top-1 by epoch, and how each way to end differs]({arm.recipe}.png)", ""),
        *(*_table(arm, groups), "", *_findings(arm, groups), "```console"),
        f"$ largebatch train {arm.recipe} --data DIR --set schedule.peak_lr={rate:g}",
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


def _findings(arm: Arm, groups: Groups) -> list[str]:
    """Return what the other arms of the set say about this one."""
    if arm.name != "large":
        return []
    small = groups.get(f"{arm.data}, small", {}).get("control", {})
    ours = groups[arm.key]
    nesterov = groups.get(f"{arm.data}, large, Nesterov", {}).get("control", {})
    polished = ours.get("clean + statistics", {})
    cost = f"{_points(ours['control'], small)}; polished: {_points(polished, small)}"
    lines = [
        f"- The large batch costs, against the small one: {cost}.",
        f"- Nesterov SGD with a tuned rate, against LARS: {_points(nesterov, ours['control'])}.",
    ]
    longer = groups.get(f"{arm.data}, large, 1.25 times as long", {}).get("control", {})
    what = "Trained 1.25 times as long without polishing, against polished at the usual length"
    return [*lines, f"- {what}: {_points(longer, polished)}.", ""]


def _points(ours: dict[int, float], theirs: dict[int, float]) -> str:
    differences = paired(ours, theirs)
    return f"{_interval(differences, '+.2f')} points" if differences else UNKNOWN


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
