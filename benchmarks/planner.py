"""Compare the planner with published runs that it was not fitted to, and with this machine.

    python benchmarks/planner.py [--rows FILE.csv]
    python benchmarks/planner.py --here [--rounds 5] [--workers 2 4 8]

Published: every system of MLPerf's ResNet-50 results is left out once and predicted from the
others; beside it stands the model of five constants (planner_baseline.py), left out in its own way:
a generation's runs with equal nodes and batch at once. Then each generation of GPUs is left out
whole and predicted from its data sheet and one run on a single node, for every such run, and from
its data sheet alone. `--rows`
predicts more runs, of which the planner knows nothing, in the columns of the installed file.

Here: in every round the machine is measured as `largebatch plan --calibrate` does it, and then the
recipe planner_digits.yaml trains on several workers. Predicted and measured seconds of a step are
compared as pairs, with what the cores worked for a step and with what it waited for other programs
besides; the load average is recorded.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from measuring import write
from planner_baseline import baseline_errors

from largebatch import load_recipe, run
from largebatch.distributed.environment import available_cores, own_rank
from largebatch.formatting import aligned
from largebatch.lab.measure.calibrate import measure
from largebatch.lab.planner.calibration import (
    LeftOut,
    fit,
    installed_fit,
    installed_left_out,
    quantile,
)
from largebatch.lab.planner.cluster import Cluster, Generation
from largebatch.lab.planner.prediction import predict
from largebatch.lab.planner.published import Published, parse_runs, published_runs
from largebatch.runs.launch import start_workers
from largebatch.tracking.events import StageName
from largebatch.training.loop import Update
from largebatch.training.step_log import StepLog

RECIPE = Path(__file__).parent / "recipes" / "planner_digits.yaml"
STEPS, WARM_UP = 40, 10
"""Number of updates of a run here, and how many of them do not count."""


def main() -> None:
    """Run one of the two comparisons, print it and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="more runs, in the columns of the installed CSV")
    parser.add_argument("--here", action="store_true", help="measure this machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        be_worker(args.worker)
        return
    command = " ".join(["python", *sys.argv])
    if args.here:
        print(write("planner_here", command, here(args.rounds, args.workers)))
        return
    result = published()
    if args.rows is not None:
        result["more runs"] = more(args.rows)
    print(write("planner", command, result))


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


def here(rounds: int, numbers: list[int]) -> dict[str, Any]:
    """Compare predicted with measured seconds of a step on this machine."""
    recipe, cores = load_recipe(RECIPE), available_cores()
    pairs: dict[int, list[dict[str, float]]] = {workers: [] for workers in numbers}
    for _ in range(rounds):
        found = measure(recipe)
        cluster = Cluster(
            name="here", measured=found, gpus_per_node=cores, nodes=1, cpu_cores=cores
        )
        for workers in numbers:
            predicted = sum(predict(recipe, cluster, workers=workers).step.values())
            pair = {"predicted": predicted, **_step_seconds(workers, cores)}
            pair["load average"] = os.getloadavg()[0]
            pairs[workers].append(pair)
            print(workers, {name: round(value, 4) for name, value in pair.items()}, flush=True)
    errors = {
        str(workers): {
            name: statistics.median(one["predicted"] / one[name] - 1 for one in each)
            for name in ("worked", "waited")
        }
        for workers, each in pairs.items()
    }
    print(json.dumps(errors, indent=1))
    return {"rounds": rounds, "median errors": errors, "pairs": pairs}


def _step_seconds(workers: int, cores: int) -> dict[str, float]:
    """Return the seconds of a step in a real run, by two clocks.

    `waited` is what a step took, other programs included; `worked` what a core worked for it, as
    often as workers share a core: what it takes where nothing else runs and nobody waits.
    """
    with tempfile.TemporaryDirectory() as folder:
        start_workers([__file__, "--worker", folder], workers=workers)
        files = Path(folder).glob("*.json")
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    turns = max(1.0, workers / cores)
    return {
        "worked": turns * statistics.mean(each["worked"] for each in found),
        "waited": statistics.mean(each["waited"] for each in found),
    }


def be_worker(folder: Path) -> None:
    """Train as one of the workers; write the median seconds between its steps by two clocks."""
    times: dict[str, list[float]] = {"worked": [], "waited": []}
    add = StepLog.add

    def noting(log: StepLog, stage: StageName, update: Update) -> None:
        add(log, stage, update)
        times["worked"].append(time.process_time())
        times["waited"].append(time.perf_counter())

    StepLog.add = noting  # type: ignore[assignment,method-assign]  # two clocks
    run(load_recipe(RECIPE), out=folder / "run", max_steps=STEPS)
    found = {name: statistics.median(np.diff(each[WARM_UP:])) for name, each in times.items()}
    (folder / f"{own_rank()}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
