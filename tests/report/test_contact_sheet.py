from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from real_subsets import SAMPLES, write_subset

from largebatch.cli.main import DONE, main
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.report.contact_sheet import denormalized, draw_sheet, show, write_sheet

Pixels = npt.NDArray[np.uint8]

RECIPES = Path(__file__).parents[2] / "recipes"
SIDE, CLASSES, EACH = 20, 3, 4
PASSES = 6


def recipe(*changes: str) -> Recipe:
    """The digits recipe for the folder below, its images shown at their own size when clean."""
    always = (
        *("data.source=folder", f"data.classes={CLASSES}", f"data.image_size={SIDE}"),
        *(f"data.train_samples={CLASSES * EACH}", f"data.val_samples={2 * CLASSES}"),
        *("data.crop_area=[0.5,1.0]", "data.flip=true", "batch.global_batch=6", "batch.bn_span=6"),
        *("duration.epochs=10", "schedule.warmup.epochs=1", "polish.clean.epochs=2"),
        "polish.statistics.samples=12",
    )
    return load_recipe(RECIPES / "quickstart" / "digits_96.yaml", [*always, *changes])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise, so that each is found again wherever it is shown."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split, number in (("train", EACH), ("val", 2)):
        for label in range(CLASSES):
            (root / split / f"class-{label}").mkdir(parents=True)
            for k in range(number):
                pixels = random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / f"class-{label}" / f"{k}.png")
    return root


def opened(chosen: Recipe, folder: Path) -> Pipeline:
    plan = make_plan(chosen, workers=1)
    return open_images(chosen, plan, Serial(torch.device("cpu")), folder=folder)


def files(folder: Path, split: str, name: str) -> list[Pixels]:
    return [np.asarray(Image.open(path)) for path in sorted((folder / split / name).iterdir())]


def test_training_shows_what_the_runs_batches_hold_pass_by_pass(folder: Path) -> None:
    pipeline = opened(recipe(), folder)
    shown = show(pipeline)
    batches = list(pipeline.training(range(2 * PASSES), clean=False))
    images = torch.cat([batch.images for batch in batches]).unflatten(0, (PASSES, -1))
    labels = torch.cat([batch.labels for batch in batches]).unflatten(0, (PASSES, -1))
    assert shown.classes == ("class-0", "class-1", "class-2")
    for label, row in enumerate(shown.training):
        assert len(row) == PASSES
        for k, image in enumerate(row):
            same = (images[k] == image).all(dim=(1, 2, 3))
            assert labels[k][same].tolist() == [label]


def test_clean_and_evaluation_show_the_files_to_the_last_bit(folder: Path) -> None:
    chosen = recipe()
    shown = show(opened(chosen, folder))
    for name, clean, evaluation in zip(shown.classes, shown.clean, shown.evaluation, strict=True):
        train, val = files(folder, "train", name), files(folder, "val", name)
        (once,) = (denormalized(image, chosen.data) for image in clean)
        assert sum(np.array_equal(once, file) for file in train) == 1
        checks = [denormalized(image, chosen.data) for image in evaluation]
        assert np.array_equal(checks, val)


def test_a_row_shows_one_image_in_training_and_clean(folder: Path) -> None:
    """Without crops and flips training shows it as it is, in every pass."""
    shown = show(opened(recipe("data.crop_area=null", "data.flip=false"), folder))
    for row, (clean,) in zip(shown.training, shown.clean, strict=True):
        assert all(torch.equal(image, clean) for image in row)


def test_the_sheet_has_every_image_once_in_its_row_and_the_values_that_the_model_gets(
    folder: Path,
) -> None:
    """Evaluation's mean and deviation by NumPy, from the files."""
    chosen = recipe("data.mean=[0.1,0.2,0.3]", "data.std=[0.5,0.4,0.3]")
    shown, figure = show(opened(chosen, folder)), Figure()
    draw_sheet(figure, shown, chosen.data)
    for axes, rows in zip(
        figure.axes, (shown.training, shown.clean, shown.evaluation), strict=True
    ):
        drawn = {tuple(image.get_extent()): image.get_array() for image in axes.images}
        assert len(drawn) == sum(map(len, rows))
        for row, images in enumerate(rows):
            for column, image in enumerate(images):
                tile = drawn[column, column + 0.95, row + 0.95, row]
                assert np.array_equal(np.asarray(tile), denormalized(image, chosen.data))
    pixels = np.stack([files(folder, "val", f"class-{label}") for label in range(CLASSES)]) / 255
    values = (pixels - [0.1, 0.2, 0.3]) / [0.5, 0.4, 0.3]
    assert f"evaluation {values.mean():.2f} ± {values.std():.2f}" in figure.get_supxlabel()


