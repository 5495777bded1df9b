"""One local process of a study: `python -m largebatch.lab.studies.queue.worker JOB`.

JOB is a file with the study and its storage as JSON; results go to the storage and the run
folders.
"""

import os
import sys
from pathlib import Path

from largebatch.errors import LargebatchError, printable
from largebatch.lab.studies.queue.bench import JOB, work
from largebatch.lab.studies.queue.console import print_run
from largebatch.lab.studies.queue.owners import Owners

if __name__ == "__main__":
    bench, url = JOB.validate_json(Path(sys.argv[1]).read_bytes())
    try:
        done = work(bench, url, print_run, Owners(parent=os.getppid()))
    except LargebatchError as error:
        sys.stderr.write(f"largebatch: {printable(str(error))}\n")
        sys.exit(2)
    sys.exit(0 if done else os.EX_TEMPFAIL)
