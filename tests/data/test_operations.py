"""Operations on pixels: draws, pixels and shares against torchvision, timm and big_vision."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerator
import numpy as np
import pytest
import torch
from accelerator import COUNTS
from decoding import needs_dali, photograph, png_folder
from on_forked_workers import on_forked_workers
from PIL import Image
from scipy.stats import chi2_contingency, chisquare, ks_2samp

from largebatch.data.datasets import own
from largebatch.data.datasets.own import Items
from largebatch.data.index.index import Index
from largebatch.data.operations import batched, pillow
from largebatch.data.operations.applying import operate
from largebatch.data.operations.draws import Filter, Operation, draw
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import Bytes, Decode, Operations, Resources, View
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.optional import require_timm, require_torchvision
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.augment import Augment, ColorJitter, RandAugment, TrivialAugment
from largebatch.recipe.loading import load_recipe

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZE = 32
DRAWS = 20_000
LEAST = 1e-4  # of a p value: one of 10,000 seeds fails by chance
CPU = Serial(torch.device("cpu"))

RAND = partial(RandAugment, kind="rand_augment")
TORCHVISION = RAND(set="torchvision", operations=2, magnitude=9)
TIMM = RAND(set="timm", operations=2, magnitude=9, increasing=True, std=0.5)
TIMM_RISING = RAND(set="timm", operations=2, magnitude=7, std=1.5, probability=1.0)
BIG_VISION = RAND(set="big_vision", operations=2, magnitude=10)
TRIVIAL = TrivialAugment(kind="trivial_augment", interpolation="random")
JITTER = ColorJitter(kind="color_jitter", brightness=0.4, contrast=1.3, saturation=0.2, hue=0.1)
EVERY = [
    pytest.param(TORCHVISION, id="torchvision"),
    pytest.param(TIMM, id="timm"),
    pytest.param(TIMM_RISING, id="timm, not increasing"),
    pytest.param(BIG_VISION, id="big_vision"),
    pytest.param(TRIVIAL, id="trivial_augment"),
    pytest.param(JITTER, id="color_jitter"),
]

NAMES = {
    Operation.IDENTITY: "Identity",
    Operation.SHEAR_X: "ShearX",
    Operation.SHEAR_Y: "ShearY",
    Operation.TRANSLATE_X: "TranslateX",
    Operation.TRANSLATE_Y: "TranslateY",
    Operation.ROTATE: "Rotate",
    Operation.BRIGHTNESS: "Brightness",
    Operation.COLOR: "Color",
    Operation.CONTRAST: "Contrast",
    Operation.SHARPNESS: "Sharpness",
    Operation.POSTERIZE: "Posterize",
    Operation.SOLARIZE: "Solarize",
    Operation.AUTO_CONTRAST: "AutoContrast",
    Operation.EQUALIZE: "Equalize",
}
TIMM_NAMES = {
    **NAMES,
    Operation.INVERT: "Invert",
    Operation.SOLARIZE_ADD: "SolarizeAdd",
    Operation.TRANSLATE_X: "TranslateXRel",
    Operation.TRANSLATE_Y: "TranslateYRel",
}
BIG_VISION_NAMES = {
    **TIMM_NAMES,
    Operation.TRANSLATE_X: "TranslateX",
    Operation.TRANSLATE_Y: "TranslateY",
    Operation.CONTRAST_BY_SIZE: "Contrast",
    Operation.CUT_OUT: "Cutout",
}
FACTORS = (Operation.BRIGHTNESS, Operation.COLOR, Operation.CONTRAST, Operation.SHARPNESS)
WITHOUT_STRENGTH = (Operation.AUTO_CONTRAST, Operation.EQUALIZE, Operation.INVERT)
GEOMETRY = (
    Operation.ROTATE,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
)


def view(size: int = SIZE) -> View:
    return View(image_size=size, mean=MEAN, std=STD, interpolation="bilinear")


def drawn(section: Augment, positions: range, *, size: int = SIZE) -> Operations:
    return draw(section, 3, positions, view(size))


def images(number: int, size: int = SIZE) -> Bytes:
    """Return N x size x size x 3 crops of a photograph: bright, dark and pale ones, one grey."""
    whole = photograph(3 * size, 3 * size)
    random = np.random.default_rng(0)
    corners = random.integers(0, 2 * size, (number, 2))
    crops = np.stack([whole[top : top + size, left : left + size] for top, left in corners])
    crops[1::3] = crops[1::3] // 2 + 60
    crops[2::3] //= 3
    crops[0] = 77
    return crops


def in_batches(pixels: Bytes, operations: Operations) -> Bytes:
    """Return the pixels of the way of a device, computed here."""
    planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return batched.apply(planes, operations).permute(0, 2, 3, 1).numpy()


def one_by_one(pixels: Bytes, operations: Operations) -> Bytes:
    changes = pillow.Changes(operations, height=pixels.shape[1], width=pixels.shape[2])
    return np.stack([changes.apply(image, row) for row, image in enumerate(pixels)])


def by_torchvision(image: Image.Image, operations: Operations, row: int) -> Image.Image:
    require_torchvision()
    from torchvision.transforms import InterpolationMode, autoaugment

    modes = [InterpolationMode.NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC]
    strength = float(operations.strengths[row, 0])
    kind = Operation(operations.kinds[row, 0])
    if kind in FACTORS:
        strength -= 1.0
    mode = modes[operations.filters[row, 0]]
    changed: Image.Image = autoaugment._apply_op(image, NAMES[kind], strength, mode, fill=None)
    return changed


def by_torchvisions_jitter(image: Image.Image, operations: Operations, row: int) -> Image.Image:
    require_torchvision()
    from torchvision.transforms import functional

    apply = {
        Operation.BRIGHTNESS: functional.adjust_brightness,
        Operation.CONTRAST: functional.adjust_contrast,
        Operation.COLOR: functional.adjust_saturation,
        Operation.HUE: functional.adjust_hue,
    }
    kinds = operations.kinds[row].tolist()
    for kind, strength in zip(kinds, operations.strengths[row].tolist(), strict=True):
        image = apply[Operation(kind)](image, strength)
    return image


def by_timm(image: Image.Image, operations: Operations, row: int) -> Image.Image:
    require_timm()
    from timm.data.auto_augment import NAME_TO_OP

    resampling = [Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC]
    strength: Any = float(operations.strengths[row, 0])
    kind = Operation(operations.kinds[row, 0])
    if kind == Operation.IDENTITY:
        return image
    if kind in {Operation.POSTERIZE, Operation.SOLARIZE, Operation.SOLARIZE_ADD}:
        strength = int(strength)
    if kind == Operation.POSTERIZE and strength == 0:  # Pillow 13 refuses what it made black before
        return Image.new("RGB", image.size)
    if kind in {
        Operation.TRANSLATE_X,
        Operation.TRANSLATE_Y,
    }:  # a part of the side, to the other side
        strength /= -image.width
    arguments = () if kind in WITHOUT_STRENGTH else (strength,)
    changed: Image.Image = NAME_TO_OP[TIMM_NAMES[kind]](
        image,
        *arguments,
        fillcolor=(124, 116, 104),
        resample=resampling[operations.filters[row, 0]],
    )
    return changed


@pytest.mark.parametrize(
    ("section", "reference"),
    [
        pytest.param(TORCHVISION, by_torchvision, id="torchvision"),
        pytest.param(TIMM, by_timm, id="timm"),
        pytest.param(TRIVIAL, by_torchvision, id="trivial_augment"),
        pytest.param(JITTER, by_torchvisions_jitter, id="color_jitter"),
    ],
)
def test_pixels_are_those_of_the_library(
    section: Augment, reference: Callable[[Image.Image, Operations, int], Image.Image]
) -> None:
    """For 200 draws of each operation: equal on the host; on a device 1 of 255 off at times."""
    if isinstance(section, RandAugment):
        section = section.model_copy(update={"operations": 1, "probability": 1.0})
    every = drawn(section, range(4000))
    rows = np.concatenate(
        [np.flatnonzero(every.kinds[:, 0] == kind)[:200] for kind in np.unique(every.kinds[:, 0])]
    )
    operations = at_rows(every, rows)
    kinds, counts = np.unique(operations.kinds[:, 0], return_counts=True)
    assert counts.tolist() == [200] * len(kinds)
    pixels = images(len(rows))
    expected = np.stack(
        [
            np.asarray(reference(Image.fromarray(image), operations, row))
            for row, image in enumerate(pixels)
        ]
    )
    found = one_by_one(pixels, operations)
    # torchvision's slopes are tangents of angles, which differ in their last bit.
    assert np.abs(found.astype(int) - expected).max() <= 1
    assert (found != expected).mean() < 1e-5
    assert_nearly_equal(in_batches(pixels, operations), expected, operations)


def at_rows(operations: Operations, rows: np.ndarray) -> Operations:
    names = ("kinds", "strengths", "filters", "centers")
    return replace(operations, **{name: getattr(operations, name)[rows] for name in names})


def assert_nearly_equal(found: Bytes, expected: Bytes, operations: Operations) -> None:
    """Only interpolated values may differ, by 1, and at most 2 of 10,000 of them do."""
    apart = np.abs(found.astype(int) - expected)
    interpolated = np.isin(operations.kinds, GEOMETRY) & (operations.filters != Filter.NEAREST)
    is_interpolated = interpolated.any(axis=1)
    assert apart.max() <= 1
    assert apart[~is_interpolated].max(initial=0) == 0
    if is_interpolated.any():
        assert apart[is_interpolated].mean() < 2e-4


def test_pixels_of_usual_images_are_pillows_on_a_device_too() -> None:
    pixels = images(24, size=224)
    for section in (TORCHVISION, TIMM_RISING, BIG_VISION):
        one = section.model_copy(update={"operations": 1})
        operations = drawn(one, range(24), size=224)
        assert_nearly_equal(
            in_batches(pixels, operations), one_by_one(pixels, operations), operations
        )


def test_pixels_are_those_of_big_vision() -> None:
    """Against its own TensorFlow operations on an image of 20 x 20.

    Colour, sharpness and autocontrast are rounded in another place, which changes values by 1. At
    a slope of -0.3 the nearest pixel is a tie in one row or column of ten, taken from the other
    side.
    """
    recorded = np.load(Path(__file__).parents[1] / "support" / "big_vision_pixels.npz")
    image = recorded["image"]
    kinds = {name: kind for kind, name in BIG_VISION_NAMES.items() if kind != Operation.CONTRAST}
    for key in recorded.files[1:]:
        name, magnitude, argument = key.split(":")
        kind = kinds[name]
        section = RAND(set="big_vision", operations=1, magnitude=float(magnitude))
        every = drawn(section, range(600), size=20)
        side = -1.0 if kind in {Operation.TRANSLATE_X, Operation.TRANSLATE_Y} else 1.0
        is_drawn = every.kinds[:, 0] == kind
        if kind in GEOMETRY:
            is_drawn &= np.sign(every.strengths[:, 0]) == side * np.sign(float(argument))
        operation = replace(
            at_rows(every, np.flatnonzero(is_drawn)[:1]), centers=np.array([[[5.0, 17.0]]])
        )
        if kind not in {
            Operation.SOLARIZE,
            Operation.POSTERIZE,
        }:  # which are stored in 8 bits, see draws.py
            assert operation.strengths[0, 0] == pytest.approx(side * float(argument))
        for found in (one_by_one(image[None], operation), in_batches(image[None], operation)):
            apart = np.abs(found[0].astype(int) - recorded[key])
            if kind in {Operation.SHEAR_X, Operation.SHEAR_Y} and float(argument) == -0.3:
                assert (apart.max(axis=2) > 0).sum() <= 2 * 20
            else:
                rounds = {
                    Operation.COLOR: 1,
                    Operation.AUTO_CONTRAST: 1,
                    Operation.SHARPNESS: 1 + (magnitude == "15"),
                }
                assert apart.max() <= rounds.get(kind, 0), key


def of_torchvision(section: RandAugment | TrivialAugment) -> dict[str, list[float]]:
    """Return the strengths of each operation in torchvision's own draws, as often as DRAWS."""
    require_torchvision()
    from torchvision.transforms import autoaugment

    found: dict[str, list[float]] = {}

    def note(image: object, name: str, magnitude: float, **_: object) -> object:
        found.setdefault(name, []).append(magnitude)
        return image

    torch.manual_seed(0)
    policy: Any
    if isinstance(section, TrivialAugment):
        policy, number = autoaugment.TrivialAugmentWide(), DRAWS
        space = policy._augmentation_space(31)
    else:
        policy, number = autoaugment.RandAugment(2, int(section.magnitude)), DRAWS // 2
        space = policy._augmentation_space(31, (SIZE, SIZE))
    policy._augmentation_space = lambda *_: space  # computed once
    image = Image.new("RGB", (SIZE, SIZE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoaugment, "_apply_op", note)
        for _ in range(number):
            policy(image)
    return found


def of_timm(section: RandAugment) -> dict[str, list[float]]:
    """Return the strengths of each operation in timm's own draws, as often as DRAWS."""
    require_timm()
    import random

    from timm.data.auto_augment import rand_augment_transform

    found: dict[str, list[float]] = {"Identity": []}
    size = f"m{section.magnitude:g}-n{section.operations}"
    more = f"mstd{section.std}-inc{section.increasing:d}-p{section.probability or 0.5}"
    transform = rand_augment_transform(f"rand-{size}-{more}")
    for operation in transform.ops:
        strengths = found[operation.name.removesuffix("Increasing")] = []

        def note(
            image: object, *arguments: float, to: list[float] = strengths, **_: object
        ) -> object:
            to.append(arguments[0] if arguments else 0.0)
            return image

        operation.aug_fn = note
    random.seed(0)
    np.random.seed(0)
    for _ in range(DRAWS // section.operations):
        transform(None)
    applied = sum(map(len, found.values()))
    found["Identity"] = [0.0] * (DRAWS - applied)
    return found


@pytest.mark.parametrize(
    ("section", "reference", "names"),
    [
        pytest.param(TORCHVISION, of_torchvision, "torchvision", id="torchvision"),
        pytest.param(TRIVIAL, of_torchvision, "torchvision", id="trivial_augment"),
        pytest.param(TIMM, of_timm, "timm", id="timm"),
        pytest.param(TIMM_RISING, of_timm, "timm", id="timm, not increasing"),
    ],
)
def test_shares_and_strengths_are_those_of_the_library(
    section: RandAugment | TrivialAugment,
    reference: Callable[[Any], dict[str, list[float]]],
    names: str,
) -> None:
    """20,000 draws with fixed seeds: chi-square for the shares, Kolmogorov's test for strengths."""
    theirs = reference(section)
    layers = getattr(section, "operations", 1)
    every = drawn(section, range(DRAWS // layers))
    kinds = every.kinds.ravel()
    strengths = every.strengths.ravel()
    ours: dict[str, np.ndarray] = {}
    for kind in Operation:
        name = (TIMM_NAMES if names == "timm" else NAMES).get(kind)
        if (kinds == kind).any():
            assert name is not None
            ours[name] = strengths[kinds == kind]
            if kind in FACTORS and names == "torchvision":
                ours[name] = ours[name] - 1.0
            if kind in {Operation.TRANSLATE_X, Operation.TRANSLATE_Y}:
                ours[name] = -ours[name] / SIZE if names == "timm" else ours[name]
    theirs = {name: values for name, values in theirs.items() if values}
    assert ours.keys() == theirs.keys()
    counts = [[len(side[name]) for name in theirs] for side in (ours, theirs)]
    assert np.sum(counts, axis=1).tolist() == [DRAWS, DRAWS]
    assert chi2_contingency(counts).pvalue > LEAST
    for name, values in theirs.items():
        reference_values = np.array(values)
        if name.startswith("Translate") and names == "torchvision":
            reference_values = np.trunc(reference_values + 1e-4 * np.sign(reference_values))
        # Rounded, because a tie must be a tie.
        result = ks_2samp(ours[name].round(5), reference_values.round(5))
        assert result.pvalue > LEAST, name


def test_operations_of_an_image_are_drawn_independently_and_with_replacement() -> None:
    """As by torchvision and timm: all 14 x 14 pairs, and half of timm's are not applied."""
    kinds = drawn(TORCHVISION, range(DRAWS)).kinds
    table = np.zeros((len(Operation), len(Operation)), dtype=int)
    np.add.at(table, (kinds[:, 0], kinds[:, 1]), 1)
    drawn_kinds = np.unique(kinds)
    assert chisquare(table[np.ix_(drawn_kinds, drawn_kinds)].ravel()).pvalue > LEAST
    is_applied = drawn(TIMM, range(DRAWS)).kinds != Operation.IDENTITY
    counts = np.bincount(is_applied.sum(axis=1), minlength=3)
    assert chisquare(counts, DRAWS * np.array([0.25, 0.5, 0.25])).pvalue > LEAST


def test_thresholds_and_bits_are_exactly_torchvisions() -> None:
    """Pixels have whole values, so a threshold of 68 and one that is slightly above it differ."""
    require_torchvision()
    from torchvision.transforms import autoaugment

    every = drawn(TRIVIAL, range(DRAWS))
    space = autoaugment.TrivialAugmentWide()._augmentation_space(31)
    for kind in (Operation.SOLARIZE, Operation.POSTERIZE):
        magnitudes, _ = space[NAMES[kind]]
        found = np.unique(every.strengths[every.kinds == kind])
        assert found.tolist() == sorted({*magnitudes.tolist()})


def test_jitter_is_drawn_as_by_torchvision() -> None:
    require_torchvision()
    from torchvision.transforms import ColorJitter as Reference

    torch.manual_seed(0)
    reference = Reference(brightness=0.4, contrast=1.3, saturation=0.2, hue=0.1)
    ranges = (reference.brightness, reference.contrast, reference.saturation, reference.hue)
    theirs = [Reference.get_params(*ranges) for _ in range(DRAWS)]
    ours = drawn(JITTER, range(DRAWS))
    order = np.array([Operation.BRIGHTNESS, Operation.CONTRAST, Operation.COLOR, Operation.HUE])
    for number, kind in enumerate(order):
        strengths = ours.strengths[ours.kinds == kind]
        assert ks_2samp(strengths, [draws[1 + number] for draws in theirs]).pvalue > LEAST
    numbers = np.searchsorted(np.sort(order), ours.kinds)
    expected = np.searchsorted(np.sort(order), order[np.array([d[0].numpy() for d in theirs])])
    counts = [np.bincount(orders @ [64, 16, 4, 1], minlength=256) for orders in (numbers, expected)]
    table = np.array(counts)[:, np.sum(counts, axis=0) > 0]
    assert table.shape[1] == 24
    assert chi2_contingency(table).pvalue > LEAST


def test_strengths_of_big_vision() -> None:
    """At the published magnitude of 10, by hand from its source; 56 pixels are half of 112."""
    operations = drawn(BIG_VISION, range(DRAWS // 2), size=112)
    expected = {
        Operation.AUTO_CONTRAST: {0.0},
        Operation.EQUALIZE: {0.0},
        Operation.INVERT: {0.0},
        Operation.ROTATE: {-30.0, 30.0},
        Operation.POSTERIZE: {4.0},
        Operation.SOLARIZE: {0.0},
        Operation.COLOR: {1.9},
        Operation.CONTRAST_BY_SIZE: {1.9},
        Operation.BRIGHTNESS: {1.9},
        Operation.SHARPNESS: {1.9},
        Operation.SHEAR_X: {-0.3, 0.3},
        Operation.SHEAR_Y: {-0.3, 0.3},
        Operation.TRANSLATE_X: {-100.0, 100.0},
        Operation.TRANSLATE_Y: {-100.0, 100.0},
        Operation.CUT_OUT: {40.0},
        Operation.SOLARIZE_ADD: {110.0},
    }
    found = {
        Operation(kind): set(operations.strengths[operations.kinds == kind].round(9).tolist())
        for kind in np.unique(operations.kinds)
    }
    assert found == expected
    counts = np.unique(operations.kinds, return_counts=True)[1]
    assert chi2_contingency([counts, [DRAWS // 16] * 16]).pvalue > LEAST
    assert operations.fill == (128, 128, 128)
    assert np.unique(operations.centers).tolist() == list(range(112))


@pytest.mark.parametrize("section", EVERY)
def test_draws_depend_on_seed_and_position_alone(section: Augment) -> None:
    whole = drawn(section, range(90))
    part = drawn(section, range(70, 90))
    other = draw(section, 4, range(70, 90), view())
    for name in ("kinds", "strengths", "filters", "centers"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[70:])
    assert not np.array_equal(part.strengths, other.strengths)


def test_images_are_normalised_after_their_operations() -> None:
    """In the order of memory and the type that the model wants."""
    pixels = images(6)
    given = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    operations = drawn(TIMM, range(6))
    expected = (one_by_one(pixels, operations) / 255 - MEAN) / STD
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        for order in (torch.contiguous_format, torch.channels_last):
            wanted = replace(view(), dtype=dtype, channels_last=order == torch.channels_last)
            found = operate(given, replace(operations, view=wanted))
            assert found.dtype == dtype
            assert found.is_contiguous(memory_format=order)
            np.testing.assert_allclose(
                found.double().permute(0, 2, 3, 1).numpy(), expected, atol=error, rtol=error
            )


def a_pipeline(
    folder: Path | None, *changes: str, workers: int = 1, rank: int = 0, backend: Serial = CPU
) -> Pipeline:
    recipe = load_recipe(
        "digits_96",
        [
            "batch={global_batch: 8, bn_span: 2}",
            *("schedule.warmup=null", "polish=null", "evaluation={}"),
            *("data.source=folder", "data.classes=2", "data.image_size=32", "data.flip=true"),
            *("data.crop_area=[0.3, 1.0]", "data.train_samples=13", "data.val_samples=13"),
            "execution.device_batch=2",
            *changes,
        ],
    )
    plan = make_plan(recipe, workers=workers)
    return replace(open_images(recipe, plan, backend, folder=folder), rank=rank)


AUGMENTED = "data.augment={kind: rand_augment, set: timm, magnitude: 9, std: 0.5, probability: 1.0}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    png_folder(root, one_size=True)
    (root / "val").symlink_to(root / "train")
    return root


def shown(pipeline: Pipeline, *, clean: bool = False) -> torch.Tensor:
    return torch.cat([batch.images for batch in pipeline.training(range(3), clean=clean)])


def test_workers_see_the_images_of_one_worker(folder: Path) -> None:
    """They are the plain images after the drawn operations; clean images have none."""
    plain = a_pipeline(folder, "data.mean=[0, 0, 0]", "data.std=[1, 1, 1]")
    pixels = shown(plain).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    augmented = a_pipeline(folder, AUGMENTED)
    request = augmented.training_request(range(24), clean=False)
    assert request.operations is not None
    assert (request.operations.kinds != Operation.IDENTITY).all()
    data = augmented.data
    expected = (one_by_one(pixels, request.operations) / 255 - data.mean) / data.std
    images_of_one = shown(augmented)
    np.testing.assert_allclose(images_of_one.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)
    ranks = [shown(a_pipeline(folder, AUGMENTED, workers=2, rank=rank)) for rank in range(2)]
    halves = torch.stack(ranks).view(2, 3, -1, *images_of_one.shape[1:])
    together = torch.cat([halves[0], halves[1]], dim=1).flatten(0, 1)
    assert sorted(map(hash_of, together)) == sorted(map(hash_of, images_of_one))
    assert torch.equal(shown(augmented, clean=True), shown(a_pipeline(folder), clean=True))


def hash_of(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


WHOLE = (
    *("data.crop_area=null", "data.image_size=70", "data.translate=5"),
    *("data.mix={mixup: 0.8, cutmix: 1}", "data.erase={probability: 0.5, fill: noise}"),
    # Of the nearest pixel, so that a device has the same bits.
    AUGMENTED.replace("}", ", interpolation: nearest}"),
)
"""Images of their own size, which no decoder resizes: all decoders have the same bytes."""


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("squares")
    png_folder(root, one_size=True, size=(70, 70))
    (root / "val").symlink_to(root / "train")
    return root


@pytest.fixture(scope="module")
def by_torchvision_decoder(squares: Path) -> torch.Tensor:
    whole = a_pipeline(squares, *WHOLE, "execution.decoder=torchvision")
    return shown(whole)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("execution.decoder=dali", id="dali", marks=needs_dali),
        pytest.param("execution.cache=memory", id="cached pixels"),
    ],
)
def test_behind_every_decoder(
    squares: Path, setting: str, by_torchvision_decoder: torch.Tensor, own_cache: None
) -> None:
    other = shown(a_pipeline(squares, *WHOLE, setting))
    assert len(other) == 24
    assert torch.equal(other, by_torchvision_decoder)


def test_behind_a_data_set_of_ones_own(squares: Path, by_torchvision_decoder: torch.Tensor) -> None:
    pipeline = a_pipeline(squares, *WHOLE)
    index = pipeline.train_index
    files = [Image.open(squares / str(path)) for path in index.paths]
    items = Items("train", list(zip(files, index.labels.tolist(), strict=True)))

    def open_decoder(index: Index, view: View) -> AbstractContextManager[Decode]:
        return own.open_decoder(items, index, view, Resources(CPU.device, threads=2, batch_size=2))

    assert torch.equal(shown(replace(pipeline, open_decoder=open_decoder)), by_torchvision_decoder)


def test_behind_synthetic_images() -> None:
    """Bytes of them are their values without what is behind the point."""
    synthetic = ("data.source=synthetic", "data.translate=5", "data.image_size=16")
    unscaled = ("data.mean=[0, 0, 0]", "data.std=[1, 1, 1]")
    plain = a_pipeline(None, *synthetic, *unscaled)
    pixels = shown(plain).mul(255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    augmented = a_pipeline(None, *synthetic, AUGMENTED)
    request = augmented.training_request(range(24), clean=False)
    assert request.operations is not None
    data = augmented.data
    expected = (one_by_one(pixels, request.operations) / 255 - data.mean) / data.std
    found = shown(augmented).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def on_a_device_behind_decoders(squares: Path) -> dict[str, tuple[torch.Tensor, int]]:
    device = accelerator.simulate()
    images = {}
    for setting in ("decoder=torchvision", "cache=memory", "cache=device"):
        whole = a_pipeline(
            squares, *WHOLE, f"execution.{setting}", "precision=fp32", backend=Serial(device)
        )
        COUNTS.clear()
        there = shown(whole)
        images[setting] = there.cpu(), COUNTS.syncs.total() - 1
    return images


def test_behind_every_decoder_of_a_device(
    squares: Path, by_torchvision_decoder: torch.Tensor, own_cache: None
) -> None:
    found = on_forked_workers(on_a_device_behind_decoders, squares, workers=1)
    for setting, (images, syncs) in found.items():
        assert torch.equal(images, by_torchvision_decoder), setting
        assert syncs == 0, setting  # but for the copy back


def test_consumers_may_stop_early(folder: Path) -> None:
    batches = a_pipeline(folder, AUGMENTED).training(range(50), clean=False)
    next(batches)
    batches.close()


def on_the_device() -> list[tuple[dict[str, int], float]]:
    device = accelerator.simulate()
    planes = torch.from_numpy(images(64)).permute(0, 3, 1, 2)
    results = []
    for section in (TORCHVISION, TIMM, TIMM_RISING, BIG_VISION, TRIVIAL, JITTER):
        operations = drawn(section, range(64))
        given = planes.to(device)
        operate(given, operations)  # sends the mean and the deviation, once
        COUNTS.clear()
        found = operate(given, operations)
        counts = COUNTS.totals()
        error = found.cpu() - operate(planes, operations)
        results.append((counts, float(error.abs().mean())))
    return results


def test_a_device_gets_all_numbers_by_one_copy_and_nothing_waits() -> None:
    for counts, error in on_forked_workers(on_the_device, workers=1):
        assert (counts["transfers"], counts["syncs"], counts["pageable"]) == (1, 0, 0)
        assert counts["launches"] < 700  # of any number of images
        assert error < 1e-3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("{kind: rand_augmented}", "data.augment.kind: .*rand_augment"),
        ("{kind: rand_augment, set: tim}", "data.augment.set: .*timm"),
        ("{kind: rand_augment, magnitude: 31}", "data.augment.magnitude: .*30"),
        ("{kind: rand_augment, magnitude: 9.5}", "data.augment: magnitude .*10"),
        ("{kind: rand_augment, set: timm, magnitude: 12}", "data.augment: magnitude .*10"),
        ("{kind: rand_augment, set: big_vision, magnitude: 21}", "data.augment: magnitude .*20"),
        ("{kind: rand_augment, std: 0.5}", "data.augment: std .*timm"),
        ("{kind: rand_augment, operations: 0}", "data.augment.operations: "),
        ("{kind: rand_augment, probability: 1.5}", "data.augment.probability: "),
        ("{kind: color_jitter}", "data.augment: .*brightness"),
        ("{kind: color_jitter, hue: 0.6}", "data.augment.hue: .*0.5"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused(setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("digits_96", [f"data.augment={setting}"])
