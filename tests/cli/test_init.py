"""A recipe for a folder of one's own: it is complete, and every assumption is printed."""

import os
import re
import resource
import shlex
import signal
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from class_folders import write_classes
from PIL import Image
from safetensors.torch import load_file, save_file
from short_runs import NARROW, SHALLOW, SMALL

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.index import Index, load_or_read
from largebatch.lab.measure import initial
from largebatch.optional import require_timm
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs import pretrained
from largebatch.runs.pretrained import StartingModel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """24 and 6 images of three classes; the commands run in the home folder around."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_classes(tmp_path / "my data/train", side=12, cat=16, dog=4, yak=4)
    write_classes(tmp_path / "my data/val", side=12, cat=2, dog=2, yak=2)
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


@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_recipe_begins_with_weights_of_a_run_or_an_export(
    exported: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are of ten classes; images are normalised as there, the classifier is new."""
    short = (*SMALL, SHALLOW, NARROW, "duration={steps: 1}", "schedule.warmup=null", "polish=null")
    digits = run("digits_96", overrides=short, out="digits", report=False)
    place = "digits"
    if exported:
        assert main(["export", place, "--out", "exported"]) == DONE
        place = "exported/model.safetensors"
    words = ["init", str(folder), "--weights", place, "--name", "tuned", "--image-size", "10"]
    assert main(words) == DONE
    recipe, there = load_recipe(Path("tuned.yaml")), load_recipe(Path("digits/recipe.yaml"))
    assert (recipe.name, recipe.data.image_size) == ("tuned", 10)
    assert (recipe.data.mean, recipe.data.std) == (there.data.mean, there.data.std)
    assert recipe.model.arguments == there.model.arguments
    found = run(recipe, data=folder, max_steps=1, out="tuned", report=False)
    assert found.weights_sha256 != digits.weights_sha256


def test_weights_of_timm_are_loaded_once_and_prepare_the_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the cache of the Hugging Face hub, as it is after a download; no network is needed."""
    from huggingface_hub import constants

    timm, name = require_timm(), "resnet10t.c3_in1k"
    repository = folder.parent / "hub" / f"models--timm--{name}"
    snapshot = repository / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0")
    torch.manual_seed(3)
    state = timm.create_model(name, pretrained=False).state_dict()
    save_file(state, snapshot / "model.safetensors")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder.parent / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["init", str(folder), "--weights", f"timm:{name}"]) == DONE
    recipe = load_recipe(Path("my-data.yaml"))
    assert (recipe.model.name, recipe.model.weights) == (name, f"{name}.safetensors")
    assert recipe.data.mean == timm.get_pretrained_cfg(name).mean
    found = load_file(f"{name}.safetensors")
    assert all(value.equal(found[key]) for key, value in state.items())
    missing = "timm:resnet18.a1_in1k"
    assert main(["init", str(folder), "--weights", missing, "--name", "other"]) == USER
    assert missing in capsys.readouterr().err
    assert not Path("other.yaml").exists()


def test_few_photographs_begin_with_pretrained_weights_or_it_is_said_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network at first; then with a file that was copied to this folder."""
    from huggingface_hub import constants

    timm, name = require_timm(), "resnet10t.c3_in1k"
    write_classes(Path("few/train"), side=80, cat=6, dog=5)
    write_classes(Path("few/val"), side=80, cat=2, dog=2)
    monkeypatch.setattr(initial, "WEIGHTS", f"timm:{name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder.parent / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server has this port
    monkeypatch.setattr(pretrained, "PAUSE", 0)
    attempts: list[str] = []
    urlopen = urllib.request.urlopen

    def counted(address: str, timeout: float) -> object:
        attempts.append(address)
        return urlopen(address, timeout=timeout)

    monkeypatch.setattr(urllib.request, "urlopen", counted)
    assert main(["init", "few", "--name", "offline"]) == DONE
    printed = capsys.readouterr()
    assert attempts == [constants.ENDPOINT] * 3
    assert printed.err == ""
    downloads = [line for line in printed.out.splitlines() if "downloading" in line]
    assert len(downloads) == 1
    (command,) = re.findall(r'python -c "(.*)"', printed.out)
    assert load_recipe(Path("offline.yaml")).model.weights is None
    with monkeypatch.context() as elsewhere:
        create = timm.create_model
        elsewhere.setattr(timm, "create_model", lambda name, pretrained: create(name))
        exec(command)
    assert main(["init", "few", "--name", "online"]) == DONE
    assert "downloading" not in capsys.readouterr().out
    assert load_recipe(Path("online.yaml")).model.weights == f"{name}.safetensors"
    for number, words in enumerate((["--weights", "none"], ["--model", "resnet18"])):
        assert main(["init", "few", "--name", f"random-{number}", *words]) == DONE
        assert load_recipe(Path(f"random-{number}.yaml")).model.weights is None
    assert main(["init", str(folder)]) == DONE  # not photographs: 12 pixels
    assert load_recipe(Path("my-data.yaml")).model.weights is None
    assert len(attempts) == 3


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        pytest.param((97, 1, 2), "97 % of the training images are cat", id="of three classes"),
        pytest.param((4, 36, 0), "90 % of the training images are dog", id="of two classes"),
        pytest.param((30, 20, 10), None, id="uneven"),
        pytest.param((25, 10, 0), None, id="two uneven classes"),
    ],
)
def test_a_data_set_of_nearly_one_class_is_said(
    numbers: tuple[int, ...], said: str | None, folder: Path
) -> None:
    index = load_or_read(folder, "val")
    labels = np.repeat(np.arange(3), numbers)
    classes = index.classes[: len(np.unique(labels))]
    train = replace(index, labels=labels, classes=classes)
    lines = [line for line in initial.remarks(train, index, pretrained=True) if " % of" in line]
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines if said)


