"""The command `batch`: how large a batch, measured on one's own images. It prints."""

import shlex
from dataclasses import asdict
from typing import Annotated

from largebatch.cli.plan import ClusterName
from largebatch.cli.printing import INTERRUPTED, wrapped
from largebatch.cli.recipe import write_recipe
from largebatch.distributed.environment import worker_rank
from largebatch.errors import LargebatchError, printable
from largebatch.lab.planner.cluster import load_cluster
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

RESULT = "batch.json"


def batch(
    recipe: RecipeFile,
    /,
    *,
    minutes: Number = 10.0,
    cluster: ClusterName | None = None,
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
    place = None
    if cluster is not None:
        place = load_cluster(cluster)
        if price is not None:
            place = place.model_copy(update={"price_per_gpu_hour": price})
    elif price is not None:
        raise LargebatchError("--price is of a GPU hour of a cluster: give --cluster NAME too")
    loaded = load_recipe(recipe, options.changes)
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.batch import Question, advise, describe, draft

    if worker_rank() is not None:
        raise LargebatchError("batch starts its workers itself: give --workers N, no launcher")
    for module in options.imports:
        import_own(module)
    out = chosen_folder(out, loaded.name)
    question = Question(
        recipe=loaded,
        options=options.options(out=out).without_changes(),
        minutes=minutes,
        cluster=place,
    )
    try:
        advice = advise(question)
    except InterruptedStudyError:
        print(printable(f"stopped before the end; start again with another --out than {out}"))
        return INTERRUPTED
    for line in describe(advice):
        print(wrapped(line))
    result = dict(zip(("critical", "low", "high"), advice.critical, strict=True)) | {
        "noise": asdict(advice.noise),
        "rows": [asdict(row) for row in advice.rows],
        "chosen": advice.chosen.batch,
        "rate": advice.rate,
    }
    write_json(out / RESULT, result)
    path = out / f"{advice.advised.name}.yaml"
    write_recipe(path, draft(advice))
    where = f" --data {shlex.quote(str(options.data))}" if options.data else ""
    print(printable(f"recipe: {path}\ntrain it: largebatch train {shlex.quote(str(path))}{where}"))
    return 0
