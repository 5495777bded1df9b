"""The command `batch`: how large a batch, measured on one's own images. It prints."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from largebatch.cli.printing import INTERRUPTED, wrapped
from largebatch.cli.recipe import write_recipe
from largebatch.distributed.environment import worker_rank
from largebatch.errors import LargebatchError, printable
from largebatch.recipe.loading import load_recipe
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.options import (
    NEW_FOLDER,
    Folder,
    Given,
    Machine,
    Number,
    RecipeFile,
    chosen_folder,
)
from largebatch.tracking.events import write_json

if TYPE_CHECKING:
    from largebatch.lab.measure.batch import Advice
    from largebatch.lab.planner.cluster import Cluster

CHART, RESULT = "batch.png", "batch.json"


def batch(
    recipe: RecipeFile,
    /,
    *,
    minutes: Number = 10.0,
    cluster: str | None = None,
    price: Number | None = None,
    out: Folder = NEW_FOLDER,
    options: Annotated[Machine, Given] = Machine(),
) -> int:
    """Measure how large a batch pays on your images, and write the recipe for it.

    Args:
        minutes: Time of the measurements.
        cluster: The cluster it will run on: a name or a file.
        price: Price of a GPU hour there.
        out: Folder to write.
    """
    place = _cluster(cluster, price)
    loaded = load_recipe(recipe, options.changes)
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.batch import Question, advise

    if worker_rank() is not None:
        raise LargebatchError("batch starts its workers itself: give --workers N, no launcher")
    for module in options.imports:
        import_own(module)
    out = chosen_folder(out, loaded.name)
    question = Question(
        recipe=loaded,
        options=options.options(out=out).without_changes(),
        minutes=minutes,
        workers=options.workers,
        cluster=place,
    )
    try:
        advice = advise(question)
    except InterruptedStudyError:
        print(printable(f"stopped before the end; start again with another --out than {out}"))
        return INTERRUPTED
    _show(advice, out, options.data)
    return 0


def _cluster(name: str | None, price: float | None) -> "Cluster | None":
    """Return the cluster of the options, with the price."""
    if name is None:
        if price is not None:
            raise LargebatchError("--price is of a GPU hour of a cluster: give --cluster NAME too")
        return None
    from largebatch.lab.planner.cluster import load_cluster

    cluster = load_cluster(name)
    if price is None:
        return cluster
    return cluster.model_copy(update={"price_per_gpu_hour": price})


def _show(advice: "Advice", out: Path, data: Path | None) -> None:
    """Print the advice, and write its recipe, chart and numbers into a folder."""
    from largebatch.lab.measure.batch import advised, describe, draft, write_advice

    for line in describe(advice):
        print(wrapped(line))
    recipe = out / f"{advised(advice).name}.yaml"
    write_recipe(recipe, draft(advice))
    write_advice(out / CHART, advice)
    critical, low, high = advice.critical
    write_json(
        out / RESULT,
        {
            "critical": critical,
            "low": low,
            "high": high,
            "noise": asdict(advice.noise),
            "rows": [asdict(row) for row in advice.rows],
            "chosen": advice.chosen.batch,
            "chosen_at_ends": list(advice.bounds),
            "rate": advice.rate,
            "device_batch_limit": advice.most,
            "step_seconds": advice.step_seconds,
            "remarks": list(advice.remarks),
        },
    )
    print(printable(f"recipe: {recipe}\nchart: {out / CHART}"))
    where = f" --data {shlex.quote(str(data))}" if data else ""
    print(printable(f"train it: largebatch train {shlex.quote(str(recipe))}{where}"))
