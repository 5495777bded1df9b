"""Print what polishing gains after training on images further from clean ones, and write it.

    python -m benchmarks.studies.augmentation.tables [--out build/augmentation]

Reads the records of run.py, or the newest result where DIR has none. The polished run of a seed is
compared with the one that was not; and the gain with that of crops and flips alone, of the same
seed. Intervals are Student's at 95 % over the seeds, each alone: of two dozen, one may exclude zero
by chance. A run that diverged counts as chance. Writes benchmarks/results/augmentation_<machine>_
<date>.json.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.studies.accuracies import Accuracies, print_table
from largebatch.report.seeds import difference, interval

NAME = "augmentation"

POLISHED = "-polished"
"""Ends the names of the settings with polishing; the others are the same without."""

BASELINE = "crops"


def rows(accuracies: Accuracies) -> Iterator[dict[str, Any]]:
    """Yield both accuracies of each augmentation of a recipe, the gain, and how much more it is."""
    for recipe, settings in accuracies.items():
        gains: dict[str, dict[int, float]] = {}
        trained = [name for name in settings if not name.endswith(POLISHED)]
        for name in sorted(trained, key=lambda name: (name != BASELINE, name)):
            before = settings[name]
            after = settings.get(name + POLISHED, {})
            gains[name] = {seed: after[seed] - before[seed] for seed in after if seed in before}
            more = None
            if name != BASELINE:
                more = difference(gains[name], gains[BASELINE])
            yield {
                "recipe": recipe,
                "images": name,
                "trained": interval(before.values()),
                "polished": interval(after.values()),
                "gain": interval(gains[name].values()),
                "more": more,
            }


def table(accuracies: Accuracies) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| recipe | images | trained, % | polished, % | gain, points | more than with crops |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(accuracies):
        more = row["more"].with_ends("+.2f") if row["more"] is not None else ""
        lines.append(
            f"| {row['recipe']} | {row['images']} | {row['trained'].mean:.2f} "
            f"| {row['polished'].mean:.2f} | {row['gain'].with_ends('+.2f')} | {more} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write the results if there are new records."""
    print_table(__doc__, name=NAME, table=table)


if __name__ == "__main__":
    main()
