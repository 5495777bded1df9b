"""A recipe for a folder of one's own: it is complete, and every assumption is printed."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from importing import png
from PIL import Image

from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.index import load_or_read
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


def test_mean_and_deviation_are_those_of_the_pixels(folder: Path) -> None:
    found = initial.survey(load_or_read(folder, "train"), load_or_read(folder, "val"))
    images = [np.asarray(Image.open(path)) / 255 for path in folder.glob("train/*/*.png")]
    pixels = np.concatenate([image.reshape(-1, 3) for image in images])
    assert found.mean == pytest.approx(pixels.mean(0), abs=6e-4)
    assert found.std == pytest.approx(pixels.std(0), abs=6e-4)


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (("cat", "dog"), ["--val-fraction", "0.1"]),
        (("train/cat", "train/dog"), ["--val-fraction", "0.1"]),
        (("train/cat", "train/dog", "test/cat", "test/dog"), ["--val-name", "test"]),
    ],
)
def test_without_validation_the_option_that_makes_it_is_named(
    names: tuple[str, ...],
    option: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "my data", **dict.fromkeys(names, 4))
    assert main(["init", "my data"]) == USER
    assert option[0] in capsys.readouterr().err
    assert main(["data", "import", "imagefolder", "my data", *option, "--out", "shards"]) == DONE
    assert main(["init", "shards"]) == DONE
    assert load_recipe(Path("shards.yaml")).data.classes == 2


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
