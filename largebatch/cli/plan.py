"""The command `plan`: the arithmetic of a run, and its time here or on a cluster. It prints."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from largebatch.cli.printing import print_rows
from largebatch.errors import LargebatchError, printable
from largebatch.formatting import aligned, duration, plural, three_digits
from largebatch.recipe.arithmetic.describe import (
    describe_decoding,
    describe_division,
    describe_protocol,
    describe_spans,
)
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import Changes, Count, Given, RecipeFile
from largebatch.schedules.build import follow

if TYPE_CHECKING:
    from largebatch.lab.planner.prediction import Point


def plan(  # noqa: PLR0913 -- its options
    recipe: RecipeFile,
    /,
    *,
    workers: Count = 1,
    cluster: str | None = None,
    json: bool = False,
    calibrate: bool = False,
    data: Path | None = None,
    out: Path | None = None,
    changes: Annotated[Changes, Given] = Changes(),
) -> None:
    """Print the arithmetic of a run, and measure the time of a step on this machine.

    Args:
        workers: Number of workers to plan for.
        cluster: Predict the time there instead: the name of a cluster, or a file.
        json: Print the prediction as JSON.
        calibrate: Measure this machine instead, and write a cluster file.
        data: Images for --calibrate.
        out: Chart (PNG) of --cluster; file of --calibrate.
    """
    if calibrate and (cluster or json or workers != 1):
        raise LargebatchError(
            "--calibrate measures a worker; leave out --cluster, --json, --workers"
        )
    if not cluster and not calibrate and (json or out):
        raise LargebatchError("--json and --out are for a prediction: give --cluster NAME too")
    if data is not None and not calibrate:
        raise LargebatchError("--data is for a measurement: give --calibrate too, or leave it out")
    loaded = load_recipe(recipe, changes.changes)
    if calibrate:
        from largebatch.lab.measure.calibrate import calibrate as measure

        if out is None:
            raise LargebatchError("--calibrate writes a cluster file: give --out FILE.yaml")
        if loaded.optimizer.kind == "muon":
            raise LargebatchError(
                "optimizer.kind: muon: its workers share an update, which --calibrate measures on "
                "one; measure with another optimizer"
            )
        for line in measure(loaded, out, data=data):
            print(printable(line))
    elif cluster:
        _predict(loaded, cluster, workers=workers, out=out, as_json=json)
    else:
        _plan(loaded, workers, changes.imports)


def _plan(recipe: Recipe, workers: int, imports: Sequence[str]) -> None:
    protocol = recipe.protocol
    if protocol is not None:
        if workers != 1:
            protocol.require_workers(workers)
        workers = protocol.workers
    plan = make_plan(recipe, workers=workers)
    course = follow(recipe.schedule, plan)
    rates, peak = course.rates, course.peak
    rows = {
        "recipe": recipe.name,
        **(
            {"protocol": describe_protocol(protocol, global_batch=plan.global_batch)}
            if protocol
            else {"global batch": describe_division(plan)}
        ),
        **_batch_changes(plan),
        "BatchNorm span": describe_spans(plan),
        "data": f"{plan.train_samples:,} training, {plan.val_samples:,} validation samples"
        + (", held out of the training images" if recipe.data.held_out else ""),
        "images": describe_decoding(recipe.execution, recipe.data.source),
        **_image_sizes(recipe.data.image_size, plan),
        "an epoch": _epoch(plan),
        "steps": f"{plan.steps:,} = {plan.train_steps:,} augmented + {plan.clean_steps:,} clean",
        "samples seen": f"{plan.position(plan.steps):,} ({plan.epoch(plan.steps):.2f} epochs)",
        "learning rate": f"from {rates[0]:g}, peak {rates[peak]:g} at step {peak} "
        f"(epoch {plan.epoch(peak):.2f}), last {rates[-1]:g}",
        "warm-up": f"{plan.warmup_steps:,} steps",
        **_polishing(recipe.polish or Polish.model_construct(), plan),
        "evaluations": f"{len(plan.evaluate_after)} on the way, one after each stage",
    }
    print_rows(rows)
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.estimate import estimate

    for module in imports:
        import_own(module)
    found = estimate(recipe, plan)
    included = {
        "this machine": f"{three_digits(1000 * found.step_seconds)} ms a step of one worker on "
        f"{found.device} in {found.precision}, {duration(found.run_seconds)} for all; "
        f"{found.memory_bytes / 2**30:.2g} GiB; measured on {found.samples} samples",
        "included": "forward, backward and update of every step",
        "not included": "starting, reading images, sums over workers, evaluations, statistics, "
        "the report",
    }
    print_rows(included)


def _batch_changes(plan: Plan) -> dict[str, str]:
    """Return a row for each change of the global batch."""
    later = zip(plan.batch_changes, plan.within(range(plan.steps))[1:], strict=True)
    return {
        f"from {piece.step:,}": f"{size:,} = {plural(plan.workers, 'worker')} x "
        f"{plural(accumulation, 'micro-batch', 'micro-batches')} x {plan.device_batch}, "
        f"epoch {plan.epoch(piece.step):.2f}, learning rate of the schedule "
        f"x {piece.lr_factor:g}"
        for piece, (_, size, accumulation) in later
    }


def _image_sizes(image_size: int, plan: Plan) -> dict[str, str]:
    """Return the row on the resolution schedule, if the recipe has one."""
    if not plan.sizes:
        return {}
    parts = [f"{piece.image_size} until step {piece.end:,}" for piece in plan.sizes]
    return {"image size": f"{', '.join(parts)}; clean and evaluation {image_size}"}


def _epoch(plan: Plan) -> str:
    """Describe the steps of an epoch, and a batch larger than an epoch."""
    sizes = [piece.global_batch for piece in plan.pieces]
    found = ", then ".join(f"{plan.train_samples / size:.2f}" for size in sizes) + " steps"
    if plan.steps_per_epoch < 1:
        times = plan.global_batch / plan.train_samples
        found += f": a batch is larger than an epoch and holds every image {times:.2f} times"
    return found


def _polishing(polish: Polish, plan: Plan) -> dict[str, str]:
    """Return the rows on the stages after the schedule."""
    rows = {}
    if polish.ema:
        rows["EMA"] = f"over some {1 / (1 - polish.ema):,.0f} updates (ema {polish.ema:g})"
    if polish.swa:
        rows["SWA"] = (
            f"the mean of {len(plan.swa_after):,} states of the weights, every {plan.swa_every:,} "
            f"of the last {plan.swa_steps:,} steps"
        )
    if polish.affine:
        rows["affine"] = (
            f"{plan.affine_steps:,} steps more, learning rate from {polish.affine.lr:g} to 0"
        )
    samples = polish.statistics.samples if polish.statistics else 0
    rows["statistics"] = f"{samples:,} clean samples" if samples else "none"
    if polish.held_out:
        rows["held out"] = f"{polish.held_out:,} training samples, which decide on every stage"
    return rows


def _predict(recipe: Recipe, name: str, *, workers: int, out: Path | None, as_json: bool) -> None:
    """Print the prediction for a recipe on a cluster."""
    from largebatch.lab.planner.cluster import load_cluster
    from largebatch.lab.planner.prediction import best_batches, describe, has_epoch_law, predict

    cluster = load_cluster(name)
    prediction = predict(recipe, cluster, workers=workers)
    best = best_batches(recipe, cluster) if has_epoch_law(recipe, cluster) else []
    if out is not None:
        from largebatch.lab.planner.forecast import write_forecast

        write_forecast(out, recipe, cluster, prediction)
    if as_json:
        content = {**asdict(prediction), "best_batches": [asdict(point) for point in best]}
        print(json.dumps(content, indent=2))
        return
    drawn = {"drawn": out} if out is not None else {}
    print_rows({**describe(prediction), **_best(best), **drawn})


def _best(points: "list[Point]") -> dict[str, str]:
    """Return a row for each number of GPUs."""
    title = "best batch for 75.9 % top-1 by the epoch law of LARS, and its time"
    head = {"GPUs": title} if points else {}
    rows = [(f"{p.global_batch:,}", f"{p.epochs:.0f} epochs", duration(p.seconds)) for p in points]
    lines = zip(points, aligned(rows, right=(0, 1)).splitlines(), strict=True)
    return head | {f"{point.workers:,}": line for point, line in lines}
