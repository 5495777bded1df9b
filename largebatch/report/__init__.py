"""A run folder -> charts and one self-contained page; several of them -> a page that compares them.

A run that was interrupted, failed or was killed has a report of what it recorded.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.errors import CheckpointError
from largebatch.storage import write_whole, writing
from largebatch.tracking.events import REPORT

if TYPE_CHECKING:
    from largebatch.report.comparison import Comparison

COMPARISON = "compare.html"  # unless another name is given


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write report.html and its overview, report.png, into `out`; return the page.

    `out` is the run folder unless it is given. Raises CheckpointError where the run folder holds no
    readable log, or `out` cannot be written; MissingPackageError without matplotlib.
    """
    from largebatch.report.page import make_page, write_overview  # jinja2, after the training
    from largebatch.report.run import read_run

    run = read_run(run_folder)
    out = out or run_folder
    if out.suffix == ".html" and not out.is_dir():
        raise CheckpointError(f"{out}: --out of one run names a folder, which holds the page")
    page = out / REPORT
    content = make_page(run).encode()
    with writing(out, hint="choose a folder for the report with: largebatch report RUN --out DIR"):
        write_overview(run, out)
        write_whole(page, content)
    return page


def write_comparison(run_folders: Sequence[Path], out: Path) -> "tuple[Path, Comparison]":
    """Write the page that compares these runs; return its path and its content.

    `out` is the file, a name that ends in .html, or the folder of compare.html. Raises as
    compare_runs and Page.write.
    """
    from largebatch.report.comparison import compare_runs, make_comparison_page

    comparison = compare_runs(run_folders)
    path = out if out.suffix == ".html" else out / COMPARISON
    return make_comparison_page(comparison).write(path), comparison
