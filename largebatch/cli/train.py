"""The commands `train`, `resume`, `evaluate`, `polish`, `predict` and `export`. They print."""

import csv
import io
import math
import shlex
import sys
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from largebatch.address import Address
from largebatch.cli.printing import INTERRUPTED, print_json
from largebatch.distributed.environment import own_rank, worker_rank
from largebatch.errors import CheckpointError, DataError, LargebatchError, printable
from largebatch.formatting import TOP5, four_decimals, plural
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
    MachineOptions,
    Options,
    RecipeFile,
    RunPlace,
    chosen_folder,
)
from largebatch.storage import write_whole, writing
from largebatch.tracking.events import RECIPE, REPORT, LayerDrift, Summary

if TYPE_CHECKING:
    from largebatch.runs.checkpoints import Evaluated
    from largebatch.training.evaluation import Metrics


def train(recipe: RecipeFile, /, *, options: Annotated[Options, Given] = Options()) -> int:
    """Train, polish and evaluate a recipe."""
    return _train(load_recipe(recipe, options.changes), options)


class GivenOptions(Options):
    """Options but `out` that know which were given, also with the value of their default."""

    out: Annotated[Path, Parameter(parse=False)]

    def __init__(self, **given: Any) -> None:  # noqa: ANN401 -- of Options
        super().__init__(**given)
        self.given = given  # not one of the fields, which are frozen


_NOTHING = GivenOptions()


def resume(
    run: RunPlace,
    /,
    *,
    options: Annotated[GivenOptions, Given, Parameter(show_default=False)] = _NOTHING,
) -> int:
    """Continue a run with its recipe, its images and, if not given, the options it had before.

    Args:
        run: The run folder, or the address of its copy, which is continued in runs/NAME.
    """
    # First, so that a folder without a run is named as such, not by the recipe that it lacks.
    from largebatch.runs.folder import check_folder, remembered

    given = options.given
    if isinstance(run, Address):
        from largebatch.runs.mirror import fetch_run

        run, above = fetch_run(run)
        given = {"mirror": above, **given}
    check_folder(run, resume=True)
    resumed = remembered(run, given)
    return _train(load_recipe(run / RECIPE, resumed.changes), resumed)


def _train(loaded: Recipe, options: Options) -> int:
    if options.resume and options.out == NEW_FOLDER:
        raise CheckpointError("--resume continues the run in --out DIR; pass --out")
    from largebatch.runs.run import start

    options = replace(options.without_changes(), out=chosen_folder(options.out, loaded.name))
    try:
        summary = start(loaded, options)
    except KeyboardInterrupt:
        # What can be resumed goes into the message.
        raise KeyboardInterrupt(describe_saved(options.out)) from None
    if own_rank() == 0:
        _print_end(summary, options.out)
    return INTERRUPTED if summary.status == "interrupted" else 0


def _print_end(summary: Summary, folder: Path) -> None:
    status = summary.status
    quoted = shlex.quote(str(folder))
    if status in {"interrupted", "paused"}:
        resume = f"to resume: largebatch resume {quoted}"
        if worker_rank() is not None:  # a launcher started this process
            resume = f"to resume: the same command with --resume --out {folder}"
        print(printable(resume))
    page = folder / REPORT
    # A report is drawn at the end of a run; one beside an interrupted run is of an earlier part.
    is_drawn = status != "interrupted" and page.exists()  # else it is of an earlier part
    command = f"to draw the report: largebatch report {quoted}"
    print(printable(f"report: {page}" if is_drawn else command))
    if status == "finished":
        print(printable(f"next: largebatch predict {quoted} IMAGES"))


def evaluate(
    checkpoint: RunPlace,
    /,
    *,
    model: str | None = None,
    training: bool = False,
    json: AsJson = False,
    options: Annotated[MachineOptions, Given] = MachineOptions(),
) -> None:
    """Measure a saved model: the newest checkpoint of a run, an export, or a file of weights.

    Args:
        checkpoint: A run folder or its address, a checkpoint, an export, or a file of weights with
            --model.
        model: Network of timm, or torchvision/NAME, of weights of another program.
        training: Evaluate the training images too, for the loss difference.
    """
    from largebatch.runs.checkpoints import evaluate_checkpoint
    from largebatch.runs.mirror import local_run

    evaluated = evaluate_checkpoint(
        local_run(checkpoint), options.options(out=NEW_FOLDER), model=model, training=training
    )
    if own_rank() == 0:
        _print_metrics(evaluated, json=json)
    # After the figures: a script gets them and the exit code.
    if not math.isfinite(evaluated.metrics.loss):
        raise CheckpointError(
            f"{evaluated.path}: gives scores that are not finite, which count as wrong; its "
            "weights or the images are out of the range of the model's precision"
        )


