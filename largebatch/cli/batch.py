"""The command `batch`: how large a batch, measured on one's own images. It prints."""

import argparse
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import (
    INTERRUPTED,
    Command,
    add_execution,
    add_machine,
    add_recipe,
    add_workers,
    number,
    options_of,
    out_folder,
)
from largebatch.cli.printing import wrapped
from largebatch.cli.recipe import write_recipe
from largebatch.distributed.environment import worker_rank
from largebatch.errors import LargebatchError, printable
from largebatch.recipe.loading import load_recipe
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.tracking.events import write_json

if TYPE_CHECKING:
    from largebatch.lab.measure.batch import Advice
    from largebatch.lab.planner.cluster import Cluster

CHART, RESULT = "batch.png", "batch.json"

minutes = partial(number, expected="minutes above 0, such as 10")
price = partial(number, expected="a price above 0, such as 2.5")


def add_commands(command: Command) -> None:
    """Add the command `batch`."""
    text = "measure how large a batch pays on your images, and write the recipe for it"
    added = command("batch", _batch, text)
    add_recipe(added)
    add_execution(added)
    added.add_argument(
        "--minutes", type=minutes, default=10.0, metavar="M", help="time of the measurements (10)"
    )
    add_workers(added, dest="workers")
    added.add_argument("--cluster", metavar="NAME", help="where it will run: a name or a file")
    added.add_argument("--price", type=price, metavar="P", help="of a GPU hour there")
    add_machine(added)
    added.add_argument("--out", type=out_folder, metavar="DIR", help="folder (runs/<name>-<time>)")


def _batch(args: argparse.Namespace) -> int:
    cluster = _cluster(args)
    recipe = load_recipe(args.recipe, args.set)
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.batch import Question, advise
    from largebatch.runs.folder import default_folder

    if worker_rank() is not None:
        raise LargebatchError("batch starts its workers itself: give --workers N, no launcher")
    for module in args.imports:
        import_own(module)
    options = options_of(args, out=args.out or default_folder(recipe))
    question = Question(
        recipe=recipe,
        options=options,
        minutes=args.minutes,
        workers=args.workers,
        cluster=cluster,
    )
    try:
        advice = advise(question)
    except InterruptedStudyError:
        print(
            printable(f"stopped before the end; start again with another --out than {options.out}")
        )
        return INTERRUPTED
    _show(advice, options.out, args.data)
    return 0


def _cluster(args: argparse.Namespace) -> "Cluster | None":
    """Return the cluster of the options, with the price."""
    if args.cluster is None:
        if args.price is not None:
            raise LargebatchError("--price is of a GPU hour of a cluster: give --cluster NAME too")
        return None
    from largebatch.lab.planner.cluster import load_cluster

    cluster = load_cluster(args.cluster)
    if args.price is None:
        return cluster
    return cluster.model_copy(update={"price_per_gpu_hour": args.price})


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
