"""A contact sheet: what the model sees in training, clean and in evaluation, side by side.

The requests, the order and the decoder are the run's own, so what is wrong with the images there (a
wrong mean, a crop that cuts off what matters, a flip that changes the meaning) is wrong here. No
smoothing hides what resizing did to them.
"""

import math
from collections.abc import Iterable, Iterator
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
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import Batches, Request
from largebatch.distributed.serial import Serial
from largebatch.errors import clip, printable
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Data
from largebatch.recipe.recipe import Recipe
from largebatch.report.style import MUTED, require_png, write_chart
from largebatch.storage import ReadProgress, silent

if TYPE_CHECKING:
    from largebatch.report.style import Figure

CLASSES = 10  # shown, if there are as many
PASSES = 6  # over the training data, in which an image is shown, if there are as many
CHECKS = 2  # validation images of each class

_TILE, _LABEL, _LINE = 112, 150, 22  # points

Rows = tuple[tuple[Tensor, ...], ...]
"""By class: images as the model gets them, each 3 x H x W."""


class Shown(NamedTuple):
    """One training image of each class in the first passes of the run and in the clean stage.

    Beside it, as many as CHECKS validation images.
    """

    classes: tuple[str, ...]
    training: Rows
    clean: Rows
    evaluation: Rows


def show(pipeline: Pipeline) -> Shown:
    """Decode one image of each of the classes that the run comes to first."""
    plan = pipeline.plan
    index = pipeline.train_index
    number = pipeline.plan.train_samples
    passes = max(1, min(PASSES, math.floor(plan.epoch(plan.train_steps))))
    orders = [pipeline.training_samples(range(p * number, (p + 1) * number)) for p in range(passes)]
    labels, first = np.unique(index.labels[orders[0]], return_index=True)
    chosen = np.sort(np.argsort(first)[:CLASSES])
    samples = orders[0][first[chosen]]
    labels = labels[chosen]
    rows_of_positions = [
        [p * number + int(np.flatnonzero(order == sample)[0]) for sample in samples]
        for p, order in enumerate(orders)
    ]

    def requests(positions: Iterable[int], *, clean: bool) -> Iterator[Request]:
        return (pipeline.training_request(range(p, p + 1), clean=clean) for p in positions)

    training: list[Tensor] = []
    size_of = partial(plan.image_size, otherwise=pipeline.data.image_size)
    every_position = [position for row in rows_of_positions for position in row]
    # Each part of a run with growing images has its own size, and a batch has one size.
    for size, positions in groupby(every_position, key=size_of):
        wanted = requests(positions, clean=False)
        training += _images(pipeline.decode(index, wanted, image_size=size))
    clean = _images(pipeline.decode(index, requests(rows_of_positions[0], clean=True)))
    evaluated = pipeline.evaluated_samples
    validation = pipeline.val_index
    checks = [evaluated[validation.labels[evaluated] == label][:CHECKS] for label in labels]
    of_checks = (
        pipeline.clean_request(validation, sample[None]) for row in checks for sample in row
    )
    evaluation = iter([*_images(pipeline.decode(validation, of_checks))])
    return Shown(
        classes=tuple(printable(index.classes[label]) for label in labels),
        training=tuple(tuple(training[row :: len(samples)]) for row in range(len(samples))),
        clean=tuple((image,) for image in clean),
        evaluation=tuple(tuple(islice(evaluation, len(row))) for row in checks),
    )


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
    size = _LABEL + _TILE * columns, _TILE * len(shown.classes) + 6 * _LINE
    write_chart(path, lambda figure: draw_sheet(figure, shown, recipe.data), size=size)


def draw_sheet(figure: "Figure", shown: Shown, data: Data) -> None:
    """Draw classes below each other, stages side by side, and below them how they were made."""
    groups = {
        f"training, passes 1 to {len(shown.training[0])}": shown.training,
        "clean": shown.clean,
        "evaluation": shown.evaluation,
    }
    widths = [max(map(len, rows)) for rows in groups.values()]
    panels = figure.subplots(1, len(groups), width_ratios=widths)
    for axes, width, (title, rows) in zip(panels, widths, groups.items(), strict=True):
        for row, images in enumerate(rows):
            for column, image in enumerate(images):
                extent = column, column + 0.95, row + 0.95, row
                axes.imshow(denormalized(image, data), extent=extent, interpolation="nearest")
        axes.set(xlim=(0, width), ylim=(len(rows), 0), xticks=[], yticks=[], title=title)
        axes.spines["bottom"].set_visible(False)
    names = [clip(name, 20) for name in shown.classes]
    panels[0].set_yticks(np.arange(len(names)) + 0.475, names)
    panels[0].grid(visible=False)
    values = []
    for name, rows in groups.items():
        pixels = torch.cat([image.flatten() for row in rows for image in row])
        values.append(f"{name.split(',')[0]} {pixels.mean():z.2f} ± {pixels.std():.2f}")
    figure.supxlabel(
        f"values after normalisation, mean ± std of these images: {', '.join(values)}",
        color=MUTED, size=11,
    )  # fmt: skip
