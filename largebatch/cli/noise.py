"""The command `noise`: measure the gradient noise scale, or the critical batch. It prints."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from largebatch.cli.arguments import (
    Command,
    add_execution,
    add_machine,
    add_set,
    add_workers,
    count,
    machine_of,
    options_of,
    out_folder,
)
from largebatch.cli.printing import interrupted
from largebatch.distributed.environment import own_rank
from largebatch.errors import CheckpointError, LargebatchError, printable
from largebatch.formatting import aligned
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.interrupts import InterruptedStudyError
from largebatch.tracking.events import LOG, REPORT, Status

if TYPE_CHECKING:
    from largebatch.lab.measure.critical_batch import Critical

_MONITOR = "monitor=noise_scale"


def add_commands(command: Command) -> None:
    """Add the command `noise`."""
    text = "train a recipe and measure its gradient noise scale, or read it from a run folder"
    noise = command("noise", _noise, text)
    noise.add_argument(
        "recipe", type=Path, help="a recipe, or the folder of a run that measured it"
    )
    add_set(noise)
    add_execution(noise)
    add_workers(noise, dest="workers")
    add_machine(noise)
    noise.add_argument("--out", type=out_folder, metavar="DIR", help="folder (runs/<name>-<time>)")
    noise.add_argument("--max-steps", type=count, metavar="N", help="stop after N updates")
    noise.add_argument(
        "--measure",
        type=_sizes,
        metavar="B,B,...",
        help="the critical batch from runs at these batches, four or more",
    )
    noise.add_argument(
        "--epochs",
        type=float,
        default=2.0,
        metavar="E",
        help="epochs of the smallest batch of --measure; the others train to its loss (2)",
    )


def _sizes(text: str) -> list[int]:
    """Parse batch sizes separated by commas."""
    return [count(part) for part in text.split(",")]


def _noise(args: argparse.Namespace) -> int:
    folder = args.recipe
    if folder.is_dir() and (args.measure is not None or not (folder / LOG).exists()):
        expected = "--measure takes a recipe" if args.measure else f"it holds no run: no {LOG}"
        raise LargebatchError(f"{folder}: this is a folder; {expected}")
    if args.measure is not None:
        return _measure(args)
    if not folder.is_dir():
        folder, status = _train(args)
        if status == "interrupted":
            return interrupted(folder)
    if own_rank() == 0:
        _show(folder)
    return 0


def _train(args: argparse.Namespace) -> tuple[Path, Status]:
    """Train with the monitor; return the run folder and the run's status."""
    recipe = load_recipe(args.recipe, [*args.set, _MONITOR])
    _require_updates(recipe, args)
    from largebatch.runs.folder import default_folder
    from largebatch.runs.run import run

    folder: Path = args.out or default_folder(recipe)
    summary = run(
        recipe,
        workers=args.workers,
        out=folder,
        **machine_of(args),
        resume="auto",
        max_steps=args.max_steps,
    )
    return folder, summary.status


def _require_updates(recipe: Recipe, args: argparse.Namespace) -> None:
    """Raise LargebatchError if a run has fewer updates than a noise scale needs."""
    from largebatch.report.noise import BOUNDED, LEAST

    planned = make_plan(recipe, workers=args.workers).steps
    found, remedy = f"duration has {planned:,} updates", f"train for {BOUNDED} or more"
    if args.max_steps is not None and args.max_steps < planned:
        planned = args.max_steps
        found, remedy = f"--max-steps {planned}", f"give --max-steps {BOUNDED} or more"
    if planned < LEAST:
        raise LargebatchError(
            f"{found}: the noise scale needs at least {LEAST} updates, and so few often leave it "
            f"without an upper bound; {remedy}"
        )


def _show(folder: Path) -> None:
    """Print the noise scale of each part of a run, and what it means."""
    from largebatch.report.noise import LEAST, course, describe_noise, measured, samples
    from largebatch.report.run import read_run

    record = read_run(folder)
    parts = course(record)
    number = len(measured(record))
    if not number:
        raise CheckpointError(f"{folder}: holds no noise scale; train with --set {_MONITOR}")
    if not parts:
        raise CheckpointError(
            f"{folder}: holds the noise scale of {number} updates, expected {LEAST} or more; "
            "train longer"
        )
    rows = [("steps", "noise scale", "95 %")]
    for part in parts:
        found = part.found
        value = "unknown" if math.isnan(found.value) else samples(found.value)
        interval = f"{samples(found.low)} to {samples(found.high)}"
        rows.append((f"{part.first:,}-{part.last:,}", value, interval))
    print(aligned(rows, right=(0, 1)))
    print(describe_noise(record))
    if (folder / REPORT).exists():
        print(printable(f"report: {folder / REPORT}"))


def _measure(args: argparse.Namespace) -> int:
    if not 0 < args.epochs < math.inf:
        raise LargebatchError(f"--epochs must be above 0, got {args.epochs:g}")
    if args.max_steps is not None:
        raise LargebatchError("--max-steps is for one run; --measure stops its runs by --epochs")
    recipe = load_recipe(args.recipe, args.set)
    from largebatch.lab.measure.critical_batch import Critical, measure_critical
    from largebatch.runs.folder import default_folder

    options = options_of(args, out=args.out or default_folder(recipe))
    results = measure_critical(
        recipe, options, args.measure, epochs=args.epochs, workers=args.workers
    )
    try:
        for result in results:
            if isinstance(result, Critical):
                _show_critical(result)
                print(printable(f"runs: {options.out}"))
            else:
                steps = "not reached" if result.steps is None else f"{result.steps:,.1f} steps"
                print(f"batch {result.batch:,}, rate {result.rate:g}: {steps}", flush=True)
    except InterruptedStudyError:
        return interrupted(options.out)
    return 0


def _show_critical(found: "Critical") -> None:
    from largebatch.report.noise import MORE_STEPS, samples

    print(f"\nto a training loss of {found.target:.4f}:")
    rows = [("batch", "rate", "steps", "samples", "above linear scaling (fit)")]
    for trial in found.best:
        size, steps = trial.batch, trial.steps or 0
        numbers = (f"{size:,}", f"{trial.rate:g}", f"{steps:,.1f}", f"{steps * size:,.0f}")
        rows.append((*numbers, f"{found.more(size):.0%}"))
    print(aligned(rows, right=range(5)))
    noise = found.noise
    low, high = samples(MORE_STEPS * noise.low), samples(MORE_STEPS * noise.high)
    print(
        f"critical batch ({MORE_STEPS:.0%} more steps than linear scaling), in samples\n"
        f"   measured: {samples(found.measured)} (95 %: {samples(found.low)} to "
        f"{samples(found.high)})\n"
        f"  predicted: {samples(found.predicted)} (95 %: {low} to {high}), "
        f"a fifth of the noise scale of batch {found.best[0].batch:,}"
    )
