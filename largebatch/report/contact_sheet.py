"""A contact sheet: what the model sees in training, clean and in evaluation, side by side.

The requests, the order and the decoder are the run's own, so what is wrong with the images there (a
wrong mean, a crop that cuts off what matters, a flip that changes the meaning) is wrong here. No
smoothing hides what resizing did to them. Below an image is what cannot be seen in it: the shares
of its label, and the operations on its pixels.
"""

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from largebatch.address import Place
from largebatch.data.erasing import boxes_in_pixels
from largebatch.data.mixing import shares_of
from largebatch.data.operations.draws import Operation
from largebatch.data.order import samples_at
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import Batches, Erasures, IntArray, Operations, Request
from largebatch.distributed.serial import Serial
from largebatch.errors import clip, printable
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Data
from largebatch.recipe.recipe import Recipe
from largebatch.report.style import INK, MUTED, require_png, write_chart
from largebatch.storage import ReadProgress, silent

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

CLASSES = 10  # shown, if there are as many
OCCURRENCES = 6  # of an image in training, if the run has as many
CHECKS = 2  # validation images of each class

_TILE, _LABEL, _LINE = 112, 150, 22  # points
_SMALL = 7.5  # points, size of the captions
_CAPTION = 0.085  # height of a line of a caption, in tiles
_LETTERS = 30  # in a line of a caption

WITHOUT_STRENGTH = (Operation.AUTO_CONTRAST, Operation.EQUALIZE, Operation.INVERT)

Rows = tuple[tuple[Tensor, ...], ...]
"""By class: images as the model gets them, each 3 x H x W."""


class Caption(NamedTuple):
    """The lines below a training image."""

    label: tuple[str, ...]  # the classes of a mixed image and their shares; empty if not mixed
    changes: tuple[str, ...]  # the operations on its pixels, and the part that is erased


class Shown(NamedTuple):
    """One training image of each class, as the run shows it at first, and clean.

    Beside it, as many as CHECKS validation images.
    """

    classes: tuple[str, ...]
    training: Rows
    captions: tuple[tuple[Caption, ...], ...]  # of the training images
    clean: Rows
    evaluation: Rows


def show(pipeline: Pipeline) -> Shown:
    """Decode one image of each of the classes that the run comes to first."""
    index = pipeline.train_index
    samples, positions = _first_positions(pipeline)
    in_order = np.sort(positions, axis=None).tolist()
    training = dict(zip(in_order, _training_images(pipeline, in_order), strict=True))
    rows = positions.tolist()
    clean = (pipeline.clean_request(index, sample[None]) for sample in samples)
    evaluated = pipeline.evaluated_samples
    validation = pipeline.val_index
    labels = index.labels[samples]
    checks = [evaluated[validation.labels[evaluated] == label][:CHECKS] for label in labels]
    of_checks = (
        pipeline.clean_request(validation, sample[None]) for row in checks for sample in row
    )
    evaluation = iter([*_images(pipeline.decode(validation, of_checks))])
    return Shown(
        classes=tuple(printable(index.classes[label]) for label in labels),
        training=tuple(tuple(training[position].image for position in row) for row in rows),
        captions=tuple(tuple(training[position].caption for position in row) for row in rows),
        clean=tuple((image,) for image in _images(pipeline.decode(index, clean))),
        evaluation=tuple(tuple(islice(evaluation, len(row))) for row in checks),
    )


def _first_positions(pipeline: Pipeline) -> tuple[IntArray, IntArray]:
    """Return a sample of each of the first classes, and its first positions in the run, in rows."""
    plan = pipeline.plan
    index = pipeline.train_index
    epoch = plan.train_samples
    # One epoch at least, even if the run is shorter.
    length = max(epoch, min(OCCURRENCES * epoch, plan.position(plan.train_steps)))
    order = samples_at(
        range(length),
        seed=pipeline.seed,
        num_samples=len(index),
        trained=index.trained,
        repeats=pipeline.data.repeats,
        order=pipeline.data.order,
    )
    _, first = np.unique(index.labels[order[:epoch]], return_index=True)
    chosen = np.sort(np.argsort(first)[:CLASSES])
    samples = order[first[chosen]]
    rows = [np.flatnonzero(order == sample)[:OCCURRENCES] for sample in samples]
    columns = min(map(len, rows))
    return samples, np.stack([row[:columns] for row in rows])