def _print_metrics(evaluated: "Evaluated", *, json: bool) -> None:
    metrics = evaluated.metrics
    if json:
        every = {"training": evaluated.training and asdict(evaluated.training), **asdict(metrics)}
        print_json({"checkpoint": evaluated.path, "step": evaluated.step, **every})
        return
    after = "" if evaluated.step is None else f", after {plural(evaluated.step, 'update')}"
    images = plural(metrics.samples, "image")
    if evaluated.recipe.data.held_out is not None:
        images += " held out of the training images"
    scores = _scores(metrics, evaluated.recipe)
    print(printable(f"{scores}  ({images})  {evaluated.path}{after}"))
    if evaluated.training is not None:
        scores = _scores(evaluated.training, evaluated.recipe)
        print(f"training images: {scores}  ({plural(evaluated.training.samples, 'image')})")
        gap = four_decimals(metrics.loss - evaluated.training.loss, sign=True)
        print(f"validation loss - training loss: {gap}")


def _scores(metrics: "Metrics", recipe: Recipe) -> str:
    scores = f"top-1 {metrics.top1:.2%}"
    if recipe.data.classes > TOP5:
        scores += f"  top-5 {metrics.top5:.2%}"
    if recipe.loss.class_weights is not None:
        scores += f"  mean of classes {metrics.balanced_top1:.2%}"
    return f"{scores}  loss {four_decimals(metrics.loss)}"


def polish(  # noqa: PLR0913 -- its options
    checkpoint: RunPlace | None = None,
    /,
    *,
    out: Path,
    model: str | None = None,
    weights: Path | None = None,
    ema: bool = False,
    samples: Count | None = None,
    options: Annotated[MachineOptions, Given] = MachineOptions(),
) -> None:
    """Recompute BatchNorm statistics of a run, an export, or weights of another program.

    Args:
        checkpoint: A run folder or its address, a checkpoint, an export, or a file of weights with
            --model.
        out: New run folder; a new .safetensors file for an export and for weights.
        model: Network of timm, or torchvision/NAME, of weights of another program.
        weights: A .pth or .safetensors file, in place of a checkpoint.
        ema: Use the moving average in the weights.
        samples: Number of images to measure (all).
    """
    place = weights or checkpoint
    if place is None or None not in (weights, checkpoint) or (weights and model is None):
        raise LargebatchError("polish: pass a checkpoint, or --model NAME --weights FILE")
    if ema and model is None:
        raise LargebatchError("polish: --ema is of weights of another program; pass --model")
    from largebatch.runs.checkpoints import find_export, polish_checkpoint
    from largebatch.runs.mirror import local_run

    path = local_run(place)
    run_options = options.options(out=out)
    # Of our own checkpoints the polished weights become a run folder, with a log and a page;
    # files of others become a file.
    if model is None and find_export(path) is None:
        summary = polish_checkpoint(path, run_options, samples=samples)
        if own_rank() > 0:  # has no log
            return
        from largebatch.report.run import read_run

        before, after = map(asdict, summary.stages)
        run = read_run(out)
        assert run.drift is not None
        assert run.result is not None
        layers = run.drift.layers
        measured = run.result.samples
        undone = "" if after["kept"] else " (rolled back: no better on the images held out)"
        done = f"report: {out / REPORT}{undone}"
    else:
        from largebatch.runs.pretrained import polish_weights

        *metrics, layers = polish_weights(path, run_options, model=model, ema=ema, samples=samples)
        before, after = map(asdict, metrics)
        measured = after["samples"]
        done = f"polished weights: {out}"
    if own_rank() == 0:
        top1 = f"top-1 {before['top1']:.2%} -> {after['top1']:.2%}"
        print(printable(f"{_describe_drift(layers)}; {top1} on {measured:,} validation images"))
        if before["top5"] < 1 or after["top5"] < 1:  # with few classes it is 1
            print(f"top-5: {before['top5']:.2%} -> {after['top5']:.2%}")
        print(f" loss: {four_decimals(before['loss'])} -> {four_decimals(after['loss'])}")
        print(printable(done))


