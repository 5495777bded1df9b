"""A contact sheet: what the model sees in training, clean and in evaluation, side by side.

Pillow draws it, because pixels must stay pixels: a picture of 28 x 28 is enlarged by a whole
factor, and no smoothing hides what resizing did to it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont

from largebatch.data.pipeline import open_pipeline
from largebatch.data.shown import Rows, Shown, denormalized, show
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.recipe.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Data
from largebatch.report.canvas import COLOURS, INK, MUTED, PAPER

SMALLEST = 112
"""Pictures with shorter sides are enlarged to at least this."""

Measure = Callable[[str], float]
"""Gives the width of a text in pixels."""


class _Lengths:
    """Lengths in pixels; all but those of letters and lines lie between or around pictures."""

    def __init__(self, image_size: int) -> None:
        self.tile = _enlarged(image_size)
        self.margin, self.gap, self.space = (self.tile * n // 100 for n in (25, 22, 5))
        self.head = self.tile * 92 // 100
        self.title, self.text, self.note = (self.tile * n // 100 for n in (20, 14, 11))
        self.line = self.tile * 22 // 100
        self.step = self.tile + self.space
        self.widest_name = 2 * self.tile


class _Group(NamedTuple):
    """Some columns of the sheet."""

    name: str
    note: str
    colour: str
    rows: Rows


def write_sheet(path: Path, recipe: Recipe, *, folder: Path | None) -> None:
    """Write the contact sheet of a recipe, whose pictures may lie in `folder`, as a PNG file.

    Raises LargebatchError where the pictures cannot be read or the file cannot be written.
    """
    if path.suffix.lower() != ".png":
        raise LargebatchError(f"{path}: the sheet is a PNG file: give a name that ends in .png")
    plan = make_plan(recipe, workers=1)
    pipeline = open_pipeline(recipe, plan, Serial(), folder=folder, decoder=None)
    sheet = draw_sheet(show(pipeline), recipe, plan)
    try:
        sheet.save(path)
    except OSError as error:
        raise LargebatchError(f"{path}: cannot write the sheet: {error.strerror}") from None


def draw_sheet(shown: Shown, recipe: Recipe, plan: Plan) -> Image.Image:
    """Draw classes below each other, stages side by side, and say below what was done."""
    size = _Lengths(recipe.data.image_size)
    text, note = ImageFont.load_default(size.text), ImageFont.load_default(size.note)
    groups = _groups(shown, recipe, plan)
    facts = _facts(groups, recipe)
    names = [_shortened(name, text.getlength, limit=size.widest_name) for name in shown.classes]
    first = size.margin + _widest(names, text.getlength) + size.gap
    lefts, right = _columns(groups, size, first=first)
    width = max(right, _widest(facts, text.getlength) + size.margin) + size.margin
    bottom = size.head + len(names) * size.step + size.gap
    sheet = Image.new("RGB", (width, bottom + len(facts) * size.line + size.gap), PAPER)
    pen = ImageDraw.Draw(sheet)
    title = ImageFont.load_default(size.title)
    pen.text((size.margin, size.margin), recipe.name, INK, title, anchor="lt")
    for row, name in enumerate(names):
        middle = size.head + row * size.step + size.tile // 2
        pen.text((size.margin, middle), name, INK, text, anchor="lm")
    for group, left in zip(groups, lefts, strict=True):
        above = size.head - size.space
        pen.text((left, above - size.text), group.name, group.colour, text, anchor="ls")
        pen.text((left, above), group.note, MUTED, note, anchor="ls")
        _paste(sheet, group.rows, recipe.data, left=left)
    for line, fact in enumerate(facts):
        pen.text((size.margin, bottom + line * size.line), fact, MUTED, text, anchor="lt")
    return sheet


def _groups(shown: Shown, recipe: Recipe, plan: Plan) -> list[_Group]:
    passes = len(shown.training[0])
    when = "not in this recipe" if recipe.polish is None else "for statistics"
    if plan.clean_steps:
        when = "last update" if plan.clean_steps == 1 else f"last {plan.clean_steps:,} updates"
    return [
        _Group(
            "training",
            f"the same picture in passes 1 to {passes}" if passes > 1 else "pass 1",
            COLOURS["train"],
            shown.training,
        ),
        _Group("clean", when, COLOURS["clean"], shown.clean),
        _Group("evaluation", "validation pictures", COLOURS["statistics"], shown.evaluation),
    ]


def _facts(groups: Sequence[_Group], recipe: Recipe) -> list[str]:
    """Say what was done to the pictures, and whether the normalised values are as they should."""
    data = recipe.data
    crops = clean = "whole pictures"
    if data.crop_area is not None:
        (small, large), (narrow, wide) = data.crop_area, data.crop_aspect
        crops = f"{small:.0%} to {large:.0%} of the area, width / height {narrow:.2f} to {wide:.2f}"
    if data.eval_resize is not None:
        clean = f"short side {data.eval_resize}, centre {data.image_size} x {data.image_size}"
    values = []
    for group in groups:
        images = torch.stack([image for row in group.rows for image in row])
        values.append(f"{group.name} {images.mean():z.2f} ± {images.std():.2f}")
    size, flips = f"{data.image_size} x {data.image_size}", "half" if data.flip else "never"
    return [
        f"{recipe.model.name} sees {size}, {data.interpolation}, {data.who_decodes()}",
        f"training: {crops}, {flips} mirrored; clean and evaluation: {clean}",
        f"values after normalisation, mean ± std of these pictures: {', '.join(values)}",
    ]


def _enlarged(image_size: int) -> int:
    """Return the side of a drawn picture.

    >>> [_enlarged(side) for side in (28, 32, 100, 224)]
    [112, 128, 200, 224]
    """
    return image_size * -(-SMALLEST // image_size)


def _columns(groups: Sequence[_Group], size: _Lengths, *, first: int) -> tuple[list[int], int]:
    """Return where each group begins, and where the last one ends."""
    lefts, left = [], first
    for group in groups:
        lefts.append(left)
        left += max(map(len, group.rows)) * size.step - size.space + size.gap
    return lefts, left - size.gap


def _paste(sheet: Image.Image, rows: Rows, data: Data, *, left: int) -> None:
    size = _Lengths(data.image_size)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            picture = Image.fromarray(denormalized(image, data))
            place = left + column * size.step, size.head + row * size.step
            sheet.paste(picture.resize((size.tile, size.tile), Image.Resampling.NEAREST), place)


def _widest(texts: Sequence[str], measure: Measure) -> int:
    return round(max(map(measure, texts)))


def _shortened(name: str, measure: Measure, *, limit: int) -> str:
    """Return a name at most `limit` wide, its end replaced by dots if need be."""
    if measure(name) <= limit:
        return name
    while name and measure(f"{name}...") > limit:
        name = name[:-1]
    return f"{name}..."
