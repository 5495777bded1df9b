"""A contact sheet: what the model sees in training, clean and in evaluation, side by side.

Pixels stay pixels: an image of 28 x 28 is enlarged by a whole factor, and no smoothing hides what
resizing did to it. The requests, the order and the decoder are
the run's own, so what is wrong with the images there (a wrong mean, a crop that cuts off what
matters, a flip that changes the meaning) is wrong here.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import Batches, IntArray, Request
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError, clip
from largebatch.recipe.arithmetic.describe import describe_decoding
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.data import Data
from largebatch.recipe.recipe import Recipe
from largebatch.report.mistakes import WORST, drawn_side, write_worst
from largebatch.report.run import read_run
from largebatch.report.style import COLOURS, INK, MUTED, draw_pixels, require_png
from largebatch.storage import Progress, silent, whole_file

if TYPE_CHECKING:
    from largebatch.report.style import Figure

SMALLEST = 112  # pixels; images with shorter sides are enlarged to at least this

CLASSES = 10  # shown, if there are as many

PASSES = 6  # over the training data, in which an image is shown, if there are as many

CHECKS = 2  # validation images of each class

Rows = tuple[tuple[Tensor, ...], ...]
"""By class: images as the model gets them, each 3 x H x W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One training image of each class and what becomes of it; beside it, validation."""

    classes: tuple[str, ...]
    training: Rows
    """The image in the first passes of the run."""

    clean: Rows
    """The same image in the clean stage, or where BatchNorm statistics are measured."""

    evaluation: Rows
    """CHECKS validation images, or as many as there are."""


def show(pipeline: Pipeline) -> Shown:
    """Decode one image of each of the classes that the run comes to first."""
    plan, index = pipeline.plan, pipeline.train_index
    samples = _one_of_each_class(pipeline)
    labels = index.labels[samples]
    num_passes = max(1, min(PASSES, math.floor(plan.epoch(plan.train_steps))))
    places = _places(pipeline, samples, num_passes)

    training = _training(pipeline, places)
    clean = _images(pipeline.decode(index, _requests(pipeline, places[:, 0].tolist(), clean=True)))
    return Shown(
        classes=tuple(index.classes[label] for label in labels),
        training=tuple(tuple(training[row :: len(samples)]) for row in range(len(samples))),
        clean=_in_rows(clean, [1] * len(samples)),
        evaluation=_validation(pipeline, labels),
    )


def _requests(pipeline: Pipeline, positions: Iterable[int], *, clean: bool) -> Iterator[Request]:
    return (pipeline.training_request(range(p, p + 1), clean=clean) for p in positions)


def _training(pipeline: Pipeline, places: IntArray) -> list[Tensor]:
    usual = pipeline.data.image_size
    found: list[Tensor] = []
    size_of = partial(pipeline.plan.image_size, otherwise=usual)
    for size, positions in groupby(places.T.ravel().tolist(), key=size_of):
        requests = _requests(pipeline, positions, clean=False)
        found += _images(pipeline.decode(pipeline.train_index, requests, image_size=size))
    return found


def denormalized(image: Tensor, data: Data) -> npt.NDArray[np.uint8]:
    """Return an image the model gets, 3 x H x W, as H x W x 3 bytes; what is no colour is cut."""
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (data.mean, data.std))
    values = image.mul(std).add(mean).mul(255).round().clamp(0, 255)
    return values.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def _one_of_each_class(pipeline: Pipeline) -> IntArray:
    """Return the first sample of each class in the order of the run, sorted by class."""
    once = range(pipeline.plan.train_samples)
    order = pipeline.training_samples(once)
    labels = pipeline.train_index.labels[order]
    _, first = np.unique(labels, return_index=True)
    chosen = np.sort(first)[:CLASSES]
    return order[chosen[np.argsort(labels[chosen])]]


def _places(pipeline: Pipeline, samples: IntArray, num_passes: int) -> IntArray:
    """Return len(samples) x num_passes positions of the run at which these samples come."""
    number = pipeline.plan.train_samples
    columns = []
    for start in range(0, num_passes * number, number):
        positions = range(start, start + number)
        order = pipeline.training_samples(positions)
        columns.append([start + int(np.flatnonzero(order == sample)[0]) for sample in samples])
    return np.array(columns, dtype=np.int64).T


def _validation(pipeline: Pipeline, labels: IntArray) -> Rows:
    index = pipeline.val_index
    samples = pipeline.evaluated_samples
    chosen = [samples[index.labels[samples] == label][:CHECKS] for label in labels]
    requests = (pipeline.clean_request(index, sample[None]) for row in chosen for sample in row)
    return _in_rows(_images(pipeline.decode(index, requests)), list(map(len, chosen)))


def _images(batches: Batches) -> Iterator[Tensor]:
    """Yield the images of batches of one on the host; close the batches."""
    with closing(batches):
        for batch in batches:
            # sync: they are drawn by the processor; the copy is ours when the decoder ends
            yield batch.images[0].to("cpu", copy=True)


def _in_rows(images: Iterator[Tensor], lengths: Sequence[int]) -> Rows:
    rows = tuple(tuple(islice(images, length)) for length in lengths)
    assert next(images, None) is None, "there are as many images as were asked for"
    return rows


class _Group(NamedTuple):
    name: str
    note: str
    colour: str
    rows: Rows


def write_sheet(
    path: Path, recipe: Recipe, *, folder: Path | None, progress: Progress = silent
) -> None:
    """Write the contact sheet of a recipe, whose images may be in `folder`, as a PNG file.

    Raises LargebatchError if the images cannot be read or the file cannot be written.
    """
    require_png(path, what="sheet")
    plan = make_plan(recipe.mathematics)
    pipeline = open_images(recipe, plan, Serial(), folder=folder, progress=progress)
    shown = show(pipeline)
    sheet = draw_sheet(shown, recipe, plan)
    try:
        with whole_file(path) as file:
            sheet.save(file, format="PNG")
    except OSError as error:
        raise LargebatchError(f"{path}: cannot write the sheet: {error.strerror}") from None


def record_worst(pipeline: Pipeline, folder: Path) -> None:
    """Write the images that the model of a run folder got most wrong beside its records.

    Nothing is written where none was wrong or is known. Raises DataError where an image cannot be
    read any more.
    """
    mistakes = read_run(folder).final_mistakes
    if mistakes is None or not mistakes.worst:
        return
    samples = mistakes.worst
    index, data = pipeline.val_index, pipeline.data
    requests = (pipeline.clean_request(index, np.array([sample])) for sample in samples)
    side = (drawn_side(data.image_size),) * 2
    tiles = [
        Image.fromarray(denormalized(image, data)).resize(side, Image.Resampling.BOX)
        for image in _images(pipeline.decode(index, requests))
    ]
    write_worst(folder / WORST, tiles, samples)


def draw_sheet(shown: Shown, recipe: Recipe, plan: Plan) -> Image.Image:
    """Draw classes below each other, stages side by side, and below them a line on each fact."""
    size = _enlarged(recipe.data.image_size)  # of an image; other lengths are parts of it
    margin, gap, space, head = (size * part // 100 for part in (25, 22, 5, 92))
    large, small, line = size * 20 // 100, size * 14 // 100, size * 22 // 100
    groups, names = _groups(shown, recipe, plan), [clip(name, 24) for name in shown.classes]
    facts = _facts(groups, recipe)
    left = margin + small * max(map(len, names)) * 5 // 8 + gap
    columns = [max(map(len, group.rows)) for group in groups]
    width = left + sum(columns) * (size + space) + len(groups) * gap + margin
    width = max(width, small * max(map(len, facts)) * 5 // 8 + 2 * margin)
    height = head + len(names) * (size + space) + gap + len(facts) * line + gap

    def draw(figure: "Figure") -> None:
        def write(x: float, y: float, text: str, colour: str, points: float, va: str) -> None:
            place = x / width, 1 - y / height
            figure.text(*place, text, color=colour, size=points, va=va)

        write(margin, margin, recipe.name, INK, large, "top")
        for row, name in enumerate(names):
            write(margin, head + row * (size + space) + size / 2, name, INK, small, "center")
        x = left
        for group, number in zip(groups, columns, strict=True):
            write(x, head - space - small * 1.2, group.name, group.colour, small, "bottom")
            write(x, head - space, group.note, MUTED, small * 0.8, "bottom")
            for row, images in enumerate(group.rows):
                for column, image in enumerate(images):
                    tile = Image.fromarray(denormalized(image, recipe.data))
                    tile = tile.resize((size, size), Image.Resampling.NEAREST)
                    y = head + row * (size + space) + size
                    figure.figimage(
                        np.asarray(tile), x + column * (size + space), height - y, origin="upper"
                    )
            x += number * (size + space) + gap
        bottom = head + len(names) * (size + space) + gap
        for place, fact in enumerate(facts):
            write(margin, bottom + place * line, fact, MUTED, small, "top")

    return Image.fromarray(draw_pixels(draw, size=(width, height)))


def _groups(shown: Shown, recipe: Recipe, plan: Plan) -> list[_Group]:
    passes = len(shown.training[0])
    when = "not in this recipe" if recipe.polish is None else "for statistics"
    if plan.clean_steps:
        when = "last update" if plan.clean_steps == 1 else f"last {plan.clean_steps:,} updates"
    return [
        _Group(
            "training",
            f"the same image in passes 1 to {passes}" if passes > 1 else "pass 1",
            COLOURS["train"],
            shown.training,
        ),
        _Group("clean", when, COLOURS["clean"], shown.clean),
        _Group("evaluation", "validation images", COLOURS["statistics"], shown.evaluation),
    ]


def _facts(groups: Sequence[_Group], recipe: Recipe) -> list[str]:
    data = recipe.data
    crops = clean = "whole images"
    if data.crop_area is not None:
        (small, large), (narrow, wide) = data.crop_area, data.crop_aspect
        crops = f"{small:.0%} to {large:.0%} of the area, width / height {narrow:.2f} to {wide:.2f}"
    if data.eval_resize is not None:
        clean = f"short side {data.eval_resize}, centre {data.image_size} x {data.image_size}"
    values = []
    for group in groups:
        images = torch.cat([image.flatten() for row in group.rows for image in row])
        values.append(f"{group.name} {images.mean():z.2f} ± {images.std():.2f}")
    size, flips = f"{data.image_size} x {data.image_size}", "half" if data.flip else "never"
    flips = "alternately" if data.flip == "alternating" else flips
    moved = f", moved by up to {data.translate} pixels" if data.translate else ""
    sides = ", ".join(str(part.image_size) for part in data.resolution)
    sides = sides and f", first of {sides} pixels"
    decoding = describe_decoding(recipe.execution, data.source)
    return [
        f"{recipe.model.name} sees {size}, {data.interpolation}, {decoding}",
        f"training: {crops}, {flips} mirrored{moved}{sides}; clean and evaluation: {clean}",
        f"values after normalisation, mean ± std of these images: {', '.join(values)}",
    ]


def _enlarged(image_size: int) -> int:
    """Return the side of a drawn image.

    >>> [_enlarged(side) for side in (28, 32, 100, 224)]
    [112, 128, 200, 224]
    """
    return image_size * -(-SMALLEST // image_size)
