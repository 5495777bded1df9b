"""The commands `train`, `evaluate` and `export`. They print."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from largebatch.cli.printing import INTERRUPTED
from largebatch.distributed.environment import own_rank
from largebatch.errors import CheckpointError, printable
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.task import Task
from largebatch.runs.interrupts import describe_saved
from largebatch.runs.options import (
    NEW_FOLDER,
    Folder,
    Given,
    Imports,
    Machine,
    Options,
    chosen_folder,
)
from largebatch.tracking.events import REPORT, Status

if TYPE_CHECKING:
    from largebatch.training.evaluation import Metrics


def train(recipe: Path, /, *, options: Annotated[Options, Given] = Options()) -> int:
    """Train, polish and evaluate a recipe.

    Args:
        recipe: A YAML file, or the name of an installed recipe.
    """
    loaded = load_recipe(recipe, options.changes)
    if options.resume and options.out == NEW_FOLDER:
        raise CheckpointError("--resume continues the run in --out DIR; pass --out")
    from largebatch.runs.run import start

    options = replace(options.without_changes(), out=chosen_folder(options.out, loaded.name))
    try:
        summary = start(loaded, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_saved(options.out)) from None
    if own_rank() == 0:
        _print_end(summary.status, options.out, max_steps=options.max_steps)
    return INTERRUPTED if summary.status == "interrupted" else 0


def _print_end(status: Status, folder: Path, *, max_steps: int | None) -> None:
    """Print how to resume a run that was stopped, and where its report is."""
    if status in {"interrupted", "paused"}:
        resume = f"to resume: the same command with --resume --out {folder}"
        if status == "paused":
            resume = f"--max-steps {max_steps} is reached; {resume} and without --max-steps"
        print(printable(resume))
    page = folder / REPORT
    report = f"report: {page}"
    if status == "interrupted" or not page.exists():  # an existing page is from an earlier part
        report = f"to draw the report: largebatch report {folder}"
    print(printable(report))


def evaluate(
    checkpoint: Path,
    /,
    *,
    training: bool = False,
    test: bool = False,
    options: Annotated[Machine, Given] = Machine(),
) -> None:
    """Measure a checkpoint, or the newest one of a run.

    Args:
        checkpoint: A .safetensors file or a run folder.
        training: Evaluate the training images too, for the loss difference.
        test: Evaluate the test part of a text too.
    """
    from largebatch.runs.checkpoints import evaluate_checkpoint

    found = evaluate_checkpoint(
        checkpoint, options.options(out=NEW_FOLDER), training=training, test=test
    )
    if own_rank() != 0:
        return
    metrics, task = found.metrics, found.task
    print(f"{_scores(task, metrics)}  {found.path}, after {found.step:,} updates")
    if metrics.classes_never_correct is not None:
        print(_confidence(metrics))
    if found.training is not None:
        print(f"training {task.data}: {_scores(task, found.training)}")
        print(f"validation loss - training loss: {metrics.loss - found.training.loss:+.4f}")
    if found.test is not None:
        print(f"test {task.data}: {_scores(task, found.test)}")


def _confidence(metrics: "Metrics") -> str:
    never = metrics.classes_never_correct
    return (
        f"confidence of the correct: average {metrics.average_confidence:.4f} (AC), deviation "
        f"{metrics.confidence_deviation:.4f} (CD), deviation of the classes' averages "
        f"{metrics.class_confidence_deviation:.4f} (CDAC)"
        + (f", without {never} classes of which none is correct" if never else "")
    )


def _scores(task: Task, metrics: "Metrics") -> str:
    scores = (f"{each.name} {each.text(metrics)}{each.unit}" for each in task.metrics)
    return f"{'  '.join(scores)}  loss {metrics.loss:.4f}  ({metrics.samples} {task.labelled})"


def export(checkpoint: Path, /, *, out: Folder, onnx: bool = False, imports: Imports = ()) -> None:
    """Write a saved model for timm, and as ONNX.

    Args:
        checkpoint: A .safetensors file or a run folder.
        out: New folder.
        onnx: Also write model.onnx.
        imports: Module to import first: it may register models with timm.
    """
    from largebatch.runs.export import export as write

    for path in write(checkpoint, out, onnx=onnx, imports=imports):
        print(printable(str(path)))
