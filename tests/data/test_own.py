"""A user's data set: its items in the recipe's order, boxes and flips."""

import sys
from pathlib import Path

import numpy as np
import pytest
from class_folders import png
from PIL import Image
from short_runs import a_recipe

from largebatch import run
from largebatch.cli.main import main
from largebatch.data.datasets.own import Items
from largebatch.errors import CheckpointError, DataError
from largebatch.recipe.recipe import Recipe

FOLDER = """
from pathlib import Path
from PIL import Image
from torchvision.datasets import ImageFolder

ROOT = Path(__file__).parent / "data"

def make():
    return ImageFolder(ROOT / "train"), ImageFolder(ROOT / "val")

def shrinking():
    train, val = make()
    first = []
    train.transform = lambda image: image if not first and not first.append(0) else (
        image.resize((5, 5)))
    return train, val
"""

BAD = """
import torch

class Items:
    def __init__(self, *items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, number):
        return self.items[number]

good = torch.zeros(3, 8, 8, dtype=torch.uint8), 0
def pair(*items):
    return lambda: (Items(*items), Items(good))

floats = pair(good, (torch.zeros(3, 8, 8), 0))
alone = pair(good, good[0])
words = pair(good, (good[0], "cat"))
shares = pair(good, (good[0], torch.tensor([0.3, 0.7])))
label = pair(good, (good[0], 2))
empty = pair()
stream = lambda: (iter([good]), iter([good]))
"""


def recipe(*changes: str) -> Recipe:
    return a_recipe(
        changes=(
            *("data.source=folder", "data.classes=2", "data.train_samples=14"),
            *("data.val_samples=6", "batch.global_batch=8", "batch.bn_span=4", "data.flip=true"),
            *("execution.cache=none", "polish=null", "evaluation.every_epochs=1"),
            *("data.mix={mixup: 0.4, cutmix: 1}", *changes),
        )
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images of several sizes and a module that opens them, where commands run."""
    for split, number in (("train", 14), ("val", 6)):
        for image in range(number):
            path = tmp_path / f"data/{split}/{'ab'[image % 2]}/{image:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(image, side=16 + image))
    (tmp_path / "own_folder.py").write_text(FOLDER)
    (tmp_path / "own_bad.py").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_folder", "own_bad", "own_grey", "own_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_users_data_set_trains_like_its_folder_and_is_resumed_and_evaluated(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Order, boxes, flips and pixels are the same, bit by bit."""
    expected = run(recipe(), data=place / "data", out=place / "folder", report=False)
    found = run(recipe(), dataset="own_folder:make", out=place / "own", report=False)
    assert (found.loss, found.top1, found.steps) == (expected.loss, expected.top1, 8)
    losses = [(stage.loss, stage.top1) for stage in found.stages]
    assert losses == [(stage.loss, stage.top1) for stage in expected.stages]
    run(recipe(), dataset="own_folder:make", out=place / "parts", max_steps=3, report=False)
    resumed = run(
        recipe(), dataset="own_folder:make", out=place / "parts", resume=True, report=False
    )
    assert resumed.loss == found.loss
    assert main(["evaluate", "parts", "--dataset", "own_folder:make"]) == 0
    assert f"top-1 {found.top1:.2%}" in capsys.readouterr().out
    (place / "data/train/a/00.png").write_bytes(png(0, side=9))
    with pytest.raises(CheckpointError, match=r"data\.index\.train\.digest"):
        run(recipe(), dataset="own_folder:make", out=place / "parts", resume=True)


REFUSED = {
    "floats": "item 1: its image is a tensor of torch.float32",
    "alone": "item 1: ",
    "words": "item 1: 'str' object cannot be interpreted as an integer",
    "shares": "data.mix",
    "label": "item 1: its label is 2, expected 0 to 1",
    "empty": "train of own_bad:empty: the data set is empty",
    "stream": "own_bad:stream: expected it to return two data sets",
    "missing": "own_bad:missing: there is no such function",
}


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_an_invalid_data_set_is_refused(place: Path, name: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        run(recipe(), dataset=f"own_bad:{name}", out=place / "out")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "change",
    ["data.source=digits", "execution.cache=memory"],
)
def test_a_setting_that_would_not_be_used_is_refused(place: Path, change: str) -> None:
    key = change.replace("=", ": ")
    with pytest.raises(DataError, match=key):
        run(recipe(change), dataset="own_folder:make", out=place / "out")


RAMP = np.arange(0, 256, 15, dtype=np.uint8)[None]  # 0 .. 255
DEEP = RAMP.astype(np.uint16) * 257

DEEPER = {
    "I;16": DEEP,
    "I;16B": DEEP.astype(">u2"),
    "I": DEEP.astype(np.int32),
    "F": RAMP.astype(np.float32) / 255,
}


@pytest.mark.parametrize("mode", [*DEEPER, "LAB", "YCbCr", "HSV", "PA", "RGBa"])
def test_other_pixels_than_8_bits_a_channel_are_refused_as_in_folders(mode: str) -> None:
    """Pillow would cut them off at 0 and 255: a ramp of 16 bits becomes white."""
    image = Image.fromarray(DEEPER[mode]) if mode in DEEPER else Image.new(mode, (4, 4))
    assert image.mode == mode
    with pytest.raises(DataError, match=f"item 0.* {mode}"):
        Items("train", [(image, 0)]).read(0)


def test_an_item_that_changes_is_named(place: Path) -> None:
    with pytest.raises(DataError, match=r"own_folder:shrinking, item \d+"):
        run(recipe(), dataset="own_folder:shrinking", out=place / "out")
