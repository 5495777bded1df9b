"""Compare the planner with published runs that it was not fitted to.

    python -m benchmarks.studies.planner.planner [--rows benchmarks/studies/planner/rows.csv]

Every system of MLPerf's ResNet-50 results is left out once and predicted from the others; beside it
is a model of five constants, without data sheets or network, left out in its own way: a
generation's runs with equal nodes and batch together. Then each generation of GPUs is left out
whole and predicted from its data sheet and one run on a single node, for every such run, and from
its data sheet alone. `--rows` predicts more runs, of which the planner knows nothing, in the
columns of the installed file.

Frozen results: planner, of 5e5e2716; planner_here (this machine against `plan --calibrate`), of
f0658091; planner_logs (starts and evaluations in MLPerf's logs), of 5e5e2716.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.speed.measuring import write
from largebatch.formatting import aligned
from largebatch.lab.planner.calibration import (
    IMAGES,
    VALIDATION,
    LeftOut,
    Published,
    fit,
    installed_fit,
    installed_left_out,
    parse_runs,
    published_runs,
    quantile,
)
from largebatch.lab.planner.cluster import Generation

START = np.log([1500, 3200, 0.01, 0.002, 0.0007])
SCALE = 0.05
"""Ratio up to which an error counts by its square."""

EVALUATION = VALIDATION / 3 / 4 / IMAGES
"""Validation forward passes every four epochs, as a fraction of the training time."""


def main() -> None:
    """Leave out, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="more runs, in the columns of the installed CSV")
    args = parser.parse_args()
    result = published()
    if args.rows is not None:
        result["more runs"] = more(args.rows)
    print(write("planner", result))


def published() -> dict[str, Any]:
    """Leave out systems and generations, and print the errors."""
    left_out = installed_left_out()
    old = [one for one in left_out if one.run.generation != "hopper"]
    before = dict(zip(old, baseline_errors([one.run for one in old]), strict=True))
    inside = dict(zip(left_out, covered(left_out), strict=True))
    rows = [_row(one, covered=inside[one], five=before.get(one)) for one in left_out]
    print_rows(rows)
    summaries = {
        "ours, systems on V100 and A100": summary([one.error for one in old]),
        "five constants": summary(list(before.values())),
    }
    generations = [_generation(each) for each in published_runs() if _is_single(each)]
    largest = max(each["largest"] for each in generations)
    summaries["a generation left out whole, worst of all single nodes"] = {"largest": largest}
    for generation in ("volta", "ampere"):
        alone = leave_generation_out(published_runs(), generation)
        errors = summary([one.error for one in alone])
        summaries[f"{generation} left out whole, with no node kept"] = errors
    for name, found in summaries.items():
        print(name, {key: f"{value:.1%}" for key, value in found.items()})
    share = sum(inside.values()) / len(inside)
    print(f"covered by 90 % intervals: {share:.1%}")
    return {
        "left out": rows,
        "summaries": summaries,
        "generations": generations,
        "covered": share,
        "quantile": quantile(left_out),
        "constants": asdict(installed_fit().constants),
    }


def more(file: Path) -> dict[str, Any]:
    """Predict the runs of a file, which the planner was not fitted to."""
    factor, known = quantile(installed_left_out()), installed_fit()
    runs = parse_runs(file.read_text(encoding="utf-8").splitlines())
    rows = [_row(one, covered=one.score <= factor, five=None) for one in map(known.predict, runs)]
    print_rows(rows)
    return {"rows": rows, "summary": summary([row["error"] for row in rows])}


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print runs with the errors of both models."""
    table = [["round", "system", "GPUs", "batch", "seconds", "ours", "in 90 %", "five constants"]]
    table += [
        [
            row["round"], row["system"], f"{row['gpus']:,}", f"{row['batch']:,}",
            f"{row['seconds']:,.1f}", f"{row['error']:+.1%}", "yes" if row["covered"] else "no",
            "" if row["five constants"] is None else f"{row['five constants']:+.1%}",
        ]
        for row in rows
    ]  # fmt: skip
    print(aligned(table, right=range(2, 8)))


def leave_generation_out(
    runs: Sequence[Published], generation: Generation, *, keep: Sequence[Published] = ()
) -> list[LeftOut]:
    """Predict a generation of GPUs from all others, its data sheets and the runs in `keep`.

    The runs in `keep` are not returned.
    """
    found = fit([run for run in runs if run.generation != generation] + list(keep))
    left = [run for run in runs if run.generation == generation and run not in keep]
    return [found.predict(run) for run in left]


def covered(left_out: Sequence[LeftOut]) -> list[bool]:
    """Return, for each system, True if it lies in the interval from the errors of all others."""
    return [
        one.score <= quantile([other for other in left_out if other is not one]) for one in left_out
    ]


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Return the median, the 90th percentile and the largest of absolute errors."""
    sizes = np.abs(errors)
    return {
        "median": float(np.median(sizes)),
        "90th percentile": float(np.quantile(sizes, 0.9)),
        "largest": float(sizes.max()),
    }


def _row(one: LeftOut, *, covered: bool, five: float | None) -> dict[str, Any]:
    return {
        "round": one.run.round,
        "system": one.run.system,
        "gpus": one.run.workers,
        "batch": one.run.global_batch,
        "seconds": one.run.seconds,
        "predicted": one.predicted,
        "error": one.error,
        "covered": covered,
        "five constants": five,
    }


def _is_single(run: Published) -> bool:
    return run.workers == run.cluster.gpus_per_node and run.generation != "hopper"


def _generation(single: Published) -> dict[str, Any]:
    left_out = leave_generation_out(published_runs(), single.generation, keep=[single])
    errors = [one.error for one in left_out]
    return {"single node": f"{single.round} {single.system}", "n": len(errors), **summary(errors)}


def baseline(runs: Sequence[Published]) -> NDArray[np.float64]:
    """Fit the five constants: rates of V100 and A100, their launch times, and that of a level.

    A step takes b (1 + evaluation) / rate + launch + level log2(nodes), with b images on a GPU.
    Returns logarithms, fitted with the soft L1 loss, so that single runs do not bend them.
    """
    found = least_squares(
        lambda logs: [math.log(baseline_seconds(run, logs) / run.seconds) for run in runs],
        START,
        loss="soft_l1",
        f_scale=SCALE,
    )
    return np.asarray(found.x)


def baseline_seconds(run: Published, logs: NDArray[np.float64]) -> float:
    """Return the time of a run on V100 or A100."""
    first = run.generation == "volta"
    rate, launch, level = np.exp(logs[[0, 2, 4] if first else [1, 3, 4]])
    step = run.device_batch * (1 + EVALUATION) / rate + launch + level * math.log2(_nodes(run))
    return float(step * run.epochs * IMAGES / run.global_batch)


def baseline_errors(runs: Sequence[Published]) -> list[float]:
    """Return the error at each run from a fit without its generation, nodes and batch."""
    errors = []
    for left in runs:
        found = baseline([run for run in runs if _like(run) != _like(left)])
        errors.append(baseline_seconds(left, found) / left.seconds - 1)
    return errors


def _nodes(run: Published) -> int:
    return run.workers // run.cluster.gpus_per_node


def _like(run: Published) -> tuple[str, int, int]:
    return run.generation, _nodes(run), run.global_batch


if __name__ == "__main__":
    main()
