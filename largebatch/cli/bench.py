"""The commands `lr bench` and `bench`: run a study of policies or of settings. They print."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import (
    Command,
    accuracy,
    add_machine,
    count,
    machine_of,
    out_folder,
)
from largebatch.cli.printing import INTERRUPTED, print_unfinished, show_page
from largebatch.distributed.environment import worker_rank
from largebatch.errors import BackendError, DataError, StudyError, printable
from largebatch.optional import require_psutil
from largebatch.runs.interrupts import STOPS

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from largebatch.lab.studies.queue.phases import Bench
    from largebatch.lab.studies.queue.study import AnyStudy

Show = Callable[["Bench", "BaseStorage"], None]
"""Print the results of a study and write its page."""


def add_settings_commands(command: Command) -> None:
    """Add the command `bench`."""
    bench = command(
        "settings", _bench_settings, "measure the time and accuracy of settings of recipes"
    )
    _add_study(bench, suite="gtdlbench")
    bench.add_argument("--report", action="store_true", help="write the page of the results so far")


def _add_study(bench: argparse.ArgumentParser, *, suite: str) -> None:
    """Add the options that both kinds of studies have."""
    bench.add_argument(
        "study", type=Path, metavar="STUDY", help=f"a YAML file, or an installed one: {suite}"
    )
    bench.add_argument(
        "--out", type=out_folder, metavar="DIR", help="run folders (runs/<study's name>)"
    )
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


def add_commands(command: Command) -> None:
    """Add the commands `lr bench` and `lr report`."""
    bench = command(
        "bench", _bench, "compare policies: search the rate of each, then run seeds at it"
    )
    _add_study(bench, suite="lrbench")

    report = command("report", _report, "write a study's page from its database")
    report.add_argument("study", metavar="STUDY", help="a study's folder, or its --storage")
    report.add_argument(
        "--target",
        type=accuracy,
        action="append",
        default=[],
        metavar="TOP1",
        help="an accuracy such as 0.95 whose cost is shown; may be repeated (a few are chosen)",
    )
    report.add_argument("--out", type=Path, metavar="HTML", help="study.html in the study's folder")


def _bench(args: argparse.Namespace) -> int:
    from largebatch.lab.studies.queue.study import load_study

    return _carry_out(args, load_study(args.study), _show_policies)


def _bench_settings(args: argparse.Namespace) -> int:
    from largebatch.lab.studies.queue.study import load_configuration_study, settings_here

    whole = load_configuration_study(args.study)
    study = settings_here(whole)
    for name in sorted(whole.settings.keys() - study.settings.keys()):
        print(printable(f"the library of {name} is not installed: it is left out"))
    require_psutil()  # before processes start
    if not args.report:
        return _carry_out(args, study, _show_settings)
    from largebatch.lab.studies.queue.database import open_existing

    bench = _prepare(args, study)
    with open_existing(_url(args, bench.out)) as storage:
        _show_settings(bench, storage)
    return 0


def _prepare(args: argparse.Namespace, study: "AnyStudy") -> "Bench":
    """Return a study with its cells and machine; raise LargebatchError if it cannot run here."""
    if worker_rank() is not None:
        raise BackendError(
            "a study starts the workers of its runs itself; start it by itself on every machine, "
            "with --processes, and not by torchrun, horovodrun or srun with several tasks"
        )
    from largebatch.lab.studies.queue.cells import cells_of

    cells = cells_of(study, args.study.parent)
    given = args.data or args.dataset
    if given and all(cell.recipe.data.source != "folder" for cell in cells):
        raise DataError(
            f"{given} would not be read: no recipe of the study has data.source: folder"
        )
    from largebatch.lab.studies.queue.phases import Bench
    from largebatch.lab.studies.queue.trial import Machine

    out = args.out or Path("runs") / study.name
    return Bench(study=study, cells=tuple(cells), out=out, machine=Machine(**machine_of(args)))


def _carry_out(args: argparse.Namespace, study: "AnyStudy", show: Show) -> int:
    """Run what is left of a study, or print it; print the results when all runs are done."""
    bench = _prepare(args, study)
    from largebatch.lab.studies.queue.bench import work, work_together
    from largebatch.lab.studies.queue.console import describe_budget, print_run
    from largebatch.lab.studies.queue.database import open_storage
    from largebatch.lab.studies.queue.phases import Progress

    if args.dry_run:
        if args.data:
            _require_images(bench, args)
        print(printable(describe_budget(bench, processes=args.parallel)))
        return 0
    _make_folder(bench.out)
    url = _url(args, bench.out)
    with open_storage(url) as storage:
        if not Progress(bench, storage).is_done:  # what is wrong is found before processes start
            _require_images(bench, args)
    if args.parallel == 1:
        codes = [0 if work(bench, url, print_run) else INTERRUPTED]
    else:
        codes = work_together(bench, url, processes=args.parallel)
    with open_storage(url) as storage:
        progress = Progress(bench, storage)
        if progress.is_done:
            show(bench, storage)
            return 0
        done = progress.num_done
    print_unfinished(done, bench.num_runs, "runs")
    stopped = any(code == INTERRUPTED or -code in STOPS for code in codes)
    return INTERRUPTED if stopped else max(1, *codes)


def _require_images(bench: "Bench", args: argparse.Namespace) -> None:
    """Raise DataError before processes start if a recipe's images are missing."""
    from largebatch.data.index.folder import layout
    from largebatch.data.pipeline import root_of

    sources = [cell.recipe.data for cell in bench.cells]
    read = [each for each in sources if each.source == "folder" and args.dataset is None]
    for data in read[:1]:  # the others read the same
        for split in ("train", "val"):
            layout(root_of(data, args.data), split)


