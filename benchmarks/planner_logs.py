"""Read from MLPerf's logs what a run takes besides its updates: its start and its evaluations.

    python benchmarks/planner_logs.py CHECKOUT ...

A CHECKOUT is a clone of github.com/mlcommons/training_results_v0.6, v0.7, v1.1 or v2.0. Every log
of a run that the planner is fitted to is read. The start is the time from `run_start` to the first
epoch, and what the first epoch takes longer than the median one. An evaluation is the time between
`eval_start` and `eval_stop`, less its forward passes by the planner. The geometric means over
systems of 32 nodes or more, with their standard errors, are the priors of the planner's constants
(largebatch/lab/planner/calibration.py). A single node reads its images from a disk in its first
epoch, which takes it up to half a minute.
"""

import argparse
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import write

from largebatch.formatting import aligned
from largebatch.lab.planner.calibration import installed_fit
from largebatch.lab.planner.model import evaluation_seconds, machine
from largebatch.lab.planner.published import VALIDATION, Published, published_runs

FEWEST_NODES = 32
LOG = re.compile(r"/results/(?P<system>[^/]+)/resnet/result_\d+\.txt$")
LINE = re.compile(
    r":::MLL (?P<seconds>[\d.]+) (?P<old>\w+):"  # v0.6
    r'|:::MLLOG .*?"time_ms": (?P<milliseconds>\d+).*?"key": "(?P<new>\w+)"'
)

Log = dict[str, list[float]]
"""Times in seconds of each key of a log."""


def main() -> None:
    """Read the logs, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    args = parser.parse_args()
    runs = {run.system: run for run in published_runs()}
    logs: dict[str, list[Log]] = {}
    for system, text in _texts(args.checkouts):
        if system in runs:
            logs.setdefault(system, []).append(parse_log(text))
    rows = [_row(runs[system], logs[system]) for system in runs if system in logs]
    table = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    print(aligned(table, right=range(2, 8)))
    result = {"rows": rows, "means": means(rows)}
    print(result["means"])
    print(write("planner_logs", f"python {sys.argv[0]} CHECKOUT ...", result))


def _texts(checkouts: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the system and the text of each log that the checkouts store."""
    for folder in checkouts:
        for name in _git(folder, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
            if (found := LOG.search(f"/{name}")) and (text := _git(folder, "show", f"HEAD:{name}")):
                yield found["system"], text


def _git(folder: Path, *command: str) -> str:
    """Return what a git command prints; nothing if it fails, as for a file that is not stored."""
    done = subprocess.run(
        ["git", "-C", folder, *command], capture_output=True, check=False, encoding="utf-8"
    )
    return done.stdout


def parse_log(text: str) -> Log:
    """Return the times of each key.

    >>> parse_log(':::MLL 7.5 run_start: {"value": null}')
    {'run_start': [7.5]}
    """
    times: Log = {}
    for found in LINE.finditer(text):
        key = found["old"] or found["new"]
        seconds = float(found["seconds"] or float(found["milliseconds"]) / 1000)
        times.setdefault(key, []).append(seconds)
    return times


def start_of(log: Log) -> float:
    """Return the seconds before the first epoch, and those that it takes beyond the median one.

    >>> start_of({"run_start": [0], "epoch_start": [2, 7, 10], "epoch_stop": [6, 10, 13]})
    3
    """
    begins, ends = (log[f"{_span(log)}_{end}"] for end in ("start", "stop"))
    epochs = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return begins[0] - log["run_start"][0] + epochs[0] - statistics.median(epochs)


def _span(log: Log) -> str:
    """Return the name of the parts of a run: epochs, or blocks of epochs where these are absent."""
    return "epoch" if "epoch_start" in log else "block"


def evaluation_of(log: Log) -> float:
    """Return the mean seconds of an evaluation."""
    pairs = zip(log["eval_start"], log["eval_stop"], strict=True)
    return statistics.mean(end - begin for begin, end in pairs)


def _row(run: Published, logs: Sequence[Log]) -> dict[str, Any]:
    on = machine(run.cluster, installed_fit().constants, software=run.software)
    forward = evaluation_seconds(
        replace(on, evaluation=0.0), workers=run.workers, samples=VALIDATION
    )
    return {
        "system": run.system,
        "software": run.software,
        "nodes": run.workers // run.cluster.gpus_per_node,
        "logs": len(logs),
        "start": round(statistics.mean(map(start_of, logs)), 2),
        "evaluation": round(statistics.mean(map(evaluation_of, logs)), 4),
        "without passes": round(statistics.mean(map(evaluation_of, logs)) - forward, 4),
    }


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return geometric means of large systems, and the standard errors of their logarithms."""
    large = [row for row in rows if row["nodes"] >= FEWEST_NODES]
    values = {
        f"start {software}": [row["start"] for row in large if row["software"] == software]
        for software in ("launched", "graphs")
    }
    values["evaluation"] = [row["without passes"] for row in large]
    return {name: _mean(each) for name, each in values.items()}


def _mean(values: Sequence[float]) -> dict[str, float]:
    logs = [math.log(value) for value in values]
    return {
        "mean": math.exp(statistics.mean(logs)),
        "error": statistics.stdev(logs) / math.sqrt(len(logs)),
        "n": len(logs),
    }


if __name__ == "__main__":
    main()