class _TrainingImage(NamedTuple):
    image: Tensor
    caption: Caption


def _training_images(pipeline: Pipeline, positions: list[int]) -> Iterator[_TrainingImage]:
    """Yield the augmented images at these rising positions of the run."""
    plan = pipeline.plan
    index = pipeline.train_index
    size_of = partial(plan.image_size, otherwise=pipeline.data.image_size)
    # Partners are mixed with each other, so both are decoded.
    pair = min(2, plan.device_batch)
    # Each part of a run with growing images has its own size, and a batch has one size.
    for size, of_one_size in groupby(positions, key=size_of):
        places = list(of_one_size)
        requests = []
        for place in places:
            first = place - place % pair
            requests.append(pipeline.training_request(range(first, first + pair), clean=False))
        decoded = pipeline.decode(index, requests, image_size=size, clean=False)
        with closing(decoded) as batches:
            for place, request, batch in zip(places, requests, batches, strict=True):
                row = place % pair
                # sync: drawn by the processor; the copy is ours when the decoder ends
                image = batch.images[row].to("cpu", copy=True)
                labels = index.labels[request.samples]
                lines = caption(request, row, labels=labels, classes=index.classes, side=size)
                yield _TrainingImage(image, lines)


def caption(
    request: Request, row: int, *, labels: IntArray, classes: Sequence[str], side: int
) -> Caption:
    """Return the caption of an image of a request; `labels` are those of the request's images.

    The classes and changes of a mixed image are its own, then its partner's.
    """
    own = _changes(request, row, side=side)
    share = 1.0
    if request.mix is not None:
        share = float(shares_of(request.mix, height=side, width=side)[row // 2])
    if share == 1:
        return Caption(label=(), changes=_lines(own, ", "))
    partner = row + 1 if row % 2 == 0 else row - 1
    named = [printable(clip(classes[labels[image]], 20)) for image in (row, partner)]
    label = [f"{named[0]} {share:.2f}", f"+ {named[1]} {1 - share:.2f}"]
    changes = _lines(own, ", ")
    of_partner = _changes(request, partner, side=side)
    if of_partner:
        changes += _lines([f"+ {of_partner[0]}", *of_partner[1:]], ", ")
    return Caption(_lines(label, " "), changes)


def _changes(request: Request, row: int, *, side: int) -> list[str]:
    """Return the operations on the pixels of an image, and the part of it that is erased."""
    changes = [] if request.operations is None else operations_in_words(request.operations, row)
    if request.erasures is not None:
        erased = erased_part(request.erasures, row, side=side)
        changes += [f"erased {100 * erased:.0f} %"] if erased else []
    return changes


def _lines(items: Sequence[str], between: str) -> tuple[str, ...]:
    """Return the lines of a caption with these items, none of which is divided."""
    unbroken = [item.replace(" ", "\u00a0") for item in items]
    return tuple(textwrap.wrap(between.join(unbroken), _LETTERS))


def operations_in_words(operations: Operations, row: int) -> list[str]:
    """Return the names and strengths of the operations on an image, such as "rotate -12"."""
    words = []
    for kind, strength in zip(operations.kinds[row], operations.strengths[row], strict=True):
        name = Operation(kind).name.lower().replace("_", " ")
        if kind in WITHOUT_STRENGTH:
            words.append(name)
        elif kind != Operation.IDENTITY:
            words.append(f"{name} {strength:.3g}")
    return words


def erased_part(erasures: Erasures, row: int, *, side: int) -> float:
    """Return the part of an image's pixels that is erased, by one box or several."""
    erased = np.zeros((side, side), dtype=np.bool_)
    boxes = boxes_in_pixels(erasures.boxes[erasures.rows == row], side=side)
    for top, left, height, width in boxes.tolist():
        erased[top : top + height, left : left + width] = True
    return float(erased.mean())


def _images(batches: Batches) -> Iterator[Tensor]:
    """Yield the images of batches of one on the host; close the batches."""
    with closing(batches):
        for batch in batches:
            # sync: they are drawn by the processor; the copy is ours when the decoder ends
            yield batch.images[0].to("cpu", copy=True)


def denormalized(image: Tensor, data: Data) -> npt.NDArray[np.uint8]:
    """Return an image the model gets, 3 x H x W, as H x W x 3 bytes; what is no colour is cut."""
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (data.mean, data.std))
    values = image.mul(std).add(mean).mul(255).round().clamp(0, 255)
    return values.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def write_sheet(
    path: Path, recipe: Recipe, *, folder: Place | None, progress: ReadProgress = silent
) -> None:
    """Write the contact sheet of a recipe, whose images may be in `folder`, as a PNG file.

    Raises LargebatchError if the images cannot be read or the file cannot be written.
    """
    require_png(path)
    pipeline = open_images(
        recipe, make_plan(recipe.mathematics), Serial(), folder=folder, progress=progress
    )
    shown = show(pipeline)
    columns = len(shown.training[0]) + 1 + CHECKS
    size = _LABEL + _TILE * columns, _TILE * _tops(shown)[-1] + 6 * _LINE
    write_chart(path, lambda figure: draw_sheet(figure, shown, recipe.data), size=size)


def draw_sheet(figure: "Figure", shown: Shown, data: Data) -> None:
    """Draw classes below each other, stages side by side, and below them how they were made."""
    number = len(shown.training[0])
    training = f"training, passes 1 to {number}"
    if data.repeats > 1:
        training = f"training, the first {number} times, {data.repeats} in each pass"
    groups = {training: shown.training, "clean": shown.clean, "evaluation": shown.evaluation}
    widths = [max(map(len, rows)) for rows in groups.values()]
    panels = figure.subplots(1, len(groups), width_ratios=widths)
    *tops, bottom = _tops(shown)
    for axes, width, (title, rows) in zip(panels, widths, groups.items(), strict=True):
        for top, images in zip(tops, rows, strict=True):
            for column, image in enumerate(images):
                extent = column, column + 0.95, top + 0.95, top
                axes.imshow(denormalized(image, data), extent=extent, interpolation="nearest")
        limits = {"xlim": (0, width), "ylim": (bottom, 0)}
        axes.set(xticks=[], yticks=[], title=title, **limits)
        axes.spines["bottom"].set_visible(False)
    for top, captions in zip(tops, shown.captions, strict=True):
        for column, lines in enumerate(captions):
            _write_caption(panels[0], lines, column=column, top=top + 0.97)
    names = [clip(name, 20) for name in shown.classes]
    panels[0].set_yticks(np.array(tops) + 0.475, names)
    panels[0].grid(visible=False)
    values = []
    for name, rows in groups.items():
        pixels = torch.cat([image.flatten() for row in rows for image in row])
        values.append(f"{name.split(',')[0]} {pixels.mean():z.2f} ± {pixels.std():.2f}")
    figure.supxlabel(
        f"values after normalisation, mean ± std of these images: {', '.join(values)}",
        color=MUTED, size=11,
    )  # fmt: skip


def _tops(shown: Shown) -> list[float]:
    """Return the upper edge of each row, and the lower one of the last, in tiles from the top."""
    tops = [0.0]
    for captions in shown.captions:
        lines = max(len(label) + len(changes) for label, changes in captions)
        tops.append(tops[-1] + 1 + lines * _CAPTION)
    return tops


def _write_caption(axes: "Axes", caption: Caption, *, column: int, top: float) -> None:
    lines = [(line, INK) for line in caption.label] + [(line, MUTED) for line in caption.changes]
    for number, (line, colour) in enumerate(lines):
        axes.text(column, top + number * _CAPTION, line, color=colour, size=_SMALL, va="top")