def _show_policies(bench: "Bench", storage: "BaseStorage") -> None:
    from largebatch.lab.studies.policies.page import PAGE, make_page
    from largebatch.lab.studies.queue.results import read_results
    from largebatch.lab.studies.queue.study import Study

    assert isinstance(bench.study, Study)
    names = {(cell.configuration, cell.variant) for cell in bench.cells}
    results = [result for result in read_results(storage) if result.study == bench.study.name]
    results = [result for result in results if (result.configuration, result.policy) in names]
    show_page(make_page(results, targets=bench.study.targets), bench.out / PAGE)


def _show_settings(bench: "Bench", storage: "BaseStorage") -> None:
    from largebatch.lab.studies.policies.page import PAGE
    from largebatch.lab.studies.queue.results import read_settings
    from largebatch.lab.studies.queue.study import ConfigurationStudy
    from largebatch.lab.studies.settings.page import make_page
    from largebatch.lab.studies.settings.settings import find

    assert isinstance(bench.study, ConfigurationStudy)
    every = {(result.configuration, result.setting): result for result in read_settings(storage)
             if result.study == bench.study.name}  # fmt: skip
    names = [(cell.configuration, cell.variant) for cell in bench.cells]  # in the study's order
    findings = find([every[name] for name in names if name in every], bench.study.metrics)
    show_page(make_page(findings), bench.out / PAGE)


def _url(args: argparse.Namespace, out: Path) -> str:
    """Return the URL of the study's storage."""
    return str(args.storage or f"sqlite:///{out.absolute()}/study.db")


def _report(args: argparse.Namespace) -> int:
    from largebatch.lab.studies.policies.page import PAGE, make_page
    from largebatch.lab.studies.queue.database import open_existing
    from largebatch.lab.studies.queue.results import read_results

    folder = Path(args.study)
    is_folder = folder.is_dir()
    with open_existing(_database(folder) if is_folder else args.study) as storage:
        found = read_results(storage)
    page = args.out or (folder if is_folder else Path()) / PAGE
    print(printable(f"page: {make_page(found, targets=args.target).write(page)}"))
    return 0


def _database(folder: Path) -> str:
    """Return the URL of the database in a study's folder; raise StudyError if there is none."""
    path = folder / "study.db"
    if not path.is_file():
        raise StudyError(
            f"{folder}: no study.db: the folder is not a study's, or the study has its "
            "own --storage: give that instead"
        )
    return f"sqlite:///{path.absolute()}"


def _make_folder(out: Path) -> None:
    """Create the folder of a study; raise StudyError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StudyError(f"--out {out}: cannot be made: {error.strerror}") from None
