"""The command `diagnose`: likely causes of what went wrong in a run. It prints."""

import argparse
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import Command, count
from largebatch.cli.printing import wrapped
from largebatch.cli.recipe import write_planned
from largebatch.errors import LargebatchError, printable
from largebatch.formatting import MISSING, aligned, percent

if TYPE_CHECKING:
    from largebatch.report.diagnosis import Cause
    from largebatch.report.record import Record


def add_commands(command: Command) -> None:
    """Add the command `diagnose`."""
    text = "find the likely causes of what went wrong in a run, or in a run with a larger batch"
    added = command("diagnose", _diagnose, text)
    added.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="run",
        help="a run folder, or another program's log: CSV, JSON, JSON lines, TensorBoard; with "
        "two, the one of the larger batch is judged against the other",
    )
    added.add_argument(
        "--classes", type=count, metavar="K", help="number of classes, which other logs lack"
    )
    added.add_argument(
        "--range", type=Path, metavar="DIR", help="folder of `lr range` of this recipe: its bound"
    )
    added.add_argument("--out", type=Path, metavar="FILE", help="write the repaired recipe")


def _diagnose(args: argparse.Namespace) -> int:
    if len(args.runs) > 2:
        raise LargebatchError(
            f"diagnose takes one run or two, got {len(args.runs)}; to compare more: largebatch "
            "report RUN RUN ..."
        )
    if args.out is not None and args.out.exists():
        raise LargebatchError(f"{args.out}: exists already; choose another file with --out")
    from largebatch.report.diagnosis import find_causes, order, verdict
    from largebatch.report.logs import find_log, is_of_run, read_record
    from largebatch.report.record import read_edge

    if args.classes is not None and all(is_of_run(find_log(path)) for path in args.runs):
        raise LargebatchError("--classes: a run folder has its number of classes; leave it out")
    edge = None if args.range is None else read_edge(args.range)
    records = [read_record(path, classes=args.classes) for path in args.runs]
    run, small = order(*records) if len(records) == 2 else (records[0], None)
    run = replace(run, edge=edge)
    _print_table([run] if small is None else [small, run])
    if small is not None and not (run.batch and small.batch):
        why = "updates are fewer" if run.updates and small.updates else "the first that is given"
        print(wrapped(f"judged, on the right: {run.name}: not both batches are known, {why}"))
    if run.run is not None and not run.is_complete:
        print(wrapped(verdict(run.run).words))
    causes = find_causes(run, small)
    _print_causes(run, causes)
    missing = run.unchecked
    if missing:
        print(wrapped(f"not checked, for lack of a record: {', '.join(missing)}"))
    if args.out is not None:
        _write(args.out, run, causes, small)
    return 0


def _print_table(records: list["Record"]) -> None:
    """Print settings and results side by side, the small batch first, and the columns read."""
    columns = [_facts(record) for record in records]
    rows = [["", *(record.name for record in records)]]
    rows += [[name, *(facts[name] for facts in columns)] for name in columns[0]]
    print(printable(aligned(rows, right=range(1, len(rows[0])))))
    for record in records:
        if record.source:
            print(wrapped(f"read in {record.name}: {record.source}"))


def _facts(record: "Record") -> dict[str, str]:
    val_loss, top1 = (
        next((one for one in reversed(column.tolist()) if not math.isnan(one)), math.nan)
        for column in (record.val_loss, record.top1)
    )
    warmup = record.warmup
    return {
        "global batch": MISSING if record.batch is None else f"{record.batch:,}",
        "updates": MISSING if record.updates is None else f"{record.updates:,}",
        "epochs": _number(record.epochs),
        "peak learning rate": _number(record.peak),
        "warm-up, updates": MISSING if warmup is None else f"{warmup:,}",
        "final training loss": _number(record.end),
        "final validation loss": _number(val_loss),
        "top-1": MISSING if math.isnan(top1) else f"{percent(top1)} %",
    }


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else MISSING


def _print_causes(run: "Record", causes: list["Cause"]) -> None:
    """Print the causes, the most likely one first, each with its figure and what changes it."""
    if not causes:
        print(wrapped(f"{run.name}: no cause found"))
        return
    print(printable(f"likely causes in {run.name}, the most likely first:"))
    for place, cause in enumerate(causes, start=1):
        print(wrapped(f"{place}. {cause.kind}: {cause.figure}"))
        print(wrapped(f"  to change it: {cause.remedy}"))


def _write(out: Path, run: "Record", causes: list["Cause"], small: "Record | None") -> None:
    """Write the repaired recipe and print what was changed."""
    from largebatch.report.diagnosis import repair

    found = repair(run, causes, small)
    write_planned(out, found.text)
    for key, (_, reason) in found.changes.items():
        print(wrapped(f"changed {key}: {reason}"))
    print(printable(f"recipe: {out}\nlook at it: largebatch plan {shlex.quote(str(out))}"))
