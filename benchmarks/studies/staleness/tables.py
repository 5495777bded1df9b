"""Print the tables of the study of stale gradients, from the frozen results of staleness_cpu2.

    python -m benchmarks.studies.staleness.tables

A fifth of CIFAR-10's images, 12 epochs, learners whose gradients are simulated to be late: which
rates train (`sensitivity`), what lateness costs at them (`main`), and equal products of mini-batch
and learners (`products`). Intervals are by the noise of all cells, in points of top-1. The runs are
of commit a1dc821f (`git show a1dc821f:benchmarks/staleness.py`); `largebatch lab study rudra-small`
is the same question at the size of the paper.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.speed.measuring import frozen
from largebatch.report.seeds import Interval

RATES = {"sgd": 0.03, "lars": 0.362, "norm": 0.0048}  # the best without staleness
FACTORS = {"whole": 1.0, "third": 1 / 3, "tenth": 1 / 10}

Found = dict[str, Any]


def main() -> None:
    """Print every table."""
    found = frozen("staleness")
    for table in (_rates, _cells, _questions, _seconds, _products):
        print(*table(found), "", sep="\n")


def _rates(found: Found) -> Iterator[str]:
    cells = found["cells"]["sensitivity"]
    protocols = {
        "hardsync": "sigma0-mu4-lambda30",
        "1-softsync, over tau": "sigma1-mu4-lambda30-staleness",
        "asynchronous, over tau": "sigma30-mu4-lambda30-staleness",
        "asynchronous, fixed": "sigma30-mu4-lambda30-none",
        "one learner, fixed": "sigma1-mu4-lambda1-staleness",
    }
    yield f"| rate | {' | '.join(protocols)} |"
    yield "|---" * (len(protocols) + 1) + "|"
    for name, rate in RATES.items():
        for word, factor in FACTORS.items():
            own = (cells.get(f"{name}-{word}-usual-{of}") for of in protocols.values())
            shown = ("" if cell is None else _top1(cell) for cell in own)
            yield f"| {name}, {rate * factor:.3g} | {' | '.join(shown)} |"


def _top1(cell: Found) -> str:
    if cell["runs that fail"]:
        diverged = sum(one["diverged"] is not None for one in cell["by seed"].values())
        return f"fails in {cell['runs that fail']} of {len(cell['by seed'])} ({diverged} diverge)"
    return _interval(cell["top-1"], ".2f")


def _cells(found: Found) -> Iterator[str]:
    yield "| cell | top-1, % | mean tau | highest | later than 2 sigma | updates | seconds |"
    yield "|---|---|---|---|---|---|---|"
    for name, cells in found["cells"].items():
        for cell, of in cells.items() if name != "sensitivity" else ():
            late, seeds = of["tau > 2 sigma"], of["by seed"].values()
            seconds = statistics.fmean(one["simulated_seconds"] for one in seeds)
            yield (
                f"| {cell} | {_top1(of)} | {of['mean tau']:.2f} | {of['highest tau']} | "
                f"{late['gradients']:,} of {late['of']:,} | {next(iter(seeds))['updates']:,} | "
                f"{seconds:.3g} |"
            )


def _questions(found: Found) -> Iterator[str]:
    for question, of in found["top-1, points"].items():
        yield f"| {question} | points | level |"
        yield "|---|---|---|"
        for name, answer in of.items():
            yield f"| {name} | {_interval(answer, '+.2f')} | {_yes(answer['level'])} |"
        yield ""


def _seconds(found: Found) -> Iterator[str]:
    cells = found["seconds to a training loss"]
    losses = list(next(iter(cells.values()), {}))
    yield f"| simulated seconds to a training loss of | {' | '.join(losses)} |"
    yield "|---" * (len(losses) + 1) + "|"
    for name, cell in cells.items():
        yield f"| {name} | {' | '.join(_mean([*cell[loss].values()]) for loss in losses)} |"


def _mean(seconds: list[float | None]) -> str:
    reached = [one for one in seconds if one is not None]
    if not reached:
        return "never"
    rest = "" if len(reached) == len(seconds) else f" ({len(reached)} of {len(seconds)})"
    return f"{statistics.fmean(reached):.2f}{rest}"


def _products(found: Found) -> Iterator[str]:
    yield "| protocol | mu x lambda | cells | points | level |"
    yield "|---|---|---|---|---|"
    for one in found["products"]:
        if "cells" in one:
            yield (
                f"| {one['protocol']} | {one['product']} | {' - '.join(one['cells'])} | "
                f"{_interval(one, '+.2f')} | {_yes(one['level'])} |"
            )
        else:
            of = " - ".join(map(str, one["products"]))
            yield f"| {one['protocol']} | {of} | means | {_interval(one, '+.2f')} | |"


def _interval(found: Found, form: str) -> str:
    return Interval(*(found[key] for key in Interval._fields)).with_ends(form)


def _yes(value: bool) -> str:  # noqa: FBT001 -- one word for it
    return "yes" if value else "no"


if __name__ == "__main__":
    main()
