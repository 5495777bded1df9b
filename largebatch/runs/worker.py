"""One local worker of a run: `python -m largebatch.runs.worker JOB`, as `run(workers=N)` starts it.

JOB is a JSON file that holds the recipe and the options. The result is the run folder.
"""

import sys
from pathlib import Path

from largebatch.runs.launch import reporting_errors
from largebatch.runs.run import JOB, run_worker

if __name__ == "__main__":
    with reporting_errors():
        run_worker(*JOB.validate_json(Path(sys.argv[1]).read_bytes()))
