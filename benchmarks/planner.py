"""The planner against published runs that it was not fitted to, and against this machine.

    python benchmarks/planner.py [--rows FILE.csv]
    python benchmarks/planner.py --here [--rounds 5] [--workers 2 4]

Published: every system of MLPerf's ResNet-50 results is left out once and predicted from the
others; beside it stands the model of five constants (planner_baseline.py), left out in its own way:
a generation's runs with equal nodes and batch at once. Then each generation of GPUs is left out
whole and predicted from its data sheet and one run on a single node, for every such run. `--rows`
predicts more runs, of which the planner knows nothing, in the columns of the installed file.

Here: in every round the machine is measured as `largebatch plan --calibrate` does it, and then the
recipe planner_digits.yaml trains on several workers. Predicted and measured seconds of a step are
compared as pairs, with what the cores worked for a step and with what it waited for other programs
besides; the load average is recorded.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measuring import write
from planner_baseline import baseline_errors

from largebatch import load_recipe, run
from largebatch.distributed.environment import available_cores
from largebatch.planner.calibration import (
    LeftOut,
    covered,
    installed_fit,
    installed_left_out,
    leave_generation_out,
    quantile,
    summary,
)
from largebatch.planner.cluster import Cluster
from largebatch.planner.prediction import predict
from largebatch.planner.published import Published, predicted_seconds, published_runs, read_runs
from largebatch.runs.calibrate import measure

RECIPE = Path(__file__).parent / "recipes" / "planner_digits.yaml"
SHORT, LONG = 10, 60
"""Updates of the runs here."""


def main() -> None:
    """Measure one of the two, print it and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, help="more runs, in the columns of the installed CSV")
    parser.add_argument("--here", action="store_true", help="measure this machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    if args.here:
        print(write("planner_here", command, here(args.rounds, args.workers)))
        return
    result = published()
    if args.rows is not None:
        result["more runs"] = more(args.rows)
    print(write("planner", command, result))


def published() -> dict[str, Any]:
    """Leave out systems and generations, and print the table."""
    left_out = installed_left_out()
    old = [one for one in left_out if one.run.generation != "hopper"]
    before = dict(zip(old, baseline_errors([one.run for one in old]), strict=True))
    inside = dict(zip(left_out, covered(left_out), strict=True))
    print(f"{'round':6}{'system':32}{'GPUs':>6}{'batch':>8}{'seconds':>10}{'ours':>8}"
          f"{'in 90 %':>9}{'five constants':>16}")  # fmt: skip
    for one in left_out:
        five = f"{before[one]:+15.1%}" if one in before else ""
        left = one.run
        print(f"{left.round:6}{left.system[:30]:32}{left.workers:6,}{left.global_batch:8,}"
              f"{left.seconds:10,.1f}{one.error:+8.1%}{'yes' if inside[one] else 'no':>9}"
              f"{five:>16}")  # fmt: skip
    summaries = {
        "ours, 24 systems on V100 and A100": summary([one.error for one in old]),
        "five constants": summary(list(before.values())),
    }
    generations = [_generation(each) for each in published_runs() if _is_single(each)]
    largest = max(each["largest"] for each in generations)
    summaries["a generation left out whole, worst of all single nodes"] = {"largest": largest}
    for name, found in summaries.items():
        print(name, {key: f"{value:.1%}" for key, value in found.items()})
    share = sum(inside.values()) / len(inside)
    print(f"covered by 90 % intervals: {share:.1%}")
    constants = installed_fit().constants
    return {
        "left out": [_row(one, covered=inside[one], five=before.get(one)) for one in left_out],
        "summaries": summaries,
        "generations": generations,
        "covered": share,
        "quantile": quantile(left_out),
        "constants": {name: getattr(constants, name) for name in constants.__slots__},
    }


def more(file: Path) -> dict[str, Any]:
    """Predict runs of a file, which were not fitted to."""
    factor, rows, errors = quantile(installed_left_out()), [], []
    known = installed_fit()
    for new in read_runs(file):
        deviation = known.deviation(partial(predicted_seconds, new))
        one = LeftOut(run=new, predicted=known.seconds(new), deviation=deviation)
        rows.append(_row(one, covered=one.score <= factor, five=None))
        errors.append(one.error)
        print(f"{new.round:6}{new.system[:30]:32}{new.workers:6,}{new.seconds:10,.1f}"
              f"{one.error:+8.1%}")  # fmt: skip
    return {"rows": rows, "summary": summary(errors)}


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
    errors = [one.error for one in leave_generation_out(published_runs(), single)]
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
    """Return the seconds of a step when the recipe really trains, in two ways.

    `waited` is the median of what a step took, other programs included; `worked` what the cores
    worked for a step, shared by the cores that the workers have: what it takes where nothing else
    runs. It is the difference between a longer run and a shorter one, so without their starts.
    """
    short, _ = _train(workers, SHORT)
    long, waited = _train(workers, LONG)
    worked = (long - short) / (LONG - SHORT) / min(workers, cores)
    return {"worked": worked, "waited": waited}


def _train(workers: int, steps: int) -> tuple[float, float]:
    """Return the CPU seconds of a run of so many steps, and the median time of its steps."""
    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        run(load_recipe(RECIPE), workers=workers, out=out, max_steps=steps)
        lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    events = map(json.loads, lines)
    times = [event["step_seconds"] for event in events if event["event"] == "step"]
    return _cpu_seconds() - before, statistics.median(times[SHORT // 2 :])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
