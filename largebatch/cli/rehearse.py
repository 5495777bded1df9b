"""`rehearse`: what a job will do on one of its workers, found without its machines. It prints."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command, add_execution, add_imports, add_recipe, count
from largebatch.cli.printing import print_rows
from largebatch.errors import LargebatchError, shorten
from largebatch.recipe.arithmetic.plan import describe_spans
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

if TYPE_CHECKING:
    from largebatch.measure.rehearsal import Message, Rehearsal


def add_commands(command: Command) -> None:
    """Add the command; `command` makes a parser of a name, what it calls, and a description."""
    parser = command(
        "rehearse", _rehearse, "print what a job will do on one worker, without its machines"
    )
    add_recipe(parser)
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="of the job")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="of the worker (0)")
    parser.add_argument("--cluster", metavar="NAME", help="where it will run: a name or a file")
    add_execution(parser)
    add_imports(parser)


def _rehearse(args: argparse.Namespace) -> int:
    from largebatch.data.datasets.own import import_own
    from largebatch.measure.rehearsal import rehearse
    from largebatch.planner.cluster import load_cluster
    from largebatch.planner.prediction import FIXED_BYTES, HELP

    for module in args.imports:
        import_own(module)
    recipe = load_recipe(args.recipe, args.set)
    cluster = load_cluster(args.cluster) if args.cluster else None
    found = rehearse(recipe, workers=args.workers, rank=args.rank, cluster=cluster)
    where = f" on {cluster.name}: GPU {found.local_rank} of node {found.node}" if cluster else ""
    rows = {
        "recipe": recipe.name,
        "worker": f"{found.rank:,} of {found.plan.workers:,}, numbered from 0{where}",
        **_work(found),
        **_memory(found),
        **_messages(found),
        **_files(recipe, found),
    }
    print_rows(rows)
    if not found.fits:
        assert found.available is not None
        raise LargebatchError(
            f"an update takes {_size(found.memory.total)} on each worker, libraries some "
            f"{_size(FIXED_BYTES)}, and the GPU has {_size(found.available)}; give {HELP['memory']}"
        )
    return 0


def _work(found: "Rehearsal") -> dict[str, str]:
    plan = found.plan
    division = f"{plan.workers:,} workers x {plan.accumulation} micro-batches x {plan.device_batch}"
    positions = plan.positions(0, 0, found.rank)
    samples = shorten([str(sample) for sample in found.first_samples], most=6)
    return {
        "global batch": f"{plan.global_batch:,} = {division}",
        "BatchNorm span": describe_spans(plan),
        "first samples": f"{samples} (positions {positions.start:,} to {positions.stop - 1:,})",
    }


def _memory(found: "Rehearsal") -> dict[str, str]:
    """Return what the device holds in an update."""
    memory = found.memory
    rows = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "average": memory.average,
        "activations": memory.activations,
        "together": memory.total,
    }
    sizes = {name: _size(number) for name, number in rows.items() if number}
    if found.available is not None:
        sizes["together"] += f" of {_size(found.available)}, libraries not counted"
    return sizes


def _messages(found: "Rehearsal") -> dict[str, str]:
    """Return what an update sends, for each number of workers that join it."""
    by_workers: dict[int, list[Message]] = {}
    for message in found.messages if found.plan.workers > 1 else ():
        by_workers.setdefault(message.workers, []).append(message)
    described = []
    for workers, messages in sorted(by_workers.items(), reverse=True):
        kinds = Counter(message.kind for message in messages)
        kind = " and ".join(
            f"{number:,} {kind}{'s' * (number > 1)}" for kind, number in kinds.items()
        )
        size = _size(sum(message.num_bytes for message in messages))
        described.append(f"{kind} over {workers:,} workers, {size}")
    return {"an update": "; ".join(described) or "sends nothing"}


def _files(recipe: Recipe, found: "Rehearsal") -> dict[str, str]:
    """Return what the worker writes, and where."""
    written = []
    if found.rank == 0:
        kept = recipe.execution.checkpoints.keep_last + 1
        size = _size(found.memory.checkpoint)
        written.append(
            f"the run folder: log, summary, report, and {kept} checkpoints of {size} or fewer"
        )
        if recipe.data.source == "folder":
            written.append("an index beside the images, unless there is one")
    if recipe.execution.cache is not None and found.local_rank in {0, None}:
        written.append("decoded images in the cache folder of its machine")
    return {"writes": "; ".join(written) or "nothing"}


def _size(num_bytes: float) -> str:
    """Return a number of bytes with three digits.

    >>> [_size(number) for number in (24, 6_376, 102_228_128, 1.6e10)]
    ['24 bytes', '6.38 kB', '102 MB', '16.0 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}"
    return f"{num_bytes:.0f} bytes"
