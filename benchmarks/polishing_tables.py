"""Means and differences of the cells of the polishing study with their intervals, in points."""

from typing import Any, TypedDict

from largebatch.lab.studies.metrics import interval

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

Table = list[dict[str, Any]]


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
    """Return every arm beside the control of its cell, and the two batches side by side."""
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


def by_group(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Return top-1 in per cent by group, arm and seed."""
    groups: dict[str, dict[str, dict[int, float]]] = {}
    for cell in cells.values():
        arms = groups.setdefault(cell["group"], {})
        for arm, reached in cell["arms"].items():
            arms.setdefault(arm, {})[cell["seed"]] = 100 * reached["top1"]
    return groups


def paired(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """Return ours - theirs for every seed that both have."""
    return [value - theirs[seed] for seed, value in ours.items() if seed in theirs]


def _batches(groups: dict[str, dict[str, dict[int, float]]]) -> Table:
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
