"""A run folder -> charts and one self-contained page.

Everything is drawn from the records of the run, so a run that was interrupted, failed or was killed
has a report too: of what there is.
"""

from pathlib import Path

from largebatch.report.page import make_page, write_charts
from largebatch.report.run import read_run
from largebatch.storage import write_whole
from largebatch.tracking.events import REPORT


def write_report(run_folder: Path) -> Path:
    """Write loss, accuracy, throughput, drift and report.png and report.html; return the page.

    Raises CheckpointError where the folder holds no readable log, MissingPackageError without
    matplotlib.
    """
    run = read_run(run_folder)
    write_charts(run, run_folder)
    page = run_folder / REPORT
    write_whole(page, make_page(run).encode())
    return page