def test_minutes_choose_size_and_epochs_by_the_measured_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time of an update of 16 images, a second at 128 pixels, grows with the pixels."""
    write_classes(Path("large/train"), side=160, cat=20, dog=28)
    write_classes(Path("large/val"), side=160, cat=2, dog=2)

    def measured(recipe: Recipe, plan: Plan) -> SimpleNamespace:
        return SimpleNamespace(run_seconds=(recipe.data.image_size / 128) ** 2 * plan.updates)

    def survey_quickly(
        train: Index, val: Index, start: StartingModel, *, image_size: int | None
    ) -> initial.Survey:
        """Survey as on a machine that is not busy."""
        return replace(survey(train, val, start, image_size=image_size), seconds=0.001)

    survey = initial.survey
    monkeypatch.setattr(initial, "estimate", measured)
    monkeypatch.setattr(initial, "survey", survey_quickly)
    chosen = {}
    for minutes in ("3", "1", "0.4"):
        name = f"minutes-{minutes.replace('.', '-')}"
        assert (
            main(["init", "large", "--minutes", minutes, "--name", name, "--weights", "none"])
            == DONE
        )
        recipe = load_recipe(Path(f"{name}.yaml"))
        epochs = recipe.duration.epochs or 0
        chosen[minutes] = recipe.data.image_size, epochs
        assert recipe.data.eval_resize is not None
        assert (recipe.data.eval_resize - recipe.data.image_size) % 2 == 0
        total = epochs * 3 * (recipe.data.image_size / 128) ** 2
        assert 0.5 * 60 * float(minutes) < total < 60 * float(minutes)
    assert [size for size, _ in chosen.values()] == [128, 96, 64]
    assert main(["init", "large", "--minutes=0.01", "--name=none", "--weights=none"]) == USER
    assert "--minutes" in capsys.readouterr().err
    assert not Path("none.yaml").exists()


def test_what_is_wrong_with_the_photographs_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train/cat/new.BMP").write_bytes(b"x")
    assert main(["init", str(folder), "--name", "first"]) == DONE
    printed = capsys.readouterr().out
    for words in ("1 .bmp", "cat 16, dog 4, yak 4", "4 training images", "6 validation images"):
        assert words in printed
    for split in ("train", "val"):
        (folder / split / "empty").mkdir()
    assert main(["data", "index", str(folder)]) == USER
    assert main(["init", str(folder), "--name", "second"]) == USER
    assert "empty" in capsys.readouterr().err
    assert main(["data", "import", "imagefolder", str(folder), "--out", "shards"]) == DONE
    assert "empty" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["2024", "1e5", "null", "no"])
def test_a_folder_may_have_a_name_that_is_no_text_in_yaml(folder: Path, name: str) -> None:
    folder.rename(name)
    assert main(["init", name]) == DONE
    assert load_recipe(Path(f"{name}.yaml")).name == name


def test_a_recipe_is_not_called_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "import", "imagefolder", str(folder), "--out", "data"]) == DONE
    (command,) = re.findall("next: largebatch (.*)", capsys.readouterr().out)
    assert main(shlex.split(command)) == DONE
    assert Path("my-data.yaml").exists()
    Path("data").rename("my data/images")
    assert main(["init", "my data/images", "--image-size", "5000"]) == USER
    assert main(["init", "my data/images"]) == USER
    assert "my-data.yaml: exists" in capsys.readouterr().err
    Path("my data/images").rename("data")
    assert main(["init", "data"]) == DONE
    assert Path("own-data.yaml").exists()


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
    write_classes(tmp_path / "my data", side=12, **dict.fromkeys(names, 4))
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


def test_a_full_disk_leaves_nothing_that_blocks_the_next_try(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index is not stored, and half of a recipe is not left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        assert main(["init", str(folder)]) == USER
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "my-data.yaml" in capsys.readouterr().err
    assert not [path for path in folder.parent.rglob("*") if "my-data" in path.name]
    assert main(["init", str(folder)]) == DONE


def test_names_that_are_not_utf_8_are_read_or_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class may have such a name; a folder that a run records may not."""
    for split in ("train", "val"):
        (folder / split / "dog").rename(folder / split / os.fsdecode(b"d\xfeg"))
    assert main(["init", str(folder)]) == DONE
    assert main(["data", "show", "my-data.yaml", "--data", str(folder), "--out", "s.png"]) == DONE
    other = folder.rename(os.fsdecode(b"b\xffd"))
    words = ["my-data.yaml", "--set", "schedule.warmup=null", "--set", "polish=null"]
    assert main(["train", *words, "--data", str(other), "--out", "run"]) == USER
    assert "--data" in capsys.readouterr().err
    assert main(["train", *words, "--data", "my data", "--out", str(other / "run")]) == USER
    assert "--out" in capsys.readouterr().err
    Path("link").symlink_to(other)
    assert main(["train", *words, "--data", "link", "--out", "run", "--max-steps", "1"]) == DONE
