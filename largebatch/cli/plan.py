"""The command `plan`: the arithmetic of a run, and its time here or on a cluster. It prints."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from largebatch.cli.printing import print_json, print_rows
from largebatch.errors import LargebatchError, printable
from largebatch.formatting import duration, three_digits
from largebatch.lab.planner.cluster import installed_clusters, load_cluster
from largebatch.recipe.arithmetic.describe import (
    describe_batch_changes,
    describe_division,
    describe_protocol,
    describe_spans,
)
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_tree
from largebatch.runs.options import Changes, Count, Given, RecipeFile, completing
from largebatch.schedules.build import follow

ClusterName = Annotated[
    str, Parameter(completer=completing(".yaml", installed_clusters), metavar="NAME")
]


def plan(  # noqa: PLR0913 -- its options
    recipe: RecipeFile,
    /,
    *,
    workers: Count = 1,
    cluster: ClusterName | None = None,
    json: bool = False,
    calibrate: bool = False,
    data: Path | None = None,
    out: Path | None = None,
    changes: Annotated[Changes, Given] = Changes(),
) -> None:
    """Print the arithmetic of a run, and measure the time of a step on this machine.

    Args:
        workers: Number of workers to plan for.
        cluster: Predict the time there instead: a name of `lab clusters`, or a file.
        json: Print the prediction as JSON.
        calibrate: Measure this machine instead, and write a cluster file.
        data: Images for --calibrate.
        out: File of --calibrate.
    """
    if calibrate and (cluster or workers != 1):
        raise LargebatchError("--calibrate measures a worker; leave out --cluster and --workers")
    if not calibrate and (out or data):
        raise LargebatchError("--out and --data are for a measurement: give --calibrate too")
    if json and not cluster:
        raise LargebatchError("--json is for a prediction: give --cluster NAME too")
    loaded = load_recipe(recipe, changes.changes)
    if calibrate:
        from largebatch.lab.measure.calibrate import calibrate as measure

        if out is None:
            raise LargebatchError("--calibrate writes a cluster file: give --out FILE.yaml")
        measure(loaded, out, data=data)
        print(printable(f"cluster file: {out}"))
        return
    if not cluster:
        _plan(loaded, workers, changes.imports)
        return
    from largebatch.lab.planner.prediction import describe, predict, workload

    prediction = predict(workload(loaded, workers=workers), load_cluster(cluster))
    if json:
        print_json(asdict(prediction))
    else:
        print_rows(describe(prediction))


def _plan(recipe: Recipe, workers: int, imports: Sequence[str]) -> None:
    protocol = recipe.protocol
    if protocol is not None:
        if workers != 1:
            protocol.require_workers(workers)
        workers = protocol.workers
    plan = make_plan(recipe, workers=workers)
    division = {"global batch": describe_division(plan)}
    if protocol:
        division = {"protocol": describe_protocol(protocol, global_batch=plan.global_batch)}
    rows = {
        "recipe": recipe.name,
        **division,
        **describe_batch_changes(plan),
        "BatchNorm span": describe_spans(plan),
        "data": f"{plan.train_samples:,} training, {plan.val_samples:,} validation samples"
        + (", held out of the training images" if recipe.data.held_out else ""),
        **follow(recipe.schedule, plan).facts(),
        "evaluations": f"{len(plan.evaluate_after)} on the way, one after each stage",
    }
    if plan.steps_per_epoch < 1:
        times = plan.global_batch / plan.train_samples
        rows["an epoch"] = f"is less than a batch, which has every image {times:.2f} times"
    if plan.sizes:
        parts = [f"{piece.image_size} until step {piece.end:,}" for piece in plan.sizes]
        rows["image size"] = f"{', '.join(parts)}; clean and evaluation {recipe.data.image_size}"
    if recipe.polish:
        polish = recipe.polish.model_dump(mode="json", exclude_unset=True)
        rows["polish"] = dump_tree(polish, flow=True).strip()
    print_rows(rows)
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.estimate import estimate

    for module in imports:
        import_own(module)
    found = estimate(recipe, plan)
    machine = (
        f"{three_digits(1000 * found.step_seconds)} ms a step of one worker on {found.device} in "
        f"{found.precision}, {duration(found.run_seconds)} for all; "
        f"{found.memory_bytes / 2**30:.2g} GiB; measured on {found.samples} samples"
    )
    print_rows({"this machine": machine, "included": "forward, backward and update of every step"})