def _describe_drift(layers: Sequence[LayerDrift]) -> str:
    lost = [layer for layer in layers if not math.isfinite(layer.mean_shift)]
    if lost:
        return f"statistics were not finite (layer {lost[0].name})"
    shift = max(layers, key=lambda layer: layer.mean_shift)
    ratio = max(layers, key=lambda layer: layer.log_variance_ratio)
    return (
        f"statistics were off by up to {shift.mean_shift:.2g} standard deviations "
        f"(layer {shift.name}) and a factor of {math.exp(ratio.log_variance_ratio):.2g} in "
        f"variance (layer {ratio.name})"
    )


def predict(
    run: RunPlace,
    /,
    *images: Path,
    model: str | None = None,
    out: Path | None = None,
    top: Count = 5,
    imports: Imports = (),
) -> None:
    """Print the classes of images with their probabilities, as CSV, or write them to a file.

    Images that cannot be read are named after it, and the exit code is then 2.

    Args:
        run: A run folder or its address, a checkpoint, an export, or a file of weights with
            --model.
        images: Files, or folders of them.
        model: Network of timm, or torchvision/NAME, of weights of another program.
        out: File to write the CSV to, in place of printing it.
        top: Number of classes for each image, the most probable first.
        imports: Module to import first: it may register models with timm.
    """
    if not images:
        raise DataError("predict: expected images after the run: files, or folders of them")
    from largebatch.runs.mirror import local_run
    from largebatch.runs.predict import predict as classify

    predictions = classify(local_run(run), images, model=model, imports=imports)
    # The most probable classes of each image, in falling order.
    best = predictions.probabilities.topk(min(top, len(predictions.classes)))
    columns = range(1, best.indices.shape[1] + 1)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image", *(f"{what}_{n}" for n in columns for what in ("class", "probability"))])
    for path, labels, values in zip(predictions.paths, best.indices, best.values, strict=True):
        pairs = zip(labels.tolist(), values.tolist(), strict=True)
        cells = [cell for label, p in pairs for cell in (predictions.classes[label], f"{p:.4f}")]
        rows.writerow([path, *cells])
    if out is not None:
        with writing(out, error=DataError):
            # The mark makes spreadsheets read UTF-8.
            write_whole(out, BOM_UTF8 + text.getvalue().encode(errors="surrogateescape"))
        print(printable(f"{plural(len(predictions.paths), 'image')}: {out}"), flush=True)
    else:
        print(printable(text.getvalue()), end="", flush=True)
    lines = [f"{path}: {reason}" for path, reason in predictions.unreadable.items()]
    for line in filter(None, [*lines, predictions.ignored]):
        print(printable(f"largebatch: {line}"), file=sys.stderr)
    # After the rows of the images that could be read: one damaged file must not cost the others.
    if lines:
        total = len(predictions.paths) + len(lines)
        raise DataError(f"{plural(len(lines), 'image')} of {total} cannot be read")
    lost = int((~predictions.probabilities.isfinite()).any(1).sum())
    if lost:
        raise CheckpointError(
            f"{run}: the probabilities of {plural(lost, 'image')} are not finite; its weights or "
            "the images are out of the range of the model's precision"
        )


def export(
    checkpoint: RunPlace, /, *, out: Folder, onnx: bool = False, imports: Imports = ()
) -> None:
    """Write the weights of a run, with timm's configuration.

    Args:
        checkpoint: A run folder or its address, or a checkpoint.
        out: New folder.
        onnx: Write model.onnx too, for images in batches of any size.
        imports: Module to import first: it may register models with timm.
    """
    from largebatch.runs.export import export as write
    from largebatch.runs.mirror import local_run

    for path in write(local_run(checkpoint), out, onnx=onnx, imports=imports):
        print(printable(str(path)))
