"""The `lr bench` command: every policy at the rate that suits it. It prints."""

import argparse
from collections.abc import Callable
from pathlib import Path

from largebatch.cli.arguments import (
    INTERRUPTED,
    Call,
    add_machine,
    count,
    machine_of,
    part,
)
from largebatch.distributed.environment import worker_rank
from largebatch.errors import BackendError, DataError, StudyError, printable
from largebatch.runs.interrupts import STOPS


def add_commands(command: Callable[[str, Call, str], argparse.ArgumentParser]) -> None:
    """Add the command to those below `lr`."""
    bench = command("bench", _bench, "search each policy's rate, then run seeds at it: a study")
    bench.add_argument("study", type=Path, metavar="STUDY.yaml")
    bench.add_argument("--out", type=Path, metavar="DIR", help="run folders (runs/<study's name>)")
    bench.add_argument(
        "--storage",
        metavar="URL",
        help="an SQL database, or a file that ends with .journal (sqlite:///DIR/study.db)",
    )
    bench.add_argument(
        "--processes", type=count, default=1, dest="parallel", metavar="N", help="runs at a time"
    )
    bench.add_argument("--dry-run", action="store_true", help="print the runs and an estimate")
    add_machine(bench)

    report = command("report", _report, "write a study's page again, of what its database holds")
    report.add_argument("study", metavar="STUDY", help="a study's folder, or its --storage")
    report.add_argument(
        "--target",
        type=part,
        action="append",
        default=[],
        metavar="TOP1",
        help="an accuracy such as 0.95 whose cost is shown; may be repeated (a few are chosen)",
    )
    report.add_argument("--out", type=Path, metavar="HTML", help="study.html in the study's folder")


def _bench(args: argparse.Namespace) -> int:
    from largebatch.studies.cells import cells_of
    from largebatch.studies.study import load_study

    if worker_rank() is not None:
        raise BackendError(
            "lr bench makes runs of one worker each; start it by itself on every machine, with "
            "--processes, and not by torchrun, horovodrun or srun with several tasks"
        )
    study = load_study(args.study)
    cells = cells_of(study, args.study.parent)
    given = args.data or args.dataset
    if given and all(cell.recipe.data.source != "folder" for cell in cells):
        raise DataError(
            f"{given} would not be read: no recipe of the study has data.source: folder"
        )
    from largebatch.studies.bench import work, work_together
    from largebatch.studies.console import describe_budget, describe_study, print_run
    from largebatch.studies.database import open_storage
    from largebatch.studies.page import PAGE, write_page
    from largebatch.studies.phases import Bench, Progress
    from largebatch.studies.results import read_results
    from largebatch.studies.trial import Machine

    out = args.out or Path("runs") / study.name
    bench = Bench(study=study, cells=tuple(cells), out=out, machine=Machine(**machine_of(args)))
    if args.dry_run:
        print(printable(describe_budget(bench, processes=args.parallel)))
        return 0
    url = args.storage or f"sqlite:///{_folder(out).absolute()}/study.db"
    with open_storage(url) as storage:
        Progress(bench, storage).phases()  # what is wrong is found before processes start
    if args.parallel == 1:
        codes = [0 if work(bench, url, print_run) else INTERRUPTED]
    else:
        codes = work_together(bench, url, processes=args.parallel)
    with open_storage(url) as storage:
        progress = Progress(bench, storage)
        if progress.is_done:
            print(printable(describe_study(progress)))
            names = {(cell.configuration, cell.policy) for cell in cells}
            found = [one for one in read_results(storage) if one.study == study.name]
            found = [one for one in found if (one.configuration, one.policy) in names]
            page = write_page(found, out / PAGE, targets=study.targets)
            print(printable(f"page: {page}"))
            return 0
        done = progress.num_done
    print(f"{done} of {bench.num_runs} runs are done; to go on: the same command")
    stopped = any(code == INTERRUPTED or -code in STOPS for code in codes)
    return INTERRUPTED if stopped else max(1, *codes)


def _report(args: argparse.Namespace) -> int:
    from largebatch.studies.database import open_existing
    from largebatch.studies.page import PAGE, write_page
    from largebatch.studies.results import read_results

    folder = Path(args.study)
    is_folder = folder.is_dir()
    with open_existing(_database(folder) if is_folder else args.study) as storage:
        found = read_results(storage)
    page = args.out or (folder if is_folder else Path()) / PAGE
    print(printable(f"page: {write_page(found, page, targets=args.target)}"))
    return 0


def _database(folder: Path) -> str:
    """Return the URL of the database in a study's folder; raise StudyError without one."""
    path = folder / "study.db"
    if not path.is_file():
        raise StudyError(
            f"{folder}: no study.db: the folder is no study's, or the study has a --storage of its "
            "own: give that instead"
        )
    return f"sqlite:///{path.absolute()}"


def _folder(out: Path) -> Path:
    """Make the folder of a study; raise StudyError where that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"--out {out}: cannot be made: {error.strerror}") from None
    return out
