"""MLPerf logs of simulated runs: the package's tracker over a real recipe's plan.

ImageNet is too large for a test. A tracker sees only the events of a run, so these are events of
the recipe's plan with invented accuracies; the checkers are MLPerf's.
"""

import functools
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from largebatch import load_recipe
from largebatch.lab.mlperf.logger import MLPerf
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.tracking.events import (
    EvaluationEvent,
    Event,
    Finish,
    Start,
    Status,
    StepEvent,
    Summary,
)

IMAGENET = Path(__file__).parents[2] / "recipes" / "imagenet"
POINTS: dict[str, dict[str, Any]] = json.loads(
    (files("mlperf_logging.rcp_checker") / "training_4.0.0" / "rcps_resnet.json").read_text()
)
"""Reference convergence points of MLPerf's own package, by their names."""

REACHED, MISSED = 0.7612, 0.7483
NOW = datetime(2026, 11, 22, 8, tzinfo=UTC)


@functools.cache
def recipe(name: str, *changes: str) -> Recipe:
    """Return a recipe for ImageNet."""
    return load_recipe(IMAGENET / f"resnet50_{name}.yaml", changes)


def start(of: Recipe, *, step: int = 0) -> Start:
    return Start(
        time=NOW, resume_step=step, recipe=of.name, plan=make_plan(of.mathematics, workers=1)
    )


def update(step: int) -> StepEvent:
    return StepEvent(stage="train", step=step, loss=6.9, lr=0.1, images_per_second=1.0)


def evaluation(epoch: float, top1: float, *, step: int = 1) -> EvaluationEvent:
    return EvaluationEvent(
        stage="train", step=step, epoch=epoch, top1=top1, top5=0.9, loss=1.0, samples=50_000,
        seconds=0.25,
    )  # fmt: skip


def finish(status: Status = "finished") -> Finish:
    summary = Summary(
        recipe="x", commit=None, versions={}, backend="serial", workers=1, global_batch=1,
        device_batch=1, accumulation=1, steps=1, skipped_steps=0, samples=1, seconds=1.0,
        images_per_second=1.0, peak_memory_bytes=1, top1=0.7, top5=0.9, loss=1.0, stages=(),
        status=status,
    )  # fmt: skip
    return Finish(time=NOW, summary=summary)


def whole_run(of: Recipe, *, reached_at: float) -> list[Event]:
    """Return the events of a run by the recipe's own plan that reaches the target in that epoch."""
    begin = start(of)
    plan = begin.plan
    events: list[Event] = [begin]
    done = 0
    for end in [*plan.evaluate_after, plan.steps]:
        epoch = plan.epoch(end)
        top1 = REACHED if epoch > reached_at - 0.1 else MISSED
        events += [update(done), update(end - 1), evaluation(epoch, top1, step=end)]
        done = end
    return [*events, finish()]


def short_run(of: Recipe, epochs: float | None) -> list[Event]:
    """Return the fewest events of a run that reaches the target after these epochs, or never."""
    last = evaluation(epochs or 58.0, REACHED if epochs else MISSED)
    return [start(of), update(0), last, finish()]


def write(folder: Path, of: Recipe, events: Sequence[Event], *, setup: float = 60.0) -> Path:
    """Write the events with a new tracker after `setup` seconds of setup; return the log.

    `setup` is in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tracker = MLPerf(folder, of, began=time.time() - setup)
    for event in events:
        tracker.record(event)
    return folder / "mlperf.log"


def lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the records of a log with these keys, or all of them."""
    found = [json.loads(line.split(" ", 1)[1]) for line in path.read_text().splitlines()]
    return [each for each in found if not keys or each["key"] in keys]


def rewrite(path: Path, key: str, **changes: object) -> None:
    """Change the value or metadata of one key of a log; `drop=True` takes its lines out."""
    kept = [
        record | (changes if record["key"] == key else {})
        for record in lines(path)
        if record["key"] != key or not changes.get("drop")
    ]
    text = "".join(f":::MLLOG {json.dumps(record)}\n" for record in kept)
    path.write_text(text, encoding="utf-8")


def run_folders(root: Path, of: Sequence[Recipe], epochs: Sequence[float | None]) -> list[Path]:
    """Write one run folder for each number of epochs, with the recipes in turn."""
    folders = [root / f"run-{number}" for number in range(len(epochs))]
    for number, folder in enumerate(folders):
        one = of[number % len(of)]
        write(folder, one, short_run(one, epochs[number]))
    return folders


def seeds(name: str, *changes: str, number: int = 5) -> list[Recipe]:
    """Return `number` recipes that differ in their seeds."""
    one = recipe(name, *changes)
    return [one.model_copy(update={"seed": seed}) for seed in range(number)]
