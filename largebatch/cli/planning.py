"""`plan --cluster` and `plan --calibrate`: the time of a recipe on other machines. They print."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.printing import print_rows
from largebatch.errors import LargebatchError, printable
from largebatch.formatting import aligned, duration, three_digits
from largebatch.recipe.loading import load_recipe

if TYPE_CHECKING:
    from largebatch.lab.planner.prediction import Prediction
    from largebatch.lab.planner.scan import Point


def add_options(plan: argparse.ArgumentParser) -> None:
    """Add the options of `plan` for other machines."""
    plan.add_argument("--cluster", metavar="NAME", help="predict its time there: a name or a file")
    plan.add_argument("--json", action="store_true", help="the prediction as JSON")
    plan.add_argument(
        "--calibrate", action="store_true", help="measure this machine and write a cluster file"
    )
    plan.add_argument("--data", type=Path, metavar="DIR", help="images for --calibrate")
    plan.add_argument(
        "--out", type=Path, metavar="FILE", help="chart (PNG) of --cluster, file of --calibrate"
    )


def wanted(args: argparse.Namespace) -> bool:
    """Return True if `plan` is about another machine; refuse options without effect."""
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
    from largebatch.lab.planner.cluster import load_cluster
    from largebatch.lab.planner.prediction import predict
    from largebatch.lab.planner.scan import best_batches, has_epoch_law

    recipe, cluster = load_recipe(args.recipe, args.set), load_cluster(args.cluster)
    prediction = predict(recipe, cluster, workers=args.workers)
    best = best_batches(recipe, cluster) if has_epoch_law(recipe, cluster) else []
    if args.out is not None:
        from largebatch.lab.planner.forecast import write_forecast

        write_forecast(args.out, recipe, cluster, prediction)
    if args.json:
        content = {**asdict(prediction), "best_batches": [asdict(point) for point in best]}
        print(json.dumps(content, indent=2))
        return 0
    drawn = {"drawn": args.out} if args.out is not None else {}
    print_rows({**_rows(prediction), **_best(best), **drawn})
    return 0


def _rows(prediction: "Prediction") -> dict[str, str]:
    """Return the rows of a prediction."""
    step = sum(prediction.step.values())
    rows = {
        "recipe": prediction.recipe,
        "cluster": f"{prediction.cluster}, {prediction.workers:,} workers",
        "global batch": f"{prediction.global_batch:,} = {prediction.workers:,} workers x "
        f"{prediction.accumulation} micro-batches x {prediction.device_batch}",
        "time": f"{duration(prediction.seconds)}, {prediction.coverage:.0%} of such runs within "
        f"{duration(prediction.low)} to {duration(prediction.high)}",
        "a step": f"{1000 * step:.2f} ms, {prediction.steps:,} of them: "
        f"{_shares(prediction.step, step)}",
        "the run": _shares(prediction.parts, prediction.seconds),
        "included": "getting up to speed, updates, waits for input, evaluations, statistics",
        "not included": "the job's own start (a minute or two), queues, checkpoints, the report, "
        "slower software",
        "throughput": f"{prediction.images_per_second:,.0f} images/s, "
        f"{prediction.images_per_second / prediction.workers:,.0f} a worker, efficiency "
        f"{prediction.efficiency:.0%}",
        "input": _input(prediction),
    }
    if prediction.memory_bytes is not None and prediction.memory_available is not None:
        rows["memory"] = (
            f"{prediction.memory_bytes / 1e9:.0f} of {prediction.memory_available / 1e9:.0f} "
            "GB a GPU"
        )
    if prediction.kilowatt_hours is not None:
        alone = ", GPUs alone" if prediction.energy_of == "GPUs" else ""
        rows["energy"] = f"at most {three_digits(prediction.kilowatt_hours)} kWh{alone}"
    if prediction.cost is not None:
        rows["cost"] = f"{prediction.cost:,.2f}"
    unfit = ": a device batch does not fit, so there is no such run"
    rows["limited by"] = prediction.limit + unfit * (prediction.limit == "memory")
    rows["what helps"] = prediction.help
    if prediction.extrapolates:
        rows["extrapolates"] = "; ".join(prediction.extrapolates)
    return rows


def _input(prediction: "Prediction") -> str:
    if not prediction.read_bytes_per_second:
        return "no image files are decoded on the way"
    return (
        f"{three_digits(prediction.read_bytes_per_second / 1e9)} GB/s of JPEG files in all; "
        f"decoding on CPUs takes {prediction.cores_per_worker:.1f} cores a worker, which has "
        f"{prediction.cores_available:g}"
    )


def _shares(parts: dict[str, float], whole: float) -> str:
    """Format the parts of a time as percentages, largest first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in ordered if part > 0.005 * whole)


def _best(points: "list[Point]") -> dict[str, str]:
    """Return a row for each number of GPUs."""
    title = "best batch for 75.9 % top-1 by the epoch law of LARS, and its time"
    head = {"GPUs": title} if points else {}
    rows = [(f"{p.global_batch:,}", f"{p.epochs:.0f} epochs", duration(p.seconds)) for p in points]
    lines = zip(points, aligned(rows, right=(0, 1)).splitlines(), strict=True)
    return head | {f"{point.workers:,}": line for point, line in lines}


def _calibrate(args: argparse.Namespace) -> int:
    from largebatch.lab.measure.calibrate import calibrate

    if args.out is None:
        raise LargebatchError("--calibrate writes a cluster file: give --out FILE.yaml")
    recipe = load_recipe(args.recipe, args.set)
    if recipe.optimizer.kind == "muon":
        raise LargebatchError(
            "optimizer.kind: muon: its workers share an update, which --calibrate measures on one; "
            "measure with another optimizer"
        )
    for line in calibrate(recipe, args.out, data=args.data):
        print(printable(line))
    return 0
