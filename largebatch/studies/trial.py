"""One run of a study: trained in a run folder of its own, and what is recorded of it.

The record holds all that a reader of the database needs, for the run folder may be on another
machine, or gone: `results.Result` has its fields.
"""

import json
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName
from largebatch.errors import CheckpointError, DivergedError
from largebatch.recipe.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import Run, read_run
from largebatch.runs.interrupts import noting_requests
from largebatch.runs.run import run
from largebatch.studies.metrics import has_diverged, measurements
from largebatch.tracking.environment import source_commit, versions
from largebatch.tracking.events import Evaluation, Mistakes, Summary

Result = dict[str, Any]
"""What is recorded of a run, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine decides about the runs of a study, as `run` takes it."""

    data: Path | None = None
    dataset: str | None = None
    imports: tuple[str, ...] = ()
    backend: BackendName = "auto"
    timeout: float = TIMEOUT_SECONDS

    def options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the options of a run; recipes whose images are no folder's are given none."""
        reads = recipe.data.source == "folder"
        return {
            "data": self.data if reads else None,
            "dataset": self.dataset if reads else None,
            "imports": self.imports,
            "backend": self.backend,
            "timeout": self.timeout,
        }


class Interrupted(Exception):  # noqa: N818 -- a request is no error
    """A run was asked to stop, and has saved."""


Hopeless = Callable[[int, Evaluation], bool]
"""Decides after so many updates, by the evaluation there, whether to stop a run early."""


def train(
    recipe: Recipe, folder: Path, machine: Machine, *, stops: Sequence[int], hopeless: Hopeless
) -> Result:
    """Train in a folder, or go on there, and return what is recorded.

    What it prints is beside the folder, in <its name>.log. After each of `stops` updates `hopeless`
    decides whether to go on. A run that diverges is a result, as good as chance. Raises
    Interrupted where it was asked to stop.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_name(f"{folder.name}.log")
    with (
        noting_requests() as was_asked_to_stop,
        output.open("a", encoding="utf-8") as log,
        redirect_stdout(log),
    ):

        def go_on(until: int | None) -> Summary:
            options = machine.options(recipe)
            summary = run(
                recipe, out=folder, resume="auto", max_steps=until, report=False, **options
            )
            if summary.status == "interrupted" or was_asked_to_stop():
                raise Interrupted
            return summary

        try:
            reached = _in_parts(folder, go_on, stops=stops, hopeless=hopeless)
        except DivergedError as error:
            if was_asked_to_stop():
                raise Interrupted from None
            reached = {**_chance(recipe), "diverged": str(error)}
    run_read = read_run(folder)
    if "diverged" not in reached and has_diverged(run_read):
        reached = {**_chance(recipe), "diverged": "the validation loss at the end is no number"}
    record = {**_circumstances(recipe, folder), **_measured(run_read), **reached}
    plain: Result = json.loads(to_json(record, inf_nan_mode="null"))  # JSON has no NaN
    return plain


def _in_parts(
    folder: Path,
    go_on: Callable[[int | None], Summary],
    *,
    stops: Sequence[int],
    hopeless: Hopeless,
) -> Result:
    """Train from stop to stop, and to the end unless a run is hopeless; return what it reached."""
    for stop in stops:
        if stop not in _evaluations(folder):
            go_on(stop)
        found = _evaluations(folder).get(stop)
        if found is not None and hopeless(stop, found):
            return {**_end(found), "pruned_after": stop}
    return _reached(folder, go_on(None))


def _evaluations(folder: Path) -> dict[int, Evaluation]:
    """Return the evaluations of a run folder, on the way and after its stages, by updates."""
    with suppress(CheckpointError):  # nothing was logged yet
        return {each.step: each for each in read_run(folder).evaluations}
    return {}


def _circumstances(recipe: Recipe, folder: Path) -> Result:
    """Return what is known of a run however it ends."""
    return {
        "seed": recipe.seed,
        "folder": str(folder.resolve()),
        "host": platform.node(),
        "hardware": _hardware(),
        "commit": source_commit(),
        "versions": versions(),
        "updates": make_plan(recipe, workers=1).updates,
    }


def _hardware() -> str:
    """Return the GPU that trains, or the processor and how many threads use it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def _measured(run: Run) -> Result:
    """Return what was measured on the way and, by class, at the last evaluation of the model."""
    last = run.last_stage
    gaps = {found.stage: found.gap for found in run.gaps}
    return {
        "evaluations": measurements(run),
        "classes": _classes(last.mistakes) if last and last.mistakes else None,
        "loss_difference": gaps.get(last.name) if last else None,
        "workers": run.plan.workers,
    }


def _classes(found: Mistakes) -> Result:
    """Return columns by class: in databases that hold at most 64 KB, 1,000 classes fit."""
    wrong = Counter(found.labels)
    return {
        "names": found.classes,
        "samples": found.sizes,
        "correct": [size - wrong[label] for label, size in enumerate(found.sizes)],
        "average_confidence": [float(f"{one:.5g}") for one in found.confidences],
    }


def _reached(folder: Path, summary: Summary) -> Result:
    last = read_run(folder).result
    return {
        **(_end(last) if last else {}),
        "seconds": summary.seconds,
        "images_per_second": summary.images_per_second,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "weights_sha256": summary.weights_sha256,
    }


def _end(found: Evaluation) -> Result:
    """Return the metrics that a run ends with."""
    return {
        "top1": found.top1,
        "top5": found.top5,
        "loss": found.loss,
        "average_confidence": found.average_confidence,
        "confidence_deviation": found.confidence_deviation,
        "class_confidence_deviation": found.class_confidence_deviation,
        "classes_never_correct": found.classes_never_correct,
    }


def _chance(recipe: Recipe) -> Result:
    classes = recipe.data.classes
    return {"top1": 1 / classes, "top5": min(1.0, 5 / classes), "loss": None}
