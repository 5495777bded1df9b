"""Print what polishing gains in the study on a GPU, by pairs of seeds, and write it as results.

    python -m benchmarks.studies.polishing_gpu.tables [--out build/polishing_gpu]

Reads the records of run.py, or of the newest result where DIR has none. Each end of a run is
compared with the weights as trained, of the same recipe and seed; intervals are Student's over the
seeds, of the four ends of a recipe together (Bonferroni). A run that diverged counts as chance.
Writes benchmarks/results/polishing_gpu_<hardware>_<date>.json and the page polishing.html in DIR.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.speed.measuring import RESULTS, newest, write
from largebatch.report.pages import Column, Page, PageSection, Table
from largebatch.report.seeds import difference, interval

NAME = "polishing_gpu"
ENDS = {
    "as trained": ("statistics", -2),
    "statistics": ("statistics", -1),
    "clean": ("clean", -2),
    "clean, statistics": ("clean", -1),
    "affine": ("affine", -1),
}
"""Setting of each end, and its place among the evaluations of a run."""

Ends = dict[str, dict[str, dict[int, float]]]
"""Top-1 in per cent by recipe, end and seed."""


def read(folder: Path) -> Ends:
    """Return the ends of all recorded runs."""
    found: Ends = {}
    for end, (setting, place) in ENDS.items():
        for path in sorted(folder.glob(f"*/{setting}/seed-*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            top1 = record["top1"] if record["diverged"] else record["evaluations"][place]["top1"]
            recipe = found.setdefault(path.parts[-3], {})
            recipe.setdefault(end, {})[record["seed"]] = 100 * top1
    return found


def rows(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Iterator[dict[str, Any]]:
    """Yield the mean of each end of a recipe, and its difference to the weights as trained."""
    for recipe, ends in found.items():
        for end, values in ends.items():
            seeds = {int(seed): value for seed, value in values.items()}
            trained = {int(seed): value for seed, value in ends["as trained"].items()}
            gain = difference(seeds, trained, together=len(ENDS) - 1)
            yield {
                "recipe": recipe,
                "end": end,
                "top1": interval(seeds.values()),
                "gain": None if end == "as trained" else gain,
            }


def page(found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Page:
    """Return the page: the gains that are more than noise, and the table."""
    every = list(rows(found))
    gains = [row for row in every if row["gain"] is not None]
    clear = [row for row in gains if row["gain"].low > 0 or row["gain"].high < 0]
    text = [
        f"{row['recipe']}, {row['end']}: {row['gain'].with_ends('+.2f', ' points')}"
        for row in clear
    ]
    columns = [
        Column("Recipe", [row["recipe"] for row in every]),
        Column("End", [row["end"] for row in every]),
        Column("Top-1, %", [row["top1"].with_ends(".2f") for row in every]),
        Column(
            "Against as trained, points",
            [row["gain"].with_ends("+.2f") if row["gain"] else None for row in every],
        ),
        Column("Seeds", [row["top1"].number for row in every], "d"),
    ]
    return Page(
        title="What polishing gains",
        subtitle="CIFAR-10, ResNet-9 at full width",
        findings=text or ["No way of polishing changed top-1 by more than the noise of seeds."],
        is_sound=all(row["top1"].number >= 3 for row in every),
        note=f"{len(clear)} of {len(gains)} differences are more than the noise of seeds.",
        sections=[PageSection(title="Ends", parts=[Table(name="ends", columns=columns)])],
        source="the records of a study",
    )


def main() -> None:
    """Print the table, and write the results and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build") / NAME, metavar="DIR")
    folder = parser.parse_args().out
    found: Mapping[str, Mapping[str, Mapping[int, float]]] = read(folder)
    if found:
        write(NAME, {"top1": found})
    elif (path := newest(NAME, RESULTS, machine="*")) is not None:
        found = json.loads(path.read_text(encoding="utf-8"))["top1"]
    else:
        raise SystemExit("no records: python -m benchmarks.studies.polishing_gpu.run")
    drawn = page(found)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{drawn.text()}\npage: {drawn.write(folder / 'polishing.html')}")


if __name__ == "__main__":
    main()
