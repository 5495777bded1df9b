"""One run of a study: train it in its own run folder, and record the result.

The record holds everything that a reader of the database needs, because the run folder may be on
another machine, or deleted: `results.Result` has the fields that are read.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import TypeAdapter
from pydantic_core import to_json

from largebatch import accelerator
from largebatch.distributed.environment import TIMEOUT_SECONDS, BackendName
from largebatch.errors import CheckpointError, DivergedError, LargebatchError, WorkerFailedError
from largebatch.formatting import plural
from largebatch.lab.studies.confidence import measure_confidence
from largebatch.lab.studies.metrics import has_diverged, measurements
from largebatch.lab.studies.queue.usage import usage_of, watch_others
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import Run, read_run
from largebatch.runs.interrupts import STOPS, InterruptedStudyError, answering, noting_requests
from largebatch.runs.launch import DIVERGED, STOPPED, USER
from largebatch.runs.options import Options
from largebatch.runs.run import run
from largebatch.tracking.environment import source_commit, versions
from largebatch.tracking.events import SUMMARY, Evaluation, Summary

Result = dict[str, Any]
"""Record of a run, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Machine options for the runs of a study, as `run` takes them."""

    data: Path | None = None
    dataset: str | None = None
    imports: tuple[str, ...] = ()
    backend: BackendName = "auto"
    timeout: float = TIMEOUT_SECONDS
    workers: int = 1
    apart: bool = False
    """True if each run has its own process."""

    threads: int | None = None
    """Threads of each worker in such a run; None: those of the environment."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of such a run."""

    def options(self, recipe: Recipe) -> dict[str, Any]:
        """Return the options of a run; only recipes of image folders get a data folder."""
        reads = recipe.data.source == "folder"
        return {
            "data": self.data if reads else None,
            "dataset": self.dataset if reads else None,
            "imports": self.imports,
            "backend": self.backend,
            "timeout": self.timeout,
            "workers": self.workers,
        }


Hopeless = Callable[[int, Evaluation], bool]
"""Decides after some updates, by the evaluation there, whether to stop a run early."""


