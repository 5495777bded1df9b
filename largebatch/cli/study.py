"""The command `lab study`. It prints."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from largebatch.cli.printing import INTERRUPTED
from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName
from largebatch.errors import LargebatchError, printable
from largebatch.runs.options import Count, Folder, Imports, Seconds


def study(  # noqa: PLR0913 -- its options
    file: Path,
    /,
    *,
    out: Folder | None = None,
    jobs: Count = 1,
    data: Annotated[tuple[str, ...], Parameter(metavar="[RECIPE=]DIR")] = (),
    dataset: Annotated[str | None, Parameter(metavar="M:F")] = None,
    imports: Imports = (),
    backend: BackendName = "auto",
    timeout: Seconds = TIMEOUT_SECONDS,
    dry_run: bool = False,
    page: bool = False,
) -> int:
    """Carry out a study, or resume it; print its table and draw its page.

    Args:
        file: A YAML file, or an installed study: lrbench, gtdlbench, rudra, jaeger, dell.
        out: Folder of the records (runs/<name>), which several machines may fill at once.
        jobs: Number of runs at a time.
        data: Folder of images, or RECIPE=DIR for one recipe of the study.
        dataset: Instead: what module M's function F returns, (train, val).
        imports: Modules to import first.
        backend: Library that sums gradients.
        timeout: Seconds to wait for a worker that does nothing.
        dry_run: Print the runs that are left.
        page: Start nothing; draw what is recorded, and simulations.
    """
    from largebatch.lab.studies import runner
    from largebatch.lab.studies.study import Machine

    folders: dict[str, Path] = {}
    for one in data:
        name, folder = one.split("=", 1) if "=" in one else ("", one)
        if name in folders:
            raise LargebatchError(f"--data {one}: give one folder, or RECIPE=DIR for each recipe")
        folders[name] = Path(folder)
    machine = Machine(
        data=folders, dataset=dataset, imports=tuple(imports), backend=backend, timeout=timeout
    )

    def report(line: str) -> None:
        print(printable(line), flush=True)

    done = runner.study(
        file, out=out, jobs=jobs, dry_run=dry_run, page=page, machine=machine, report=report
    )
    return 0 if done else INTERRUPTED
