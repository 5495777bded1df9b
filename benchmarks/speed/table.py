"""Write benchmarks/README.md: the newest result of each benchmark, then of each study.

    python -m benchmarks.speed.table

A row of rows.csv names a figure of a benchmark's results and its target. A cell holds the median of
the paired ratio, its 95 % interval and n. "not measured" means that benchmarks/results/ has no file
of this benchmark for this kind of machine; "stale", that the measured code has changed since.
"""

import csv
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed.measuring import RESULTS
from benchmarks.speed.sources import MEASURED, is_stale

PAGE = Path(__file__).parents[1] / "README.md"
MACHINES = ("CPU", "GPU")

HEAD = """# Measurements

Written by `python -m benchmarks.speed.table` from `results/`, whose files hold machine, command,
versions, commit, n and spread.

## Speed

Ratios are of times, ours first; shares are of rates; both are paired round by round: median (95 %
bootstrap interval, n). "stale": the measured code has changed since in more than comments. `make
bench` and `make bench-gpu` measure again.

"""

STUDIES = """
## Studies

Frozen: each was made once, at its commit. `studies/` has what prints their tables and draws their
figures (`make study`); other scripts: `git show 5b0d6675:benchmarks/NAME.py`.

| study | commit | command |
|---|---|---|
"""


class Row(NamedTuple):
    """A figure in the results of a benchmark, and its target."""

    benchmark: str
    path: str
    target: str
    what: str


def _rows() -> list[Row]:
    with (Path(__file__).parent / "rows.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file, delimiter="|")]


ROWS = _rows()


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


def page() -> str:
    """Return the page."""
    newest = {kind: _newest(kind) for kind in MACHINES}
    lines = ["| what | target | CPU | GPU |", "|---|---|---|---|"]
    for row in ROWS:
        cells = [_cell(newest[kind].get(row.benchmark), row) for kind in MACHINES]
        lines.append(f"| {row.what} | {row.target} | {' | '.join(cells)} |")
    lines.append("")
    studies = []
    for kind in MACHINES:
        by_machine: dict[str, list[str]] = {}
        for name, result in sorted(newest[kind].items()):
            about = result if "command" in result else next(iter(result.values()))
            commit = about["commit"][:8]
            if name in MEASURED:
                by_machine.setdefault(about["machine"], []).append(f"{name} {commit}")
            else:
                studies.append(f"| {name} | {commit} | `{about['command']}` |")
        lines += [f"{kind}, {machine}: {', '.join(it)}.\n" for machine, it in by_machine.items()]
    return HEAD + "\n".join(lines) + STUDIES + "\n".join(studies) + "\n"


def _newest(kind: str) -> dict[str, Any]:
    """Return the newest result of each name on one kind of machine.

    The parts of a study that was made piece by piece each have a command, machine and date.
    """
    found: dict[str, Any] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem.rpartition("_")[2]):
        name, hardware, _ = path.stem.rsplit("_", 2)
        if hardware.startswith("cpu") == (kind == "CPU"):
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _cell(result: Any, row: Row) -> str:  # noqa: ANN401 -- JSON
    figure = result
    for key in row.path.split(" > "):
        figure = None if figure is None else figure.get(key)
    if figure is None:
        return "not measured"
    shown = "{median:.3f} ({low:.3f} to {high:.3f}, {n})".format(**figure)
    return shown + _mark(row.benchmark, result)


def _mark(name: str, result: dict[str, Any]) -> str:
    return ", stale" if is_stale(name, result) else ""


if __name__ == "__main__":
    main()
