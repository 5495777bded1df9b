"""Measure whether warm-up repairs what late gradients cost, with momentum and without.

    python benchmarks/warmup_by_tau.py [--processes N] [--write]

The network, data, conditions, search, seeds and intervals of momentum_by_tau.py, with which it
shares runs: LeNet-5 on the digits, 30 simulated learners, twelve epochs. An arm is a condition, a
momentum of 0 or 0.9, and no warm-up or one epoch of it; each has a rate of its own. Goes on where
it was stopped; with --write it trains nothing. Writes
benchmarks/results/warmup_by_tau_<machine>_<date>.json.

Decided before: a difference is top-1 with warm-up less top-1 without, at the same condition and
momentum. What staleness costs less with warm-up is that difference in a condition with late
gradients, less hardsync's. All of them hold together, with 95 %.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from contrasts import contrast, no_run_fails, noise_of, none_fails
from measuring import write
from momentum_by_tau import (
    CONDITIONS,
    GRID,
    USUAL,
    Found,
    Point,
    cell_of,
    parse,
    search_and_train,
    trials_of,
    whole,
)

NAME = "warmup_by_tau"
MOMENTA = (0.0, USUAL)
EPOCHS_OF_WARMUP = 1.0

Terms = list[tuple[float, Mapping[int, float]]]


def main() -> None:
    """Search the rates, train the seeds and write the result."""
    args = parse(__doc__.splitlines()[0])
    arms = product(CONDITIONS, MOMENTA, GRID, (0.0, EPOCHS_OF_WARMUP))
    search, rows = search_and_train([Point(*arm) for arm in arms], args)
    print(write(NAME, f"python benchmarks/{NAME}.py", result(search, rows)))


def result(search: Found, rows: Found) -> dict[str, Any]:
    """Return the cells, what warm-up gains, and the rates that were tried."""
    kept = whole(rows)
    noise = noise_of(none_fails(kept.values()))
    gains = {
        name: terms
        for name, terms in differences(kept)
        if no_run_fails(*(cell for _, cell in terms))
    }
    return {
        "noise": noise._asdict(),
        "cells": [cell_of(point, row) for point, row in rows.items()],
        "differences": {
            name: contrast(terms, noise, together=len(gains)).scaled(100)._asdict()
            for name, terms in gains.items()
        },
        "search": trials_of(search),
    }


def differences(kept: Mapping[Point, Mapping[int, float]]) -> Iterator[tuple[str, Terms]]:
    """Yield what warm-up gains in every condition, and there over hardsync, as weighted means."""

    def gain(condition: str, momentum: float) -> Terms:
        pair = [Point(condition, momentum, 0.0, warmup) for warmup in (EPOCHS_OF_WARMUP, 0.0)]
        return [(sign, kept.get(point, {})) for sign, point in zip((1.0, -1.0), pair, strict=True)]

    for condition, momentum in product(CONDITIONS, MOMENTA):
        own = gain(condition, momentum)
        yield f"{condition}, momentum {momentum:g}", own
        if condition != "hardsync":
            others = [(-weight, cell) for weight, cell in gain("hardsync", momentum)]
            yield f"{condition}, momentum {momentum:g}, less hardsync's", own + others


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
