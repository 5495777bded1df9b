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

from largebatch.cli.main import main
from largebatch.data.pipeline import ImagePipeline, open_images
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.lab.measure.estimate import estimate
from largebatch.models.of_recipe import require_accepted
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.report.contact_sheet import draw_sheet, show
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


def opened(recipe: Recipe, *, workers: int = 1) -> ImagePipeline:
    plan = make_plan(recipe, workers=workers)
    return open_images(recipe, plan, Serial(torch.device("cpu")), folder=None)


def by_pillow(pipeline: ImagePipeline, positions: range, size: int) -> Tensor:
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


def first_of_each(pipeline: ImagePipeline, steps: range) -> Iterator[tuple[int, Tensor]]:
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


def test_synthetic_images_have_these_sizes_too() -> None:
    pipeline = opened(digits("data.source=synthetic"))
    assert [images.shape[-1] for _, images in first_of_each(pipeline, range(6))] == SIZES


def test_crops_are_the_same_parts_of_the_images_at_every_size() -> None:
    growing, constant = opened(digits()), opened(digits("data.resolution=[]"))
    for step in range(6):
        ours, theirs = (
            pipeline.training_request(pipeline.plan.positions(step, 0, 0), clean=False)
            for pipeline in (growing, constant)
        )
        np.testing.assert_array_equal(ours.boxes, theirs.boxes)


def test_clean_images_have_the_size_of_the_evaluation() -> None:
    pipeline = opened(digits())
    for batches in (
        pipeline.training(range(6, 8), clean=True),
        pipeline.validation(),
        pipeline.statistics(96),
    ):
        with closing(batches):
            assert {batch.images.shape[-1] for batch in batches} == {32}


def test_a_run_from_a_later_update_sees_the_same_images() -> None:
    pipeline = opened(digits())
    whole = dict(first_of_each(pipeline, range(6)))
    for begin in (1, 2, 4):
        for step, images in first_of_each(pipeline, range(begin, 6)):
            torch.testing.assert_close(images, whole[step], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("resolution", "message"),
    [
        (
            "[{until: {steps: 5}, image_size: 16}, {until: {steps: 3}, image_size: 24}]",
            r"data.resolution.1.until \(step 3\) must lie after step 5",
        ),
        (
            "[{until: {steps: 7}, image_size: 16}]",
            r"resolution.0.until \(step 7\) must lie .* not after step 6, where training on augm",
        ),
        (
            "[{until: null, image_size: 16}, {until: {steps: 3}, image_size: 24}]",
            "data: resolution.0.until: null is for the last one, 2 are given",
        ),
    ],
)
def test_sizes_out_of_order_or_without_an_update_are_refused(resolution: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_plan(digits(f"data.resolution={resolution}"), workers=1)


def test_the_last_size_may_last_until_the_clean_updates() -> None:
    change = "data.resolution=[{until: {steps: 2}, image_size: 16}, {until: null, image_size: 24}]"
    plan = make_plan(digits(change), workers=1)
    assert plan.sized(range(6), otherwise=32) == [(range(2), 16), (range(2, 6), 24)]


def test_a_fixed_size_model_is_refused_before_training(tmp_path: Path) -> None:
    recipe = digits(
        *("model={name: lenet5}", "batch.bn_span=null", "polish=null", "data.image_size=28"),
        "data.resolution=[{until: {steps: 2}, image_size: 12}]",
    )
    with (
        pytest.raises(RecipeError, match=r"resolution: lenet5 does not take images of 12 x 12 \("),
        open_session(recipe, Options(out=tmp_path), {}),
    ):
        pass
    vit = digits("model={name: vit_tiny_patch16_224}", "batch.bn_span=null", "polish=null")
    with pytest.raises(RecipeError, match=r"vit_tiny_patch16_224 does not take .* 192 x 192 \("):
        require_accepted(vit, [192, 224])


def test_the_contact_sheet_shows_each_pass_at_its_size() -> None:
    sizes = "[{until: {epochs: 1}, image_size: 16}, {until: {epochs: 2}, image_size: 24}]"
    recipe = digits("duration={epochs: 4}", f"data.resolution={sizes}", "polish.clean={epochs: 1}")
    pipeline = opened(recipe)
    shown = show(pipeline)
    assert [[image.shape[-1] for image in row] for row in shown.training] == [[16, 24, 32]] * 10
    position = 1437 + int(
        np.flatnonzero(
            pipeline.training_request(range(1437, 2 * 1437), clean=False).samples
            == pipeline.training_request(range(1), clean=False).samples[0]
        )[0]
    )
    (expected,) = by_pillow(pipeline, range(position, position + 1), 24)
    seen = [row[1] for row in shown.training]
    assert any(torch.allclose(image, expected, atol=1e-5) for image in seen)
    assert draw_sheet(shown, recipe, pipeline.plan).width > 0


def test_the_plan_and_the_estimate_use_the_sizes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("largebatch.cli.recipe._this_machine", lambda *_: "not measured")
    changes = [word for change in GROWING for word in ("--set", change)]
    assert main(["plan", str(DIGITS), *changes]) == 0
    shown = capsys.readouterr().out
    assert "image size  16 until step 2, 24 until step 5, 32 until step 6; clean and" in shown
    small = ("execution.device_batch=48", "model.arguments.channels=[8, 8, 16, 16]")
    recipe = digits(*small, "data.resolution=[{until: null, image_size: 16}]", "polish.clean=null")
    found = estimate(recipe, make_plan(recipe, workers=1))
    usual = digits(*small, "data.resolution=[]", "polish.clean=null")
    assert found.memory_bytes < estimate(usual, make_plan(usual, workers=1)).memory_bytes
