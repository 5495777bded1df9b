"""A resolution schedule sets the size of the augmented images by update, with the same crops.

The reference is Pillow, called by hand.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import needs_dali
from PIL import Image
from torch import Tensor

from largebatch.data.pipeline import Pipeline, open_images
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.models.of_recipe import require_accepted
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session
from largebatch.runs.options import Options

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
SIZES = [16, 16, 24, 24, 24, 32]
GROWING = (
    *("duration={steps: 8}", "schedule.warmup=null", "polish.clean={steps: 2}", "evaluation={}"),
    "data.resolution=[{until: {steps: 2}, image_size: 16}, {until: {steps: 5}, image_size: 24}]",
)


def digits(*overrides: str) -> Recipe:
    return load_recipe(DIGITS, [*GROWING, "data.crop_area=[0.3, 1]", "data.flip=true", *overrides])


def opened(recipe: Recipe, *, workers: int = 1) -> Pipeline:
    plan = make_plan(recipe, workers=workers)
    return open_images(recipe, plan, Serial(torch.device("cpu")), folder=None)


def by_pillow(pipeline: Pipeline, positions: range, size: int) -> Tensor:
    """Crop, resize and mirror the training images at these positions."""
    request = pipeline.training_request(positions, clean=False)
    shown = []
    each = zip(request.samples.tolist(), request.boxes.tolist(), request.flips, strict=True)
    for sample, (top, left, height, width), flip in each:
        with Image.open(pipeline.train_index.locate(sample).path) as image:
            part = image.convert("RGB").crop((left, top, left + width, top + height))
        pixels = np.asarray(part.resize((size, size), Image.Resampling.BILINEAR))
        shown.append(torch.from_numpy(pixels[:, ::-1].copy() if flip else pixels.copy()))
    data = pipeline.data
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (data.mean, data.std))
    return (torch.stack(shown).permute(0, 3, 1, 2) / 255 - mean) / std


def first_of_each(pipeline: Pipeline, steps: range) -> Iterator[tuple[int, Tensor]]:
    with closing(pipeline.training(steps, clean=False)) as batches:
        for step, batch in zip(steps, batches, strict=True):
            yield step, batch.images.clone()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), id="torchvision"),
        pytest.param(("execution.cache=memory",), id="cached"),
        pytest.param(("execution.decoder=dali",), id="dali", marks=needs_dali),
    ],
)
def test_every_update_sees_pillows_pixels_at_its_size(changes: tuple[str, ...]) -> None:
    pipeline = opened(digits(*changes))
    found = list(first_of_each(pipeline, range(6)))
    assert [images.shape[-1] for _, images in found] == SIZES
    for step, images in found:
        expected = by_pillow(pipeline, range(96 * step, 96 * (step + 1)), SIZES[step])
        inner = (..., slice(1, -1), slice(1, -1))  # DALI's outermost pixels are not Pillow's
        assert (images - expected)[inner].abs().max() * min(pipeline.data.std) < 2.1 / 255


def test_clean_images_have_the_size_of_the_evaluation() -> None:
    pipeline = opened(digits())
    for batches in (
        pipeline.training(range(6, 8), clean=True),
        pipeline.validation(),
        pipeline.statistics(96),
    ):
        with closing(batches):
            assert {batch.images.shape[-1] for batch in batches} == {32}


def test_a_fixed_size_model_is_refused_before_training(tmp_path: Path) -> None:
    recipe = digits(
        *("model={name: lenet5}", "batch.bn_span=null", "polish=null", "data.image_size=28"),
        "data.resolution=[{until: {steps: 2}, image_size: 12}]",
    )
    with (
        pytest.raises(RecipeError, match="resolution: lenet5.* 12 x 12"),
        open_session(recipe, Options(out=tmp_path), {}),
    ):
        pass
    vit = digits("model={name: vit_tiny_patch16_224}", "batch.bn_span=null", "polish=null")
    with pytest.raises(RecipeError, match="vit_tiny_patch16_224.* 192 x 192"):
        require_accepted(vit.model, classes=10, image_sizes=[192, 224])
