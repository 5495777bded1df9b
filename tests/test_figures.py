"""Figures in sentences of the documents are those of the newest results.

A passage (a paragraph, an item of a list or a row of a table) is found by words of it; the figures
it must have are computed from benchmarks/results. Signs, order and all other words are free. Whole
tables are held against their results by the tests of each study.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import averaged_figure  # noqa: E402
import measure_pages  # noqa: E402
from averaged_passes import SHARED  # noqa: E402
from measuring import RESULTS, newest  # noqa: E402
from optimizers import Study, every_cell  # noqa: E402
from optimizers_figure import epochs_by_seed, seeds_of  # noqa: E402
from optimizers_runs import AS_IS, POLISHED, RESNET  # noqa: E402
from polishing_tables import by_group, paired  # noqa: E402

from largebatch.lab.studies.metrics import interval  # noqa: E402

H100 = "nvidia-h100-80gb-hbm3"
STRAIGHT = "Nesterov SGD with a straight decay against"
TWO = "clean 2 + statistics"
SHUFFLED = "1,000 shuffled images in batches of 64"
UNEQUAL = "64, 64 and 16 images in the order of their classes"

Figures = Iterable[str]


def passage(page: Path, words: str) -> str:
    """Return the one passage of a page that has all these words, which commas divide."""
    parts = re.split(r"\n\s*\n|\n(?=- |\|)", page.read_text(encoding="utf-8"))
    joined = (" ".join(part.split()) for part in parts)
    (found,) = (part for part in joined if all(word in part for word in words.split(", ")))
    return found


def numbers(text: str) -> set[str]:
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return set(re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", plain))


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


def answers(*questions: str, data: Iterable[str] = measure_pages.TITLES) -> Iterable[Figures]:
    """Yield the answers of the page on pairs of recipes, in points."""
    runs = result("recipes")["runs"]
    named = {key: run | {"group": f"{run['data']}, {run['arm']}"} for key, run in runs.items()}
    for question in questions:
        for each in data:
            sides = measure_pages.QUESTIONS[question]
            if found := measure_pages.difference_of(by_group(named), each, *sides):
                yield over_seeds(found, 2)


def arms(data: str, ours: tuple[str, str], theirs: tuple[str, str]) -> Figures:
    """Return the difference of two arms of the polishing study, with crops from 35 %."""
    groups = by_group(result("polishing_study")["cells"])
    one, other = (groups[f"{data}, {cell}, area 0.35"][arm] for cell, arm in (ours, theirs))
    return over_seeds(paired(one, other))


def gains(over: str) -> dict[tuple[str, str], list[float]]:
    """Return what polish gains over another pass, for each data set and average that have it."""
    every = {
        (data, weights): averaged_figure.gains(result("averaged_weights"), data, weights, over)
        for data in averaged_figure.TITLES
        for weights in SHARED
    }
    return {of: found for of, found in every.items() if found}


def ranges_of_gains() -> Iterable[Figures]:
    left, averaged = (
        [statistics.fmean(one) for one in gains(over).values()] for over in ("as left", "averaged")
    )
    yield shown(min(left), max(left), statistics.median(left), min(averaged), max(averaged))


def ema(data: str) -> Iterable[Figures]:
    """Yield what EMA 0.999 at the peak rate has as left, by seed and polished, and its gain."""
    of = (data, "EMA 0.999, peak")
    left, polished = (
        averaged_figure.top1(result("averaged_weights"), *of, kind)
        for kind in ("as left", "polish augmented")
    )
    yield shown(statistics.fmean(left), min(left), max(left), statistics.fmean(polished))
    yield over_seeds(gains("averaged")[of])


@cache
def optimizer(name: str, batch: int, column: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return epochs to the target and top-1 at the end by seed, of the ResNet-9."""
    path, found = newest("optimizers", RESULTS, machine="cpu2"), result("optimizers")
    assert path is not None
    every = seeds_of(Study(path, every_cell([]), epochs=found["epochs"])).items()
    (runs,) = (
        runs
        for cell, runs in every
        if (cell.network, cell.optimizer, cell.batch) == (RESNET, name, batch)
    )
    top1 = "polished" if column == POLISHED else "top1"
    ends = {run["seed"]: 100 * run[top1] for run in runs}
    return epochs_by_seed(runs, found["targets"][RESNET], column), ends


