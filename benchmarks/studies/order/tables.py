"""Print what orders in chunks and windows cost in top-1, and write it.

    python -m benchmarks.studies.order.tables [--out build/order]

Reads the records of run.py, or the newest result where DIR has none. An order is compared with the
random order of the same images and seeds; the random orders of shuffled and of sorted shards are
two samples of one thing, and show the noise. Intervals are Student's at 95 % over the seeds, each
alone. A run that diverged counts as chance. Writes benchmarks/results/order_<machine>_<date>.json.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.studies.accuracies import Accuracies, print_table
from largebatch.report.seeds import difference, interval

NAME = "order"
BASELINE = "random"


def rows(accuracies: Accuracies) -> Iterator[dict[str, Any]]:
    """Yield the accuracy of each order of a recipe, and the difference from the random order."""
    for recipe, orders in accuracies.items():
        for name in sorted(orders, key=lambda name: (name != BASELINE, name)):
            cost = None
            if name != BASELINE:
                cost = difference(orders[name], orders[BASELINE])
            yield {
                "recipe": recipe,
                "order": name,
                "top1": interval(orders[name].values()),
                "difference": cost,
            }


def table(accuracies: Accuracies) -> str:
    """Return the rows in Markdown."""
    lines = ["| recipe, shards | order | top-1, % | minus random, points |", "|---|---|---|---|"]
    for row in rows(accuracies):
        cost = row["difference"].with_ends("+.2f") if row["difference"] is not None else ""
        top1 = row["top1"].with_ends(".2f")
        lines.append(f"| {row['recipe']} | {row['order']} | {top1} | {cost} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write the results if there are new records."""
    print_table(__doc__, name=NAME, table=table)


if __name__ == "__main__":
    main()
