"""Run scripts of resumed_loops.py under the observation of `audit resume`, on forked workers.

Starting Python and loading PyTorch four times takes longer than the scripts. The real start of the
runs is tested in audit/test_audit_resume.py by one script, and by those of other libraries.
"""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

from on_forked_workers import on_forked_workers
from resumed_loops import Resumed

from largebatch.audit.resume.comparing import Resumption, compare
from largebatch.audit.resume.running import read_run

TIMEOUT = "120"


def findings_of(resumed: Resumed, folder: Path) -> Resumption:
    """Run a script whole, whole again, in part and resumed; return the comparison."""
    script = str(resumed.write(folder))
    runs = []
    for name in ("whole", "repeat", "first", "rest"):
        records = folder / name
        files = folder / ("first" if name == "rest" else name) / "files"
        records.mkdir()
        files.mkdir(exist_ok=True)
        arguments = resumed.arguments["whole" if name == "repeat" else name].split()
        workers = resumed.workers
        if name == "rest" and resumed.rest_workers is not None:
            workers = resumed.rest_workers
        words = [TIMEOUT, str(records), str(files), script, *arguments]
        on_forked_workers(observe_one, words, workers=workers)
        runs.append(read_run(records))
    return compare(*runs)


def observe_one(words: Sequence[str]) -> None:
    # As in a script that a user starts; a forked worker would start loader processes by a server.
    multiprocessing.set_start_method("fork", force=True)
    from largebatch.audit.resume.observing import main

    main(words)