def ratio_to_muon(name: str, batch: int, column: int = POLISHED) -> Figures:
    (ours, _), (muon, _) = (optimizer(one, batch, column) for one in (name, "muon"))
    return over_seeds([ours[seed] / muon[seed] for seed in ours], 2)


def epochs_of_muon() -> Iterable[Figures]:
    yield over_seeds(optimizer("muon", 16_000, POLISHED)[0].values())
    yield ratio_to_muon("adamw", 16_000)
    as_is = (optimizer(name, 16_000, AS_IS)[0].values() for name in ("muon", "adamw"))
    yield shown(*map(statistics.fmean, as_is))
    (_, muon), (_, nesterov) = (optimizer(name, 500, POLISHED) for name in ("muon", "nesterov"))
    yield over_seeds([muon[seed] - nesterov[seed] for seed in muon])


def variance(division: str, *rivals: str, digits: int = 3) -> Figures:
    """Return the largest relative errors of a variance, means over orders of the images."""
    found = result("polish_error")["error"][division]
    for rival in rivals:
        mean = found[rival]["variance, relative"]["mean"]
        yield f"{mean:.{digits}f}" if mean >= 0.001 else f"{mean:.0e}".replace("e-0", "e-")


def late() -> Iterable[Figures]:
    found = result("staleness")["top-1, points"]
    found = found["staleness and small updates: sigma 30, minus hardsync"]
    yield recorded(found["sgd, against the rate found"])
    yield recorded(found["sgd"])


def compiled() -> Iterable[Figures]:
    ratios = result("resnet50", H100)["ratios"]
    yield recorded(ratios["ours / timm"], 2)
    yield recorded(ratios["ours, compiled: default / timm, compiled: default"], 2)


def errors(digits: int = 2) -> Iterable[Figures]:
    yield variance(SHUFFLED, "ours", "ours, two workers", "update_bn", "fvcore")
    for peer in ("update_bn", "fvcore"):
        two = (f"{peer}, worker 0's own", f"{peer}, averaged over workers")
        yield variance(SHUFFLED, *two, digits=digits)
    yield variance(UNEQUAL, "update_bn", digits=digits)
    by_order = result("polish_error")["error"][SHUFFLED]["update_bn"]["variance, relative"]
    yield shown(by_order["min"], by_order["max"], digits=3)


def more_errors() -> Iterable[Figures]:
    yield from errors(3)
    for division in result("polish_error")["error"]:
        if "1,000" not in division:
            yield variance(division, "update_bn")


def levels() -> Iterable[Figures]:
    """Yield by how many levels pixels of DALI and torchvision differ at most."""
    found, worst = result("decoder_pixels"), {}
    for kind in ("bilinear", "bicubic"):
        crops = [found[f"{kind}, {crop}"] for crop in ("random crops", "centre crop")]
        for place in ("inside", "outermost"):
            worst[kind, place] = max(crop[place]["largest"] for crop in crops)
    yield shown(worst["bilinear", "inside"], worst["bilinear", "outermost"], digits=0)
    yield shown(max(worst["bicubic", place] for place in ("inside", "outermost")), digits=0)


def after_clean() -> Iterable[Figures]:
    """Yield what the statistics pass adds after two clean epochs, crops from 8 %."""
    groups = by_group(result("polishing_study")["cells"])
    for data in ("fashion_mnist", "cifar10"):
        for batch in ("large", "small"):
            cell = groups[f"{data}, lars, {batch}, area 0.08"]
            yield over_seeds(paired(cell["clean 2 + statistics"], cell["clean 2"]), 2)


def rivals_of_muon() -> Iterable[Figures]:
    for name in ("adamw", "lars", "lamb", "nesterov"):
        yield ratio_to_muon(name, 16_000)
    yield ratio_to_muon("adamw", 16_000, AS_IS)


def gained_at_16000() -> Iterable[Figures]:
    """Yield what polishing adds at the end, by optimizer."""
    for name in ("lars", "adamw", "muon", "nesterov"):
        (_, after), (_, before) = (optimizer(name, 16_000, column) for column in (POLISHED, AS_IS))
        yield shown(statistics.fmean(after[seed] - before[seed] for seed in after))


