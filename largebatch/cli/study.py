"""The `study` commands: protocols compared over grids of settings. They print."""

import argparse
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import (
    add_command,
    add_machine,
    count,
    machine_of,
    out_folder,
)
from largebatch.cli.printing import INTERRUPTED, print_unfinished, show_page
from largebatch.distributed.environment import worker_rank
from largebatch.errors import BackendError, StudyError, printable
from largebatch.formatting import plural
from largebatch.runs.interrupts import STOPS, InterruptedStudyError, answering

if TYPE_CHECKING:
    from largebatch.lab.studies.hosts.starts import Cell, Found, Start
    from largebatch.lab.studies.scaling.study import ScalingStudy
    from largebatch.lab.studies.servers.study import ServersStudy
    from largebatch.lab.studies.staleness.run import Run
    from largebatch.lab.studies.staleness.trial import Result
    from largebatch.report.interactive import Page


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands below `study`."""
    command = partial(add_command, commands)
    text = "what staleness costs in accuracy and saves in time, by simulated learners"
    staleness = command("staleness", _staleness, text)
    staleness.add_argument(
        "study", metavar="STUDY",
        help="a YAML file, or an installed one: rudra, rudra-small, rudra-imagenette",
    )  # fmt: skip
    staleness.add_argument(
        "--out", type=out_folder, metavar="DIR", help="folder of the records (runs/<name>)"
    )
    staleness.add_argument(
        "--processes", type=count, default=1, dest="parallel", metavar="N", help="runs at a time"
    )
    staleness.add_argument(
        "--dry-run", action="store_true", help="print the runs that are left and an estimate"
    )
    add_machine(staleness)
    text = "compare central servers, servers beside workers, and all-reduce"
    servers = command("servers", _servers, text)
    _add_hosts(servers, suite="jaeger")
    servers.add_argument(
        "--simulated", action="store_true",
        help="start nothing: write the page of what is simulated, and of starts that have a record",
    )  # fmt: skip
    text = "measure the speed-up by workers on one host and on several"
    _add_hosts(command("scaling", _scaling, text), suite="dell")


def _add_hosts(study: argparse.ArgumentParser, *, suite: str) -> None:
    """Add the options of studies on several hosts."""
    study.add_argument("study", metavar="STUDY", help=f"a YAML file, or an installed one: {suite}")
    study.add_argument(
        "--out", type=out_folder, metavar="DIR", help="folder of the records (runs/<name>)"
    )
    study.add_argument(
        "--data", type=_named_folder, action="append", default=[], metavar="RECIPE=DIR",
        help="the data of a recipe of the study; several times",
    )  # fmt: skip
    study.add_argument(
        "--dry-run", action="store_true", help="print the starts that are left and an estimate"
    )


def _named_folder(text: str) -> tuple[str, Path]:
    name, between, folder = text.partition("=")
    if not (name and between and folder):
        raise argparse.ArgumentTypeError(f"expected RECIPE=DIR, such as lenet5=data, got {text!r}")
    return name, Path(folder)


def _staleness(args: argparse.Namespace) -> int:
    from largebatch.lab.studies.staleness.run import carry_out, rows_of, runs_of
    from largebatch.lab.studies.staleness.study import cells_of, load_study

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
        from largebatch.lab.studies.budget import describe_total, seconds_of_runs

        left = [run for run in runs if run.read() is None]
        for run in left:
            print(printable(f"{run.cell.name} seed {run.seed}"))
        seconds = seconds_of_runs(left)
        print(describe_total(plural(len(left), "run"), seconds, processes=args.parallel))
        return 0
    from largebatch.lab.studies.staleness.page import PAGE, make_page
    from largebatch.lab.studies.staleness.pictures import SPEED_UP, write_pictures, write_speed_up
    from largebatch.lab.studies.staleness.speed_up import speed_ups
    from largebatch.runs.options import Options

    options = Options(out=out, **machine_of(args))
    try:
        carry_out(runs, options, processes=args.parallel, report=_report)
    except InterruptedStudyError:
        done = sum(run.read() is not None for run in runs)
        print_unfinished(done, len(runs), "runs")
        return INTERRUPTED
    rows = rows_of(runs)
    simulated = speed_ups(study, Path(args.study).parent)
    show_page(make_page(rows, title=study.name, speed_ups=simulated), out / PAGE)
    pictures = write_pictures(rows, out)
    if simulated:
        pictures.append(write_speed_up(simulated, out / SPEED_UP))
    for path in pictures:
        print(printable(str(path)))
    return 0


def _servers(args: argparse.Namespace) -> int:
    from largebatch.lab.studies.hosts.starts import starts_of
    from largebatch.lab.studies.servers.page import make_page
    from largebatch.lab.studies.servers.rows import rows_of
    from largebatch.lab.studies.servers.simulated import sweeps
    from largebatch.lab.studies.servers.study import cells_of, layouts_here, load_study

    study = load_study(args.study)
    for layout in study.layouts.keys() - layouts_here(study).keys():
        print(f"horovod is not installed: {layout} is left out")
    folder = Path(args.study).parent
    cells = cells_of(study, folder)

    def page(starts: "Sequence[Start]") -> "Page":
        rows = rows_of(cells, starts)
        return make_page(study, rows, sweeps(study, folder, rows))

    if args.simulated:
        if study.simulated is None:
            raise StudyError(f"{args.study}: has no section `simulated`")
        out = args.out or Path("runs") / study.name
        starts = starts_of(cells, repeats=study.repeats, data=dict(args.data), out=out)
        show_page(page(starts), out / "study.html")
        return 0
    return _on_hosts(args, study, cells, page)


def _scaling(args: argparse.Namespace) -> int:
    from largebatch.lab.studies.scaling.page import make_page
    from largebatch.lab.studies.scaling.rows import rows_of
    from largebatch.lab.studies.scaling.study import cells_of, load_study

    study = load_study(args.study)
    cells = cells_of(study, Path(args.study).parent)
    return _on_hosts(
        args, study, cells, lambda starts: make_page(study, rows_of(study, cells, starts))
    )


def _on_hosts(
    args: argparse.Namespace,
    study: "ScalingStudy | ServersStudy",
    cells: "Sequence[Cell]",
    make_page: "Callable[[Sequence[Start]], Page]",
) -> int:
    """Run what is left of a study on several hosts, or print it; write the page at the end."""
    from largebatch.lab.studies.hosts.namespaces import require_hosts
    from largebatch.lab.studies.hosts.starts import carry_out, starts_of

    for name, _ in args.data:
        if name not in study.recipes:
            known = ", ".join(study.recipes)
            raise StudyError(f"--data {name}=...: the study has the recipes {known}")
    out = args.out or Path("runs") / study.name
    starts = starts_of(cells, repeats=study.repeats, data=dict(args.data), out=out)
    left = [start for start in starts if start.read() is None]
    if args.dry_run:
        from largebatch.lab.studies.budget import STARTING, describe_total, seconds_of_starts

        for start in left:
            print(printable(f"{start.cell} seed {start.seed}"))
        print(describe_total(plural(len(left), "start"), seconds_of_starts(left), of=STARTING))
        return 0
    names = {cell.name: cell.configuration for cell in cells}
    missing = {
        names[start.cell]: None
        for start in left
        if start.job.options.data is None and start.job.recipe.data.source == "folder"
    }
    if missing:
        options = " ".join(f"--data {name}=DIR" for name in missing)
        raise StudyError(f"{args.study}: its recipes read data from folders; pass {options}")
    if left:
        require_hosts()
    try:
        with answering(signal.default_int_handler, *STOPS):
            carry_out(starts, _report_start)
    except KeyboardInterrupt:
        done = sum(start.read() is not None for start in starts)
        print_unfinished(done, len(starts), "starts")
        return INTERRUPTED
    show_page(make_page(starts), out / "study.html")
    return 0


def _report_start(start: "Start", found: "Found") -> None:
    seconds = sum(found.seconds) / len(found.seconds)
    late = f", {found.late:.0%} of gradients late" if found.late else ""
    print(printable(f"{start.cell} seed {start.seed}: {seconds:.4g} s an update{late}"), flush=True)


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
