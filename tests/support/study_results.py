"""Invented results of studies, in the form of the database."""

from collections.abc import Mapping, Sequence
from functools import cache

from largebatch import load_recipe
from largebatch.lab.studies.metrics import Measurement
from largebatch.lab.studies.queue.results import CellResults, Classes, Result
from largebatch.lab.studies.queue.study import RATE, Search
from largebatch.recipe.recipe import Recipe

IMAGES = 96
"""Number of images per update."""


@cache
def recipe(**parts: str) -> Recipe:
    """Return a short recipe with other parts of its schedule, given as JSON."""
    changes = [f"schedule.{key}={part}" for key, part in parts.items()]
    return load_recipe("digits_96", ["duration={steps: 600}", "polish=null", *changes])


def run(
    seed: int, top1: Sequence[float], *, every: int, scale: float = 1.0, diverged: bool = False
) -> Result:
    """Return a run with regular evaluations; an update takes 0.01 s."""
    evaluations = tuple(
        Measurement(
            step=every * number,
            epoch=every * number / 15,
            images=IMAGES * every * number,
            seconds=every * number / 100,
            top1=reached,
            top5=min(1.0, reached + 0.02),
            loss=2 - reached,
        )
        for number, reached in enumerate(top1, start=1)
    )
    return Result(
        seed=seed,
        scale=scale,
        values={RATE: 0.5},
        updates=every * len(top1),
        top1=0.1 if diverged else top1[-1],
        top5=0.5 if diverged else min(1.0, top1[-1] + 0.02),
        loss=2 - top1[-1],
        average_confidence=0.9 - seed / 100,
        confidence_deviation=0.1,
        class_confidence_deviation=0.05,
        classes_never_correct=1,
        diverged="the loss is nan" if diverged else None,
        evaluations=evaluations,
        classes=Classes(
            names=tuple("0123456789"),
            samples=(30,) * 10,
            correct=(*range(21, 30), 0),
            average_confidence=(*(0.8 + digit / 100 for digit in range(9)), float("nan")),
        ),
        host="node-7",
        hardware="x86_64, 2 threads",
        versions={"torch": "2.9.0"},
    )


def trial(rate: float, top1: float, *, pruned_after: int | None = None) -> Result:
    """Return a trial of a search."""
    return Result(
        seed=100,
        values={RATE: rate},
        updates=600,
        top1=top1,
        top5=1.0,
        loss=1.0,
        pruned_after=pruned_after,
        diverged="the loss is nan" if top1 <= 0.1 else None,
        host="node-7",
        hardware="x86_64, 2 threads",
        versions={"torch": "2.9.0"},
    )


def cell(
    policy: str,
    seeds: Sequence[Result],
    *,
    configuration: str = "small",
    search: Sequence[Result] = (),
    schedule: Mapping[str, str] | None = None,
    scaled: Sequence[Result] = (),
) -> CellResults:
    """Return one recipe with one policy; finished if it has seeds, with the rate 0.5 found."""
    return CellResults(
        study="by-hand",
        configuration=configuration,
        policy=policy,
        recipe=recipe(**(schedule or {})),
        settings=Search(trials=3, held_out=300),
        values={RATE: 0.5} if seeds else {},
        search=tuple(search),
        seeds=tuple(seeds),
        scaled=tuple(scaled),
        finished=bool(seeds),
    )
