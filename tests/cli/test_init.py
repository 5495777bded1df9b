"""A recipe for a folder of one's own: it is complete, and every assumption is printed."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from class_folders import write_folder
from importing import png
from PIL import Image

from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.index import Index, load_or_read
from largebatch.lab.measure import initial
from largebatch.recipe.loading import load_recipe


def write_classes(root: Path, *, side: int = 12, **numbers: int) -> Path:
    """Write some images into each class folder."""
    for name, number in numbers.items():
        (root / name).mkdir(parents=True)
        for image in range(number):
            (root / name / f"{image:03d}.png").write_bytes(png(image, side=side))
    return root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """24 and 6 images of three classes; the commands run in the folder around."""
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "my data/train", cat=16, dog=4, yak=4)
    write_classes(tmp_path / "my data/val", cat=2, dog=2, yak=2)
    return Path("my data")


def test_the_recipe_is_complete_and_trains(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder)]) == DONE
    printed = capsys.readouterr().out
    assert main(["check", "my-data.yaml"]) == DONE
    (command,) = (line for line in printed.splitlines() if line.startswith("train it: "))
    words = shlex.split(command.removeprefix("train it: "))
    assert words[:2] == ["largebatch", "train"]
    short = ["duration={epochs: 2}", "schedule.warmup={steps: 1}", "polish.clean={steps: 1}"]
    assert main([*words[1:], *(word for each in short for word in ("--set", each))]) == DONE
    assert (Path("runs/my-data") / "summary.json").exists()


@pytest.mark.parametrize("name", ["2024", "1e5", "null", "no"])
def test_a_folder_may_have_a_name_that_is_no_text_in_yaml(folder: Path, name: str) -> None:
    folder.rename(name)
    assert main(["init", name]) == DONE
    assert load_recipe(Path(f"{name}.yaml")).name == name


def test_what_was_counted_is_printed_and_each_assumption_is_a_comment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train/cat/a.gif").touch()
    assert main(["init", str(folder), "--out", "mine.yaml"]) == DONE
    printed = capsys.readouterr().out
    for line in (
        "3 classes, 24 training and 6 validation images, 1 other files ignored",
        "  cat  16 + 2\n  dog  4 + 2\n  yak  4 + 2\n",
        "dog has 4 training images, cat 16",
        "recipe: mine.yaml",
        "largebatch data show mine.yaml --data 'my data'",
    ):
        assert line in printed, line
    assert "# the smallest: too few images for 16 updates" in Path("mine.yaml").read_text()
    recipe = load_recipe(Path("mine.yaml"))
    assert (recipe.data.classes, recipe.data.train_samples, recipe.data.val_samples) == (3, 24, 6)


def test_mean_and_deviation_are_those_of_the_pixels(folder: Path) -> None:
    found = initial.survey(*(load_or_read(folder, split) for split in ("train", "val")))
    images = [np.asarray(Image.open(path)) / 255 for path in folder.glob("train/*/*.png")]
    pixels = np.concatenate([image.reshape(-1, 3) for image in images])
    assert found.mean == pytest.approx(pixels.mean(0), abs=6e-4)
    assert found.std == pytest.approx(pixels.std(0), abs=6e-4)


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (("cat", "dog"), "--val-fraction 0.1"),
        (("train/cat", "train/dog"), "--val-fraction 0.1"),
        (("train/cat", "train/dog", "test/cat", "test/dog"), "--val-name test"),
    ],
)
def test_without_validation_the_command_that_makes_it_is_given(
    names: tuple[str, ...],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "my data", **dict.fromkeys(names, 4))
    assert main(["init", "my data"]) == USER
    shown = capsys.readouterr().err
    assert option in shown
    first, second = shown.partition(" with: ")[2].split(" && ")
    for command in (first, second):
        program, *words = shlex.split(command)
        assert program == "largebatch"
        assert main(words) == DONE
    assert load_recipe(Path("my-data-shards.yaml")).data.classes == 2


def test_what_cannot_be_used_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my-data.yaml").write_text("mine")
    for words, name in (
        (str(folder), "my-data.yaml"),
        (str(folder / "train" / "cat"), "cat"),
        (str(tmp_path / "nowhere"), "nowhere"),
    ):
        assert main(["init", words]) == USER
        assert name in capsys.readouterr().err
    assert Path("my-data.yaml").read_text() == "mine"


def sized(*sizes: tuple[int, int]) -> Index:
    heights, widths = np.array(sizes).T
    return Index(
        root=Path(), classes=(), paths=(), labels=heights * 0, heights=heights, widths=widths
    )


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (sized((28, 28), (28, 28)), (28, None)),
        (sized((32, 40), (48, 32)), (32, 32)),
        (sized((2, 2)), (8, None)),
        (sized((90, 100)), (64, 73)),
        (sized((224, 224)), (128, 146)),
        (sized((375, 500), (500, 375), (20, 20)), (224, 256)),
    ],
)
def test_the_size_follows_from_the_short_sides(
    index: Index, expected: tuple[int, int | None]
) -> None:
    assert initial.image_sizes(index) == expected


@pytest.mark.parametrize(
    ("number", "expected"), [(3, 2), (16, 16), (511, 16), (512, 32), (2500, 128), (10**6, 256)]
)
def test_the_batch_leaves_updates_in_an_epoch(number: int, expected: int) -> None:
    assert initial.global_batch_for(number) == expected


def test_every_suggestion_for_the_tests_images_is_a_recipe(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "data", split)
    assert main(["init", str(tmp_path / "data"), "--out", str(tmp_path / "x.yaml")]) == DONE
    text = (tmp_path / "x.yaml").read_text()
    columns = {line.index("# ") for line in text.splitlines() if "# " in line and line[0] != "#"}
    assert len(columns) == 1
