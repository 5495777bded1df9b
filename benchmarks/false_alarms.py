"""Measure how often `lr recommend` advises against one of several equal policies.

    python benchmarks/false_alarms.py

Draws studies of POLICIES policies with SEEDS seeds whose accuracies have one normal distribution,
and compares the one with the highest mean with the others as the command does: by pairs of seeds,
with intervals that hold together, and beside that with intervals that hold alone.
"""

from statistics import fmean

import numpy as np
from measuring import write

from largebatch.lab.studies.metrics import difference

STUDIES = 4_000
POLICIES = 13
SEEDS = 5


def main() -> None:
    """Count the false alarms of both kinds of intervals and write their rates."""
    draw = np.random.default_rng(1)
    studies = [
        [dict(enumerate(policy)) for policy in draw.normal(size=(POLICIES, SEEDS)).tolist()]
        for _ in range(STUDIES)
    ]
    result: dict[str, float] = {"studies": STUDIES, "policies": POLICIES, "seeds": SEEDS}
    for name, together in (("together", POLICIES - 1), ("alone", 1)):
        alarms = [_alarms(policies, together=together) for policies in studies]
        result |= {
            f"{name}: studies with a false alarm": fmean(number > 0 for number in alarms),
            f"{name}: policies with one, of those compared": fmean(alarms) / (POLICIES - 1),
        }
    print(write("false_alarms", "python benchmarks/false_alarms.py", result))


def _alarms(policies: list[dict[int, float]], *, together: int) -> int:
    """Return the number of policies that are significantly below the best one."""
    first = max(policies, key=lambda seeds: fmean(seeds.values()))
    others = (one for one in policies if one is not first)
    return sum(difference(first, one, together=together).low > 0 for one in others)


if __name__ == "__main__":
    main()
