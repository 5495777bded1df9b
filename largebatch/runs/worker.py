"""One local worker of a run: `python -m largebatch.runs.worker JOB`, as `run(workers=N)` starts it.

JOB is the recipe and the options as JSON; the result is the run folder.
"""

import sys

if __name__ == "__main__":
    from largebatch.runs.launch import reporting_errors
    from largebatch.runs.output import prepare_streams
    from largebatch.runs.run import JOB, run_worker

    prepare_streams()
    with reporting_errors():
        run_worker(*JOB.validate_json(sys.argv[1]))
