"""One run of a study in its own process.

    python -m largebatch.lab.studies.queue.one_run PART PARENT

PART is a `trial.Part` as JSON; the result is the run folder, and errors go to stderr. The process
ends with the process PARENT, even if that has already ended.
"""

import sys

from largebatch.distributed.environment import leave_with
from largebatch.errors import DivergedError, LargebatchError, printable
from largebatch.lab.studies.queue.trial import PART, carry_out
from largebatch.runs.launch import DIVERGED, STOPPED, USER

if __name__ == "__main__":
    leave_with(int(sys.argv[2]))
    try:
        carry_out(PART.validate_json(sys.argv[1]))
    except LargebatchError as error:
        sys.stderr.write(f"{printable(str(error))}\n")
        sys.exit(DIVERGED if isinstance(error, DivergedError) else USER)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