def train(
    recipe: Recipe, folder: Path, machine: Machine, *, stops: Sequence[int], hopeless: Hopeless
) -> Result:
    """Train in a folder, or resume there, and return the record.

    Output goes to <folder's name>.log beside the folder. After each of `stops` updates
    `hopeless` decides whether to stop. A run that diverges is a result with the accuracy of
    chance. Raises InterruptedStudyError if it is asked to stop.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.with_name(f"{folder.name}.log")
    with (
        noting_requests() as was_asked_to_stop,
        output.open("a", encoding="utf-8") as log,
        redirect_stdout(log),
    ):

        def go_on(until: int | None) -> Summary:
            part = Part(recipe, folder, machine, until)
            summary = _carry_out_apart(part, log) if machine.apart else carry_out(part)
            if summary.status == "interrupted" or was_asked_to_stop():
                raise InterruptedStudyError
            return summary

        begun, others = time.time(), watch_others() if machine.apart else None
        try:
            reached = _in_parts(folder, go_on, stops=stops, hopeless=hopeless)
        except (DivergedError, WorkerFailedError) as error:
            if was_asked_to_stop():  # a process that is about to begin ends by the signal itself
                raise InterruptedStudyError from None
            if isinstance(error, WorkerFailedError):
                raise
            reached = {**_chance(recipe), "diverged": str(error)}
        times = {"begun": begun, "ended": time.time(), "other_cores": others() if others else None}
    run_read = read_run(folder)
    if "diverged" not in reached and has_diverged(run_read):
        reached = {**_chance(recipe), "diverged": "the validation loss at the end is no number"}
    if not reached and run_read.result:
        reached = {**_end(run_read.result), **_confidence(recipe, folder, machine)}
    record = {**_circumstances(recipe, folder), **times, **_measured(run_read), **reached}
    plain: Result = json.loads(to_json(record, inf_nan_mode="null"))  # JSON has no NaN
    return plain


@dataclass(frozen=True, slots=True)
class Part:
    """A run up to `until` updates; None: to its end."""

    recipe: Recipe
    folder: Path
    machine: Machine
    until: int | None


PART = TypeAdapter(Part)
"""Argument of the process of a run, as JSON."""


def carry_out(part: Part) -> Summary:
    """Start or resume a run, in this process or in its workers."""
    return run(
        part.recipe, out=part.folder, resume="auto", max_steps=part.until, report=False,
        **part.machine.options(part.recipe),
    )  # fmt: skip


def _carry_out_apart(part: Part, log: IO[str]) -> Summary:
    """Run `carry_out` in a process that ends with this one; raise its errors here."""
    machine = part.machine
    threads = {} if machine.threads is None else {"OMP_NUM_THREADS": str(machine.threads)}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"}
    words = [
        "largebatch.lab.studies.queue.one_run",
        PART.dump_json(part).decode(),
        str(os.getpid()),
    ]
    process = subprocess.Popen(  # noqa: S603 -- the words are ours
        [sys.executable, "-m", *words],
        env={**os.environ, **paths, **machine.environment, **threads},
        stdout=log, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process, answering(lambda number, _: process.send_signal(number), *STOPS):
        _, errors = process.communicate()
    log.write(errors)
    code = process.returncode
    if code == 0:
        return TypeAdapter(Summary).validate_json((part.folder / SUMMARY).read_bytes())
    if code == STOPPED:
        raise KeyboardInterrupt
    if code in {DIVERGED, USER}:
        raise (DivergedError if code == DIVERGED else LargebatchError)(errors.strip())
    raise WorkerFailedError(f"{part.folder}: its process ended with exit code {code}:\n{errors}")


def _in_parts(
    folder: Path,
    go_on: Callable[[int | None], Summary],
    *,
    stops: Sequence[int],
    hopeless: Hopeless,
) -> Result:
    """Train from stop to stop, and to the end unless the run is hopeless.

    Returns the record of a run that is stopped early; a complete run is recorded from its log.
    """
    for stop in stops:
        if stop not in _evaluations(folder):
            go_on(stop)
        evaluation = _evaluations(folder).get(stop)
        if evaluation is not None and hopeless(stop, evaluation):
            return {**_end(evaluation), "pruned_after": stop}
    go_on(None)
    return {}


def _evaluations(folder: Path) -> dict[int, Evaluation]:
    """Return the evaluations of a run folder by updates, in training and after its stages."""
    with suppress(CheckpointError):  # nothing was logged yet
        return {evaluation.step: evaluation for evaluation in read_run(folder).evaluations}
    return {}


def _circumstances(recipe: Recipe, folder: Path) -> Result:
    """Return the part of the record that every run has."""
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
    """Return the GPU of the run, or the processor and its threads."""
    if gpus := accelerator.names():
        return gpus[0]
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {plural(threads, 'thread')}"


def _measured(run: Run) -> Result:
    """Return the evaluations in training."""
    gap = run.last_gap
    return {
        "evaluations": measurements(run),
        "loss_difference": gap and gap.gap,
        "workers": run.plan.workers,
        "usage": asdict(usage_of(run)),
        **_summed_up(run.summary),
    }


def _confidence(recipe: Recipe, folder: Path, machine: Machine) -> Result:
    """Return LRBench's metrics of confidence; a record of at most 64 KB holds 1,000 classes."""
    options = machine.options(recipe)
    del options["workers"]
    found = asdict(measure_confidence(folder, Options(out=folder, **options)))
    mistakes = read_run(folder).final_mistakes
    columns = {name: found.pop(name) for name in ("samples", "correct", "averages")}
    names = mistakes.classes if mistakes else tuple(map(str, range(recipe.data.classes)))
    average = [float(f"{value:.5g}") for value in columns["averages"][: len(names)]]
    counts = {name: columns[name][: len(names)] for name in ("samples", "correct")}
    return {**found, "classes": {"names": names, **counts, "average_confidence": average}}


def _summed_up(summary: Summary | None) -> Result:
    """Return the part of the record from the summary of a complete run."""
    if summary is None or summary.status != "finished":
        return {}
    names = ("seconds", "images_per_second", "peak_memory_bytes", "weights_sha256")
    return {name: getattr(summary, name) for name in names}


def _end(evaluation: Evaluation) -> Result:
    """Return the final metrics of a run."""
    return {name: getattr(evaluation, name) for name in ("top1", "top5", "loss")}


def _chance(recipe: Recipe) -> Result:
    classes = recipe.data.classes
    return {"top1": 1 / classes, "top5": min(1.0, 5 / classes), "loss": None}
