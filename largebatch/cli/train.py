"""The commands `train`, `resume`, `evaluate`, `predict` and `export`. They print."""

import csv
import io
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from largebatch.cli.printing import INTERRUPTED, print_json
from largebatch.distributed.environment import COMMAND, own_rank, worker_rank
from largebatch.errors import CheckpointError, DataError, printable
from largebatch.formatting import plural
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.interrupts import describe_saved
from largebatch.runs.options import (
    NEW_FOLDER,
    AsJson,
    Count,
    Folder,
    Given,
    Imports,
    Machine,
    Options,
    RecipeFile,
    chosen_folder,
)
from largebatch.storage import write_whole
from largebatch.tracking.events import RECIPE, REPORT, Summary

if TYPE_CHECKING:
    from largebatch.training.evaluation import Metrics


def train(recipe: RecipeFile, /, *, options: Annotated[Options, Given] = Options()) -> int:
    """Train, polish and evaluate a recipe."""
    return _train(load_recipe(recipe, options.changes), options)


class Asked(Options):
    """Options but `out` that know which were given, also with the value of their default."""

    out: Annotated[Path, Parameter(parse=False)]

    def __init__(self, **given: Any) -> None:  # noqa: ANN401 -- of Options
        super().__init__(**given)
        object.__setattr__(self, "given", given)


_NOTHING = Asked()


def resume(
    run: Path, /, *, options: Annotated[Asked, Given, Parameter(show_default=False)] = _NOTHING
) -> int:
    """Continue a run with its recipe, its images and, if not given, the options it had before.

    Args:
        run: The run folder.
    """
    from largebatch.runs.folder import check_folder, remembered

    check_folder(run, resume=True)
    resumed = remembered(run, vars(options)["given"])
    return _train(load_recipe(run / RECIPE, resumed.changes), resumed)


def _train(loaded: Recipe, options: Options) -> int:
    if options.resume and options.out == NEW_FOLDER:
        raise CheckpointError("--resume continues the run in --out DIR; pass --out")
    from largebatch.runs.run import start

    options = replace(options.without_changes(), out=chosen_folder(options.out, loaded.name))
    try:
        forks = os.environ.get(COMMAND) == str(os.getpid())
        summary = start(loaded, options, forks=forks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(describe_saved(options.out)) from None
    if own_rank() == 0:
        _print_end(summary, options.out, max_steps=options.max_steps)
    return INTERRUPTED if summary.status == "interrupted" else 0


def _print_end(summary: Summary, folder: Path, *, max_steps: int | None) -> None:
    """Print how to resume a run that was stopped, and where its report is."""
    status = summary.status
    if status in {"interrupted", "paused"}:
        resume = f"to resume: largebatch resume {shlex.quote(str(folder))}"
        if worker_rank() is not None:  # a launcher started this process
            resume = f"to resume: the same command with --resume --out {folder}"
        if status == "paused":
            resume = f"at or beyond --max-steps {max_steps}; {resume}"
        print(printable(resume))
    page = folder / REPORT
    is_drawn = status != "interrupted" and page.exists()  # else it is of an earlier part
    command = f"to draw the report: largebatch report {folder}"
    print(printable(f"report: {page}" if is_drawn else command))


def evaluate(
    checkpoint: Path,
    /,
    *,
    training: bool = False,
    json: AsJson = False,
    options: Annotated[Machine, Given] = Machine(),
) -> None:
    """Measure a checkpoint, or the newest one of a run.

    Args:
        checkpoint: A .safetensors file or a run folder.
        training: Evaluate the training images too, for the loss difference.
    """
    from largebatch.runs.checkpoints import evaluate_checkpoint

    found = evaluate_checkpoint(checkpoint, options.options(out=NEW_FOLDER), training=training)
    if own_rank() != 0:
        return
    metrics = found.metrics
    if json:
        every = {"training": found.training and asdict(found.training), **asdict(metrics)}
        print_json({"checkpoint": found.path, "step": found.step, **every})
        return
    print(f"{_scores(metrics)}  {found.path}, after {found.step:,} updates")
    if found.training is not None:
        print(f"training images: {_scores(found.training)}")
        print(f"validation loss - training loss: {metrics.loss - found.training.loss:+.4f}")


def _scores(metrics: "Metrics") -> str:
    scores = f"top-1 {100 * metrics.top1:.2f}%  top-5 {100 * metrics.top5:.2f}%"
    return f"{scores}  loss {metrics.loss:.4f}  ({metrics.samples} images)"


def predict(
    run: Path,
    /,
    *images: Path,
    out: Path | None = None,
    top: Count = 5,
    imports: Imports = (),
) -> None:
    """Print the classes of images with their probabilities, as CSV.

    Images that cannot be read are named after it, and the exit code is then 2.

    Args:
        run: A run folder or a .safetensors file.
        images: Files, or folders of them.
        out: File to write the CSV to as well.
        top: Number of classes for each image, the most probable first.
        imports: Module to import first: it may register models with timm.
    """
    if not images:
        raise DataError("predict: expected images after the run: files, or folders of them")
    from largebatch.runs.predict import predict as classify

    found = classify(run, images, imports=imports)
    best = found.probabilities.topk(min(top, len(found.classes)))
    columns = range(1, best.indices.shape[1] + 1)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image", *(f"{what}_{n}" for n in columns for what in ("class", "probability"))])
    for path, labels, values in zip(found.paths, best.indices, best.values, strict=True):
        pairs = zip(labels.tolist(), values.tolist(), strict=True)
        cells = [cell for label, p in pairs for cell in (found.classes[label], f"{p:.4f}")]
        rows.writerow([path, *cells])
    if out is not None:
        try:
            write_whole(out, text.getvalue().encode(errors="surrogateescape"))
        except OSError as error:
            raise DataError(f"{out}: cannot be written: {error.strerror}") from None
    print(printable(text.getvalue()), end="", flush=True)
    lines = [f"{path}: {reason}" for path, reason in found.unreadable.items()]
    for line in filter(None, [*lines, found.ignored]):
        print(printable(f"largebatch: {line}"), file=sys.stderr)
    if lines:
        total = len(found.paths) + len(lines)
        raise DataError(f"{plural(len(lines), 'image')} of {total} cannot be read")


def export(checkpoint: Path, /, *, out: Folder, imports: Imports = ()) -> None:
    """Write the weights of a saved model, with timm's configuration.

    Args:
        checkpoint: A .safetensors file or a run folder.
        out: New folder.
        imports: Module to import first: it may register models with timm.
    """
    from largebatch.runs.export import export as write

    for path in write(checkpoint, out, imports=imports):
        print(printable(str(path)))
