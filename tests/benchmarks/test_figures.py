"""Figures of the README are those of the newest results.

A passage (a paragraph, an item of a list or a row of a table) is found by a few words of it; the
figures that it must have are computed from benchmarks/results. All other words are free.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import pytest

from benchmarks.speed.measuring import RESULTS, ROOT, newest
from benchmarks.studies.averaged_weights import tables as averaged
from benchmarks.studies.optimizers.tables import POLISHED, RESNET, Cell, Study, epochs_by_seed
from benchmarks.studies.polishing.tables import TITLES
from benchmarks.studies.recipes.tables import QUESTIONS, difference_of, read
from largebatch.report.seeds import interval

H100 = "nvidia-h100-80gb-hbm3"
STRAIGHT = "Nesterov SGD with a straight decay against"

AS_IN_TRAINING = ("augmented", "polish augmented")
"""Passes over images as in training: torch's `update_bn` on one worker, and `polish`."""

Figures = Iterable[str]


def passage(words: str) -> str:
    """Return the one passage of the README that has these words."""
    parts = re.split(r"\n\s*\n|\n(?=- |\|)", (ROOT / "README.md").read_text(encoding="utf-8"))
    (found,) = (joined for part in parts if words in (joined := " ".join(part.split())))
    return found


def numbers(text: str) -> set[str]:
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return set(re.findall(r"\d+(?:\.\d+)?", plain))


@cache
def result(name: str, machine: str = "cpu2") -> dict[str, Any]:
    path = newest(name, RESULTS, machine=machine)
    assert path is not None, name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def shown(*values: float, digits: int = 1) -> Figures:
    return [f"{abs(value):.{digits}f}" for value in values]


def over_seeds(values: Iterable[float], digits: int = 1) -> Figures:
    """Return the mean and the ends of its interval."""
    return shown(*interval(values)[:3], digits=digits)


def recorded(found: Mapping[str, Any], digits: int = 1) -> Figures:
    """Return the median or mean, and the ends, of an interval in the results."""
    return shown(found.get("median", found.get("mean")), found["low"], found["high"], digits=digits)


def answers(*questions: str) -> Iterable[Figures]:
    """Yield the answers of the pairs of recipes, in points."""
    for question in questions:
        for data in TITLES:
            if found := difference_of(read(), data, *QUESTIONS[question]):
                yield over_seeds(found, 2)


def averages(weights: str, kinds: tuple[str, ...]) -> Callable[[], Iterable[Figures]]:
    """Return what yields top-1 on CIFAR-10 of an average, after each of these passes."""
    study = result("averaged_weights")
    return lambda: [
        shown(statistics.fmean(averaged.top1(study, "cifar10", weights, kind))) for kind in kinds
    ]


def epochs_of_muon() -> Iterable[Figures]:
    """Yield the epochs to 40 % at 16,000, as multiples of Muon's for AdamW."""
    study = Study(result("optimizers"))
    seeds, target = study.seeds(), study.targets[RESNET]
    muon, adamw = (
        epochs_by_seed(seeds[Cell(RESNET, name, 16_000)], target, POLISHED)
        for name in ("muon", "adamw")
    )
    yield over_seeds(muon.values())
    yield over_seeds([adamw[seed] / muon[seed] for seed in muon], 2)


def late() -> Iterable[Figures]:
    found = result("staleness")["top-1, points"]
    found = found["staleness and small updates: sigma 30, minus hardsync"]
    yield recorded(found["sgd, against the rate found"])
    yield recorded(found["sgd"])


def faults() -> Iterable[Figures]:
    found = result("accuracy_fell")["loops"]
    for name in ("one process", "correct", "not reduced", "not scaled", "scaled twice"):
        tops = [100 * one["top1"][-1] for one in found[name]["seeds"].values()]
        yield shown(min(tops), max(tops))


def compiled() -> Iterable[Figures]:
    ratios = result("resnet50", H100)["ratios"]
    yield recorded(ratios["ours / timm"], 2)
    yield recorded(ratios["ours, compiled: default / timm, compiled: default"], 2)


CLAIMS: list[tuple[str, Callable[[], Iterable[Figures]]]] = [
    ("| EMA 0.999", averages("EMA 0.999, peak", ("as left", "averaged", *AS_IN_TRAINING))),
    ("| SWA", averages("SWA, peak", ("as left", "averaged", *AS_IN_TRAINING))),
    ("| Schedule-Free SGD", averages("Schedule-Free SGD, end", ("as left", *AS_IN_TRAINING))),
    ("| soup of 3", averages("soup of 3, end", ("as left", "averaged", *AS_IN_TRAINING))),
    ("| EMA 0.99,", averages("EMA 0.99, end", ("as left", "averaged", "own", "polish"))),
    ("| Nesterov SGD with", lambda: answers(f"{STRAIGHT} small, both polished")),
    ("| LARS, 1,920 or", lambda: answers("LARS against small, both polished")),
    ("| Clean epochs", lambda: answers("Clean epochs, large batch, LARS")),
    ("| Exact statistics after", lambda: answers(
        "The statistics pass after clean epochs, large batch, LARS")),
    ("| A quarter more", lambda: answers("A quarter more epochs instead of polishing, LARS")),
    ("| Eight workers with a fault", faults),
    ("| 30 asynchronous learners", late),
    ("| Epochs to 40 %", epochs_of_muon),
    ("It has run on one GPU", compiled),
]  # fmt: skip


@pytest.mark.parametrize(("words", "figures"), CLAIMS)
def test_a_passage_has_the_figures_of_the_newest_results(
    words: str, figures: Callable[[], Iterable[Figures]]
) -> None:
    text = passage(words)
    for some in figures():
        assert set(some) <= numbers(text), text
