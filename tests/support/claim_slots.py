"""One of several processes that take the slots of a queue: `claim_slots.py URL NUMBER [hang]`.

Prints each slot that it was given; with `hang` it keeps its first one until it is killed.
"""

import sys
import time

from largebatch.lab.studies.queue.database import Queue, Slot, open_storage
from largebatch.lab.studies.queue.owners import Owners

NAME, DEFINITION = "races", {"study": "races"}


def slots(number: int) -> list[Slot]:
    """Return the slots that all of the processes share."""
    return [Slot(name=f"run-{k}", fixed={"rate": k + 1.0}) for k in range(number)]


if __name__ == "__main__":
    url, number = sys.argv[1], int(sys.argv[2])
    owners = Owners()
    with open_storage(url) as storage:
        queue = Queue(storage, NAME, DEFINITION, slots(number))
        while not queue.is_done:
            claim = queue.claim(owners)
            if claim is None:
                time.sleep(0.05)
                continue
            rate = claim.trial.suggest_float("rate", 0.5, 1000.0, log=True)
            print(claim.slot, rate, flush=True)
            if "hang" in sys.argv:
                time.sleep(600)
            queue.tell(claim.trial.number, state="COMPLETE", value=rate)
