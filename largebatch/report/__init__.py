"""A run folder -> charts and one self-contained page.

Everything is drawn from the records of the run, so a run that was interrupted, failed or was killed
has a report too: of what there is.
"""

from pathlib import Path

from largebatch.errors import CheckpointError
from largebatch.report.page import make_page, write_charts
from largebatch.report.run import read_run
from largebatch.storage import write_whole
from largebatch.tracking.events import REPORT


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write the charts as PNG files, report.png and report.html into `out`; return the page.

    `out` is the run folder unless it is given. Raises CheckpointError where the run folder holds no
    readable log, or `out` cannot be written; MissingPackageError without matplotlib.
    """
    run, out = read_run(run_folder), out or run_folder
    page = out / REPORT
    content = make_page(run).encode()
    try:
        write_charts(run, out)
        write_whole(page, content)
    except OSError as error:
        raise CheckpointError(
            f"{out}: the report cannot be written there: {error.strerror}; choose a folder for it "
            "with: largebatch report RUN --out DIR"
        ) from None
    return page
