"""`plan --cluster` and `plan --calibrate`: what a recipe takes on other machines. They print."""

import argparse
import json
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.errors import LargebatchError, printable
from largebatch.formatting import three_digits
from largebatch.recipe.loading import load_recipe

if TYPE_CHECKING:
    from largebatch.planner.prediction import Prediction
    from largebatch.planner.scan import Point


def add_options(plan: argparse.ArgumentParser) -> None:
    """Add to `plan` the options that are about other machines."""
    plan.add_argument("--cluster", metavar="NAME", help="predict its time there: a name or a file")
    plan.add_argument("--json", action="store_true", help="the prediction as JSON")
    plan.add_argument(
        "--calibrate", action="store_true", help="measure this machine and write a cluster file"
    )
    plan.add_argument("--data", type=Path, metavar="DIR", help="images that --calibrate reads")
    plan.add_argument(
        "--out", type=Path, metavar="FILE", help="chart (PNG) of --cluster, file of --calibrate"
    )


def wanted(args: argparse.Namespace) -> bool:
    """Return whether `plan` is about another machine; refuse options that would do nothing."""
    if args.cluster and args.calibrate:
        raise LargebatchError("--cluster predicts and --calibrate measures: give one of the two")
    if not args.cluster and not args.calibrate:
        for option, given in (("--json", args.json), ("--out", args.out)):
            if given:
                raise LargebatchError(f"{option} is for a prediction: give --cluster NAME too")
    if args.data is not None and not args.calibrate:
        raise LargebatchError("--data is for a measurement: give --calibrate too, or leave it out")
    if args.calibrate and (args.json or args.workers != 1):
        option = "--json" if args.json else "--workers"
        raise LargebatchError(
            f"{option} is for a prediction; --calibrate measures one worker, and --cluster with "
            "its file predicts more"
        )
    return bool(args.cluster or args.calibrate)


def plan_elsewhere(args: argparse.Namespace) -> int:
    """Predict a recipe on a cluster, or measure this machine."""
    if args.calibrate:
        return _calibrate(args)
    from largebatch.planner.cluster import load_cluster
    from largebatch.planner.prediction import predict
    from largebatch.planner.scan import best_batches, has_epoch_law

    recipe, cluster = load_recipe(args.recipe, args.set), load_cluster(args.cluster)
    found = predict(recipe, cluster, workers=args.workers)
    best = best_batches(recipe, cluster) if has_epoch_law(recipe, cluster) else []
    if args.out is not None:
        from largebatch.planner.forecast import write_forecast

        write_forecast(args.out, recipe, cluster, found)
    if args.json:
        content = {**asdict(found), "best_batches": [asdict(point) for point in best]}
        print(json.dumps(content, indent=2))
        return 0
    for name, value in {**_rows(found), **_best(best)}.items():
        print(printable(f"{name:>15}  {value}"))
    if args.out is not None:
        print(printable(f"{'drawn':>15}  {args.out}"))
    return 0


def _rows(found: "Prediction") -> dict[str, str]:
    """Return the rows of a prediction."""
    step = sum(found.step.values())
    rows = {
        "recipe": found.recipe,
        "cluster": f"{found.cluster}, {found.workers:,} workers",
        "global batch": f"{found.global_batch:,} = {found.workers:,} workers x "
        f"{found.accumulation} micro-batches x {found.device_batch}",
        "time": f"{time(found.seconds)}, {found.coverage:.0%} of such runs within "
        f"{time(found.low)} to {time(found.high)}",
        "a step": f"{1000 * step:.2f} ms, {found.steps:,} of them: {_shares(found.step, step)}",
        "the run": _shares(found.parts, found.seconds),
        "included": "getting up to speed, updates, waits for input, evaluations, statistics",
        "not included": "the job's own start (a minute or two), queues, checkpoints, the report",
        "throughput": f"{found.images_per_second:,.0f} images/s, "
        f"{found.images_per_second / found.workers:,.0f} a worker, efficiency "
        f"{found.efficiency:.0%}",
        "input": _input(found),
    }
    if found.memory_bytes is not None and found.memory_available is not None:
        rows["memory"] = (
            f"{found.memory_bytes / 1e9:.0f} of {found.memory_available / 1e9:.0f} GB a GPU"
        )
    if found.kilowatt_hours is not None:
        alone = ", GPUs alone" if found.energy_of == "GPUs" else ""
        rows["energy"] = f"at most {three_digits(found.kilowatt_hours)} kWh{alone}"
    if found.cost is not None:
        rows["cost"] = f"{found.cost:,.2f}"
    unfit = ": a device batch does not fit, so there is no such run"
    rows["limited by"] = found.limit + unfit * (found.limit == "memory")
    rows["what helps"] = found.help
    if found.extrapolates:
        rows["extrapolates"] = "; ".join(found.extrapolates)
    return rows


def _input(found: "Prediction") -> str:
    if not found.read_bytes_per_second:
        return "no image files are decoded on the way"
    gigabytes = three_digits(found.read_bytes_per_second / 1e9)
    return (
        f"{gigabytes} GB/s of JPEG files in all; decoding on CPUs takes "
        f"{found.cores_per_worker:.1f} cores a worker, which has {found.cores_available:g}"
    )


def _shares(parts: dict[str, float], whole: float) -> str:
    """Return the larger parts of a time, largest first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in ordered if part > 0.005 * whole)


def _best(points: "list[Point]") -> dict[str, str]:
    """Return a row for each number of GPUs."""
    head = {"GPUs": "best batch for 75.9 % top-1 by the epoch law, and its time"} if points else {}
    return head | {
        f"{point.workers:,}": f"{point.global_batch:>6,}  {point.epochs:4.0f} epochs  "
        f"{time(point.seconds)}"
        for point in points
    }


def time(seconds: float) -> str:
    """Return a time with three digits at least.

    >>> [time(seconds) for seconds in (20.83, 1721.4, 400_000)]
    ['20.8 s', '0:28:41', '4 days, 15:06:40']
    >>> time(1e30)
    '1e+30 s'
    """
    if seconds < 100 or seconds > timedelta.max.total_seconds():
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))


def _calibrate(args: argparse.Namespace) -> int:
    from largebatch.measure.calibrate import calibrate

    if args.out is None:
        raise LargebatchError("--calibrate writes a cluster file: give --out FILE.yaml")
    for line in calibrate(load_recipe(args.recipe, args.set), args.out, data=args.data):
        print(printable(line))
    return 0
