"""Print what the pairs of recipes answer, from the frozen results of recipes_cpu2_2026-11-22.

    python -m benchmarks.studies.recipes.tables

Each pair trains a ResNet-9 at a small batch (SGD with Nesterov momentum) and at a large one (LARS;
Nesterov SGD; LARS for a quarter more epochs), all with the images, BatchNorm span and epochs of the
recipes fashion_mnist_resnet9_* and cifar10_resnet9_*, three seeds each. The peak rate of every arm
was searched with five trials of 30 % of its epochs, judged on 5,000 training images held out. The
ends of a run: `control`, the whole schedule; `statistics`, the exact statistics pass after it;
`clean`, the last epochs on clean images instead; `ema`, a moving average of the weights.

Top-1 of one arm minus that of another, in points: means over the seeds with 95 % intervals by
Student's t, paired by seed. + marks those that exclude 0 where all of a column hold together
(Bonferroni). No interval has the noise of the search or of the test images. The runs are of commit
7828ec27 (`git show 7828ec27:benchmarks/measure.py`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.speed.measuring import frozen
from benchmarks.studies.polishing.tables import TITLES, Groups, by_group, student
from largebatch.report.seeds import interval

Ended = tuple[str, str]
"""An arm of a data set, and its last stage."""

REACHED: dict[Ended, str] = {
    ("small", "control"): "Top-1, %: small batch, SGD",
    ("large", "control"): "Large batch, LARS",
    ("large", "clean + statistics"): "Large batch, LARS, polished",
    ("large, Nesterov", "control"): "Large batch, Nesterov SGD",
    ("large, Nesterov, straight decay", "control"): "Large batch, Nesterov SGD, straight decay",
}
SMALL, LARGE, NESTEROV = "small", "large", "large, Nesterov"
STRAIGHT = "large, Nesterov, straight decay"
LONGER = "large, 1.25 times as long"
CONTROL, CLEAN, STATISTICS, EMA = "control", "clean", "statistics", "ema"
POLISHED = "clean + statistics"


def _ends(arm: str, *, of: str, against: str = CONTROL) -> tuple[tuple[Ended, ...], ...]:
    return ((arm, of),), ((arm, against),)


def _arms(ours: str, theirs: str, end: str) -> tuple[tuple[Ended, ...], ...]:
    return ((ours, end),), ((theirs, end),)


QUESTIONS: dict[str, tuple[tuple[Ended, ...], ...]] = {
    "What does the large batch cost? LARS, against SGD at the small one": _arms(
        LARGE, SMALL, CONTROL),
    "The same with Nesterov SGD at both": _arms(NESTEROV, SMALL, CONTROL),
    "Nesterov SGD against LARS, large batch": _arms(NESTEROV, LARGE, CONTROL),
    "Nesterov SGD against LARS, both polished": _arms(NESTEROV, LARGE, POLISHED),
    "Nesterov SGD with a straight decay against LARS, large batch": _arms(
        STRAIGHT, LARGE, CONTROL),
    "Nesterov SGD with a straight decay against LARS, both polished": _arms(
        STRAIGHT, LARGE, POLISHED),
    "Nesterov SGD with a straight decay against small, both polished": _arms(
        STRAIGHT, SMALL, POLISHED),
    "Polishing (clean epochs, then statistics), small batch": _ends(SMALL, of=POLISHED),
    "Polishing, large batch, LARS": _ends(LARGE, of=POLISHED),
    "Polishing, large batch, Nesterov SGD": _ends(NESTEROV, of=POLISHED),
    "Polishing gains more at the large batch, LARS, than at the small one": (
        ((LARGE, POLISHED), (SMALL, CONTROL)), ((LARGE, CONTROL), (SMALL, POLISHED))),
    "Clean epochs, small batch": _ends(SMALL, of=CLEAN),
    "Clean epochs, large batch, LARS": _ends(LARGE, of=CLEAN),
    "The statistics pass alone, small batch": _ends(SMALL, of=STATISTICS),
    "The statistics pass alone, large batch, LARS": _ends(LARGE, of=STATISTICS),
    "The statistics pass after clean epochs, large batch, LARS": _ends(
        LARGE, of=POLISHED, against=CLEAN),
    "The moving average of weights, small batch": _ends(SMALL, of=EMA),
    "The moving average of weights, large batch, LARS": _ends(LARGE, of=EMA),
    "The moving average with statistics, large batch, LARS": _ends(LARGE, of="ema + statistics"),
    "What polishing leaves of the cost: LARS, polished, against small": (
        ((LARGE, POLISHED),), ((SMALL, CONTROL),)),
    "LARS against small, both polished": _arms(LARGE, SMALL, POLISHED),
    "A quarter more epochs instead of polishing, LARS": _arms(LONGER, LARGE, CONTROL),
    "LARS polished, against a quarter more epochs": (((LARGE, POLISHED),), ((LONGER, CONTROL),)),
}  # fmt: skip
"""Questions: top-1 of some ends minus that of others with the same seeds."""


def read() -> Groups:
    """Return top-1 in per cent by arm of a data set, end and seed."""
    runs: dict[str, Any] = frozen("recipes")["runs"]
    named = {key: {**run, "group": f"{run['data']}, {run['arm']}"} for key, run in runs.items()}
    return by_group(named)


def answers(groups: Groups) -> Iterator[str]:
    """Yield the lines of a table: every question and its answer for each data set."""
    yield f"| | {' | '.join(TITLES.values())} |"
    yield "|---" * (len(TITLES) + 1) + "|"
    for (arm, end), name in REACHED.items():
        cells = [_interval([*groups[f"{data}, {arm}"][end].values()], ".2f")
                 if f"{data}, {arm}" in groups else "" for data in TITLES]  # fmt: skip
        yield f"| {name} | {' | '.join(cells)} |"
    for question, sides in QUESTIONS.items():
        cells = [_answer(groups, data, *sides) for data in TITLES]
        yield f"| {question} | {' | '.join(cells)} |"
    saved = [_interval(saved_epochs(groups, data), ".0f") for data in TITLES]
    yield f"| Epochs that polishing saves, % of the schedule, LARS | {' | '.join(saved)} |"


def _answer(groups: Groups, data: str, plus: tuple[Ended, ...], minus: tuple[Ended, ...]) -> str:
    values = difference_of(groups, data, plus, minus)
    if not values:
        return "not measured"
    together = interval(values, together=len(QUESTIONS))
    is_sure = len(values) > 1 and (together.low > 0 or together.high < 0)
    return _interval(values, "+.2f") + " +" * is_sure


def difference_of(
    groups: Groups, data: str, plus: Sequence[Ended], minus: Sequence[Ended]
) -> list[float]:
    """Return the sum of some ends minus that of others, in points, for every seed that all have."""
    ours, theirs = (
        [groups.get(f"{data}, {arm}", {}).get(end, {}) for arm, end in side]
        for side in (plus, minus)
    )
    seeds = set.intersection(*(set(one) for one in (*ours, *theirs)))
    return [
        sum(one[seed] for one in ours) - sum(one[seed] for one in theirs) for seed in sorted(seeds)
    ]


def saved_epochs(groups: Groups, data: str) -> list[float]:
    """Return by seed how much longer a schedule would gain as much as polishing, in per cent.

    Straight between the schedule and that of a quarter more epochs, and beyond it.
    """
    polished = difference_of(groups, data, *_ends(LARGE, of=POLISHED))
    longer = difference_of(groups, data, *_arms(LONGER, LARGE, CONTROL))
    return [25 * one / other for one, other in zip(polished, longer, strict=False) if other > 0]


def _interval(values: list[float], form: str) -> str:
    if not values:
        return ""
    found = student(values)
    if found["n"] == 1:
        return f"{found['mean']:{form}} (one seed)"
    between = f"{found['low']:{form}} to {found['high']:{form}}"
    return f"{found['mean']:{form}} ({between}, n = {found['n']})"


if __name__ == "__main__":
    print("\n".join(answers(read())))