def cost_of_the_pass() -> Iterable[Figures]:
    for machine, layouts in (("cpu2", ["NCHW"]), (H100, ["NCHW", "channels last"])):
        for layout in layouts:
            yield recorded(result("polish", machine)[layout]["ratios"]["ours / forward"], 2)


def checkpoints() -> Iterable[Figures]:
    for name in ("checkpoint", "checkpoint_busy"):
        yield recorded(result(name)["update while writing / update"], 2)


def faults() -> Iterable[Figures]:
    found = result("accuracy_fell")["loops"]
    for name in ("one process", "correct", "not reduced", "not scaled", "scaled twice"):
        tops = [100 * one["top1"][-1] for one in found[name]["seeds"].values()]
        yield shown(min(tops), max(tops))


CLAIMS: list[tuple[str, str, Callable[[], Iterable[Figures]]]] = [
    ("README.md", "nobody measured", ranges_of_gains),
    ("README.md", "small ones, both polished", lambda: answers(
        f"{STRAIGHT} small, both polished", "LARS against small, both polished")),
    ("README.md", "Final Polishing of LARS's", lambda: answers(
        "Clean epochs, large batch, LARS", "A quarter more epochs instead of polishing, LARS",
        "The statistics pass after clean epochs, large batch, LARS")),
    ("README.md", "| EMA 0.999", lambda: (*ema("cifar10"), *ema("fashion_mnist"))),
    ("README.md", "Eight workers with a fault", faults),
    ("README.md", "30 asynchronous learners", late),
    ("README.md", "Epochs to 40 %", epochs_of_muon),
    ("README.md", "It has run on one GPU", compiled),
    ("largebatch/recipe/execution.py", "pixels of photographs", levels),
    ("docs/final-polishing.md", "add little", after_clean),
    ("docs/final-polishing.md", "add little", lambda: answers(
        "The statistics pass after clean epochs, large batch, LARS")),
    ("docs/final-polishing.md", "Small batches gain as much", lambda: [
        *answers(f"{STRAIGHT} small, both polished"),
        *answers("LARS against small, both polished", data=["cifar10"])]),
    ("docs/final-polishing.md", "crops are mild", lambda: answers(
        "Polishing, large batch, LARS")),
    ("docs/final-polishing.md", "relative error of a variance", more_errors),
    ("docs/final-polishing.md", "Polished the same way", lambda: (
        arms(data, ("lars, large", TWO), ("lars, small", TWO)) for data in measure_pages.TITLES)),
    ("docs/final-polishing.md", "With five clean epochs", lambda: (
        arms(data, ("lars, large", "clean 5 + statistics"), (f"{small}, small", TWO))
        for data in measure_pages.TITLES for small in ("lars", "sgd"))),
    ("docs/final-polishing.md", "Make a pass", ranges_of_gains),
    ("docs/optimizers.md", "At 16,000 (250 images", rivals_of_muon),
    ("docs/optimizers.md", "closer", lambda: (
        *(ratio_to_muon("adamw", batch) for batch in (500, 2_000)),
        ratio_to_muon("adamw", 2_000, AS_IS))),
    ("docs/optimizers.md", "Polishing at 16,000", gained_at_16000),
    ("docs/final-polishing.md", "plain forward pass through", cost_of_the_pass),
    ("docs/faults.md", "writes it in a thread", checkpoints),
    *(("docs/recipes/README.md", words, partial(answers, question)) for words, question in {
        "A large batch costs nothing": "What does the large batch cost? LARS, against SGD at the "
        "small one",
        "Polishing gives it back": "Polishing, large batch, LARS",
        "Polishing helps the large batch more": "Polishing (clean epochs, then statistics), small "
        "batch",
        "LARS beats Nesterov SGD": "Nesterov SGD against LARS, large batch",
        "| Nesterov SGD with a straight decay minus the": f"{STRAIGHT} small, both polished",
    }.items()),
    ("docs/staleness.md", "Against hardsync at its best rate", lambda: [*late()][:1]),
]  # fmt: skip


@pytest.mark.parametrize(("page", "words", "figures"), CLAIMS)
def test_a_sentence_has_the_figures_of_the_newest_results(
    page: str, words: str, figures: Callable[[], Iterable[Figures]]
) -> None:
    text = passage(ROOT / page, words)
    for some in figures():
        assert set(some) <= numbers(text), text
