"""One run of a study in a process of its own, as the runner starts it.

    python -m largebatch.lab.studies.run_in_process FOLDER

The folder holds the task; the record is written beside it.
"""

import os
import pickle
import signal
import sys
from pathlib import Path

from largebatch.distributed.environment import LAUNCHER
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.runs.launch import reporting_errors


def main(folder: Path) -> None:
    """Make the run, and write its record; None if it was requested to stop."""
    # Imported here, so that an error of an import is reported like one of the run.
    from largebatch.lab.studies.runner import RECORD, TASK, made

    # Until the run handles requests itself, one ends it here and not in a traceback.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # It is no worker of a run: it handles requests, and may start workers of its own.
    del os.environ[LAUNCHER]
    try:
        record = made(pickle.loads((folder / TASK).read_bytes()))  # noqa: S301 -- the runner's
    except (InterruptedStudyError, KeyboardInterrupt):
        record = None
    (folder / RECORD).write_bytes(pickle.dumps(record))


if __name__ == "__main__":
    with reporting_errors("its process"):
        main(Path(sys.argv[1]))
