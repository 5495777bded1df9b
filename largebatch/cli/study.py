"""The `study` commands: what protocols cost, over grids of settings. They print."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import INTERRUPTED, add_command, add_machine, count, machine_of
from largebatch.distributed.environment import worker_rank
from largebatch.errors import BackendError, printable

if TYPE_CHECKING:
    from largebatch.studies.staleness.run import Row, Run
    from largebatch.studies.staleness.trial import Result


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `study`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = partial(add_command, commands)
    text = "what staleness costs in accuracy and saves in time, by simulated learners"
    staleness = command("staleness", _staleness, text)
    staleness.add_argument("study", metavar="STUDY", help="a YAML file, or an installed one: rudra")
    staleness.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the records (runs/<name>)"
    )
    staleness.add_argument(
        "--processes", type=count, default=1, dest="parallel", metavar="N", help="runs at a time"
    )
    staleness.add_argument("--dry-run", action="store_true", help="print the runs that are left")
    add_machine(staleness)


def _staleness(args: argparse.Namespace) -> int:
    from largebatch.studies.staleness.run import carry_out, rows_of, runs_of
    from largebatch.studies.staleness.study import cells_of, load_study

    if worker_rank() is not None:
        raise BackendError(
            "study staleness simulates its learners in one process; start it by itself, with "
            "--processes, and not by torchrun, horovodrun or srun with several tasks"
        )
    study = load_study(args.study)
    cells = cells_of(study, Path(args.study).parent)
    out = args.out or Path("runs") / study.name
    runs = runs_of(cells, seeds=study.seeds, out=out)
    if args.dry_run:
        for run in runs:
            if run.read() is None:
                print(printable(f"{run.cell.name} seed {run.seed}"))
        return 0
    from largebatch.runs.interrupts import InterruptedStudyError
    from largebatch.runs.options import Options
    from largebatch.studies.staleness.page import PAGE, write_staleness_page
    from largebatch.studies.staleness.pictures import write_pictures

    options = Options(out=out, **machine_of(args))
    try:
        carry_out(runs, options, processes=args.parallel, report=_report)
    except InterruptedStudyError:
        done = sum(run.read() is not None for run in runs)
        print(f"{done} of {len(runs)} runs are done; to go on: the same command")
        return INTERRUPTED
    rows = rows_of(runs)
    _print_table(rows)
    page = write_staleness_page(rows, out / PAGE, title=study.name)
    for path in (page, *write_pictures(rows, out)):
        print(printable(str(path)))
    return 0


def _report(run: "Run", found: "Result") -> None:
    reached = f"top-1 {found['top1']:.2%}"
    if found["diverged"] is not None:
        reached = f"diverged: {found['diverged']}"
    print(
        printable(
            f"{run.cell.name} seed {run.seed}: {reached}, mean tau {found['tau_mean']:.2f}, "
            f"simulated {found['simulated_seconds']:,.4g} s, computed in "
            f"{found['computing_seconds']:,.0f} s"
        ),
        flush=True,
    )


def _print_table(rows: "list[Row]") -> None:
    words = [row.words for row in rows]
    heads = list(words[0])
    widths = {head: max(len(head), *(len(one[head]) for one in words)) for head in heads}
    for one in [dict(zip(heads, heads, strict=True)), *words]:
        print(printable("  ".join(one[head].ljust(widths[head]) for head in heads).rstrip()))
