"""The command `rehearse`: what one worker of a job will do, without its machines. It prints."""

import argparse
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command, add_execution, add_imports, add_recipe, count
from largebatch.cli.printing import print_rows
from largebatch.errors import LargebatchError, shorten
from largebatch.formatting import plural
from largebatch.recipe.arithmetic.describe import describe_division, describe_spans
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

if TYPE_CHECKING:
    from largebatch.lab.measure.rehearsal import Message, Rehearsal


def add_commands(command: Command) -> None:
    """Add the command `rehearse`."""
    parser = command(
        "rehearse", _rehearse, "print what a job will do on one worker, without its machines"
    )
    add_recipe(parser)
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="workers of the job")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="rank of the worker (0)")
    parser.add_argument("--cluster", metavar="NAME", help="where it will run: a name or a file")
    add_execution(parser)
    add_imports(parser)


def _rehearse(args: argparse.Namespace) -> int:
    from largebatch.data.datasets.own import import_own
    from largebatch.lab.measure.rehearsal import rehearse
    from largebatch.lab.planner.cluster import load_cluster
    from largebatch.lab.planner.prediction import FIXED_BYTES, HELP

    for module in args.imports:
        import_own(module)
    recipe = load_recipe(args.recipe, args.set)
    cluster = load_cluster(args.cluster) if args.cluster else None
    result = rehearse(recipe, workers=args.workers, rank=args.rank, cluster=cluster)
    where = f" on {cluster.name}: GPU {result.local_rank} of node {result.node}" if cluster else ""
    rows = {
        "recipe": recipe.name,
        "worker": f"{result.rank:,} of {result.plan.workers:,}, numbered from 0{where}",
        **_work(result),
        **_memory(result),
        **_messages(result),
        **_files(recipe, result),
    }
    print_rows(rows)
    if not result.fits:
        assert result.available is not None
        raise LargebatchError(
            f"an update takes {_size(result.memory.total)} on each worker, libraries some "
            f"{_size(FIXED_BYTES)}, and the GPU has {_size(result.available)}; give "
            f"{HELP['memory']}"
        )
    return 0


def _work(result: "Rehearsal") -> dict[str, str]:
    plan = result.plan
    positions = plan.positions(0, 0, result.rank)
    samples = shorten([str(sample) for sample in result.first_samples], most=6)
    return {
        "global batch": describe_division(plan),
        "BatchNorm span": describe_spans(plan),
        "first samples": f"{samples} (positions {positions.start:,} to {positions.stop - 1:,})",
    }


def _memory(result: "Rehearsal") -> dict[str, str]:
    """Return rows on the memory of an update, named as the fields of Memory."""
    rows = asdict(result.memory) | {"together": result.memory.total}
    sizes = {name: _size(number) for name, number in rows.items() if number}
    if result.available is not None:
        sizes["together"] += f" of {_size(result.available)}, libraries not counted"
    return sizes


def _messages(result: "Rehearsal") -> dict[str, str]:
    """Return a row on the messages of an update, by the number of workers in each."""
    by_workers: dict[int, list[Message]] = {}
    for message in result.messages if result.plan.workers > 1 else ():
        by_workers.setdefault(message.workers, []).append(message)
    described = []
    for workers, messages in sorted(by_workers.items(), reverse=True):
        kinds = Counter(message.kind for message in messages)
        kind = " and ".join(plural(number, kind) for kind, number in kinds.items())
        size = _size(sum(message.num_bytes for message in messages))
        described.append(f"{kind} over {workers:,} workers, {size}")
    return {"an update": "; ".join(described) or "sends nothing"}


def _files(recipe: Recipe, result: "Rehearsal") -> dict[str, str]:
    """Return a row on the files that the worker writes."""
    written = []
    if result.rank == 0:
        kept = recipe.execution.checkpoints.keep_last + 1
        size = _size(result.memory.checkpoint)
        written.append(
            f"the run folder: log, summary, report, and {kept} checkpoints of {size} or fewer"
        )
        if recipe.data.source == "folder":
            written.append("an index beside the images, unless there is one")
    if recipe.execution.cache is not None and result.local_rank in {0, None}:
        written.append("decoded images in the cache folder of its machine")
    return {"writes": "; ".join(written) or "nothing"}


def _size(num_bytes: float) -> str:
    """Format a number of bytes with three digits.

    >>> [_size(number) for number in (24, 6_376, 102_228_128, 1.6e10)]
    ['24 bytes', '6.38 kB', '102 MB', '16.0 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}"
    return f"{num_bytes:.0f} bytes"
