"""Invented results of a study of settings, in the form of the database."""

from collections.abc import Sequence
from functools import cache

from largebatch import load_recipe
from largebatch.lab.studies.queue.results import Result, SettingResults
from largebatch.lab.studies.queue.usage import Usage
from largebatch.recipe.recipe import Recipe


@cache
def recipe(batch: int, cache: str | None) -> Recipe:
    changes = [f"batch.global_batch={batch}", f"execution.cache={cache or 'null'}"]
    return load_recipe("digits_96", ["duration={steps: 600}", "polish=null", *changes])


def run(
    seed: int,
    top1: float,
    *,
    seconds: float,
    begun: float = 0.0,
    diverged: bool = False,
    others: float = 0.0,
) -> Result:
    """Return a run of `seconds` seconds, a tenth of which were evaluations."""
    return Result(
        seed=seed,
        values={},
        updates=600,
        top1=0.1 if diverged else top1,
        top5=0.5 if diverged else 1.0,
        loss=1.0,
        diverged="the loss is nan" if diverged else None,
        usage=Usage(
            train_seconds=0.9 * seconds,
            evaluation_seconds=0.1 * seconds,
            cpu_seconds=1.5 * seconds,
            cores=1.5,
            peak_memory_bytes=4e8,
            read_bytes=2e6,
            written_bytes=1e6,
        ),
        seconds=seconds,
        images_per_second=600 * 96 / seconds,
        begun=begun,
        ended=begun + seconds,
        other_cores=others,
        host="node-7",
        versions={"torch": "2.9.0"},
    )


def cell(
    configuration: str,
    setting: str,
    seeds: Sequence[Result],
    *,
    batch: int = 96,
    cache: str | None = None,
    threads: int | None = 1,
    finished: bool = True,
) -> SettingResults:
    """Return one recipe with one setting."""
    return SettingResults(
        study="by-hand",
        configuration=configuration,
        setting=setting,
        recipe=recipe(batch, cache),
        workers=1,
        backend="auto",
        threads=threads,
        environment={},
        values={},
        search=(),
        seeds=tuple(seeds),
        finished=finished,
    )
