"""The way of photographs: a recipe, a run that is stopped and resumed, and predictions."""

import codecs
import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from class_folders import write_image
from PIL import Image
from torch import Tensor

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import DataError
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.checkpoints import evaluate_checkpoint, find_checkpoint
from largebatch.runs.options import Options
from largebatch.runs.predict import predict
from largebatch.training.checkpoint import write_checkpoint

ROTATED = 6
"""EXIF's orientation of a photograph that was taken upright."""


def write_photos(folder: Path, *, seed: int, number: int) -> None:
    """Write JPEGs and WebPs of two classes, of all shapes, some of them rotated."""
    random = np.random.default_rng(seed)
    exif = Image.Exif()
    exif[274] = ROTATED
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for row in range(number):
            height, width = random.integers(20, 40, 2)
            noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            photo = Image.fromarray(noise)
            kind = "webp" if row % 4 == 2 else "jpg"
            photo.save(folder / name / f"{row}.{kind}", exif=exif if row % 3 == 0 else b"")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images in `data` and a run in `run`, that was stopped and resumed."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder / "data/train", seed=1, number=16)
    write_photos(folder / "data/val", seed=2, number=5)
    recipe, run = str(folder / "mine.yaml"), str(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["init", "data", "--out", recipe, "--model", "cifar_resnet8"]) == DONE
        short = ("duration={epochs: 2}", "schedule.warmup={steps: 1}", "polish.clean={steps: 1}")
        changes = [word for change in short for word in ("--set", change)]
        words = ["train", recipe, *changes, "--data", "data", "--out", run, "--timeout", "77"]
        assert main([*words, "--max-steps", "1"]) == DONE
    return folder


def test_a_run_is_resumed_and_evaluated_with_what_it_remembers(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the folder of the images nor the recipe is given again, from another folder."""
    assert main(["resume", str(photos / "run"), "--time-limit", "10m"]) == DONE
    summary = json.loads((photos / "run/summary.json").read_text())
    assert (summary["status"], summary["recipe"]) == ("finished", "mine")
    options = json.loads((photos / "run/options.json").read_text())
    assert (options["data"], options["timeout"]) == (str(photos / "data"), 77.0)
    assert (options["max_steps"], options["time_limit"]) == (None, 600.0)
    capsys.readouterr()
    assert main(["evaluate", str(photos / "run")]) == DONE
    assert f"top-1 {summary['top1']:.2%}" in capsys.readouterr().out
    assert main(["resume", str(photos / "data")]) == USER
    assert str(photos / "data") in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["memory", "none", "null"])
def test_predictions_are_those_of_the_evaluation(
    cache: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores: list[Tensor] = []
    options = Options(data=photos / "data", overrides=(f"execution.cache={cache}",))
    run, checkpoint = find_checkpoint(photos / "run")
    evaluate_checkpoint(run, options, each=lambda logits, _: scores.append(logits))
    expected = torch.cat(scores).softmax(1)
    other = parse_recipe(dump_yaml(checkpoint.recipe), options.overrides, source="the same")
    run = write_checkpoint(tmp_path, replace(checkpoint, recipe=other))
    found = predict(run, [photos / "data/val"])
    assert [str(path.relative_to(photos / "data/val")) for path in found.paths] == [
        f"{name}/{file}"
        for name in ("cat", "dog")
        for file in ("0.jpg", "1.jpg", "2.webp", "3.jpg", "4.jpg")
    ]
    torch.testing.assert_close(found.probabilities, expected, rtol=0, atol=0)
    out = tmp_path / "classes.csv"
    words = ["predict", str(run), str(photos / "data/val"), "--out", str(out)]
    assert main([*words, "--top", "1"]) == DONE
    assert capsys.readouterr().out == f"10 images: {out}\n"
    assert out.read_bytes().startswith(codecs.BOM_UTF8)  # spreadsheets need it
    written = out.read_text(encoding="utf-8-sig")
    assert main([*words[:-2], "--top", "1"]) == DONE
    assert capsys.readouterr().out == written
    rows = list(csv.DictReader(io.StringIO(written)))
    best = expected.max(1)
    assert [row["class_1"] for row in rows] == [("cat", "dog")[label] for label in best.indices]
    values = [float(row["probability_1"]) for row in rows]
    assert values == pytest.approx(best.values.tolist(), abs=5e-5)


def test_images_that_cannot_be_read_are_named_and_the_others_predicted(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged in its header, in the middle, and missing; of another format in a folder."""
    good = photos / "data/val/dog/1.jpg"
    broken = tmp_path / "folder/broken.png"
    write_image(broken, height=40, width=40)
    content = bytearray(broken.read_bytes())
    content[45:60] = bytes(15)
    broken.write_bytes(content)
    (tmp_path / "folder/text.jpg").write_text("no image")
    (tmp_path / "folder/new.bmp").write_bytes(b"x")
    run, places = str(photos / "run"), [tmp_path / "folder", tmp_path / "nowhere.jpg"]
    assert main(["predict", run, *map(str, places), str(good)]) == USER
    printed = capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO(printed.out))
    expected = predict(photos / "run", [good])
    assert row["image"] == str(good)
    assert float(row["probability_1"]) == pytest.approx(
        float(expected.probabilities.max()), abs=5e-5
    )
    for name in ("broken.png", "text.jpg", "nowhere.jpg", "3 images of 4", ".bmp"):
        assert name in printed.err
    with pytest.raises(DataError, match=r"broken\.png"):
        predict(photos / "run", places)
    assert main(["predict", run]) == USER