def test_a_mixed_image_has_the_classes_and_shares_of_its_label(folder: Path) -> None:
    """Against the labels of the run's batches, three decimals apart."""
    chosen = recipe("data.mix={mixup: 1.0, cutmix: 1.0}")
    pipeline = opened(chosen, folder)
    shown = show(pipeline)
    batches = list(pipeline.training(range(2 * PASSES), clean=False))
    labels = torch.cat([batch.labels for batch in batches])
    images = torch.cat([batch.images for batch in batches])
    captions = [row for captions in shown.captions for row in captions]
    for image, caption in zip((i for row in shown.training for i in row), captions, strict=True):
        (place,) = torch.nonzero((images == image).all(dim=(1, 2, 3)))[0].tolist()
        written = np.zeros(CLASSES)
        for word in filter(None, " ".join(caption.label).replace("\u00a0", " ").split(" + ")):
            name, share = word.split()  # both may be of one class
            written[int(name.removeprefix("class-"))] += float(share)
        if caption.label:
            assert written == pytest.approx(labels[place].numpy(), abs=0.0051)
        else:
            assert labels[place].max() == 1
    assert sum(bool(caption.label) for caption in captions) > len(captions) // 2
    figure = Figure()
    draw_sheet(figure, shown, chosen.data)
    lines = [line for caption in captions for line in (*caption.label, *caption.changes)]
    assert [text.get_text() for text in figure.axes[0].texts] == lines


def test_an_erased_image_says_how_much_of_it_is_erased(folder: Path) -> None:
    """Pixels of the mean colour, which no image of noise has, are counted."""
    chosen = recipe("data.erase={probability: 0.5, fill: constant, count: 2}")
    shown = show(opened(chosen, folder))
    for images, captions in zip(shown.training, shown.captions, strict=True):
        for image, caption in zip(images, captions, strict=True):
            erased = float((image == 0).all(dim=0).double().mean())
            expected = (f"erased {100 * erased:.0f} %",) if erased else ()
            assert tuple(line.replace("\u00a0", " ") for line in caption.changes) == expected
            assert caption.label == ()
    assert len({caption.changes for row in shown.captions for caption in row}) > 3


def test_repeats_show_the_copies_of_the_same_image() -> None:
    """Not augmented otherwise, they are the clean image."""
    chosen = load_recipe("digits_96", ["data.repeats=3", "data.crop_area=null"])
    pipeline = open_images(chosen, make_plan(chosen), Serial(), folder=None)
    shown = show(pipeline)
    for row, (clean,) in zip(shown.training, shown.clean, strict=True):
        assert len(row) == PASSES
        assert all(torch.equal(image, clean) for image in row)


def test_the_command_writes_the_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "digits.png"
    words = ["data", "show", str(RECIPES / "quickstart" / "digits_96.yaml"), "--out", str(path)]
    assert main([*words, "--set", "data.flip=true"]) == DONE
    assert capsys.readouterr().out == f"sheet: {path}\n"
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        assert sheet.height > 10 * 112


@pytest.mark.parametrize("out", ["sheet.jpg", "/proc/no/x.png"])
def test_a_sheet_that_cannot_be_written_is_refused(out: str) -> None:
    with pytest.raises(LargebatchError, match=out):
        write_sheet(Path(out), load_recipe("digits_96"), folder=None)


def test_cifar10_is_shown_as_it_is(tmp_path: Path, real_data: Path, own_cache: None) -> None:
    """Real images through the recipe's cache: clean and evaluation are the files' pixels."""
    root = write_subset(real_data / "cifar10", tmp_path / "cifar10")
    chosen = load_recipe(RECIPES / "cifar10" / "cifar10_resnet8_128.yaml", SAMPLES)
    plan = make_plan(chosen, workers=1)
    shown = show(open_images(chosen, plan, Serial(), folder=root))
    assert shown.classes == tuple(sorted((real_data / "cifar10/classes.txt").read_text().split()))
    for name, (clean,), evaluation in zip(
        shown.classes, shown.clean, shown.evaluation, strict=True
    ):
        image = denormalized(clean, chosen.data)
        assert sum(np.array_equal(image, file) for file in files(root, "train", name)) == 1
        for check, file in zip(evaluation, files(root, "val", name), strict=False):
            assert np.array_equal(denormalized(check, chosen.data), file)
