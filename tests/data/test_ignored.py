"""Ignored files among images are counted by kind and named."""

import json
import shutil
from pathlib import Path

import pytest
from class_folders import fields, write_folder, write_image
from PIL import Image
from short_runs import a_recipe

from largebatch import run
from largebatch.cli.main import DONE, main
from largebatch.data.index.folder import MISPLACED
from largebatch.data.index.index import index_of, load_or_read, make
from largebatch.tracking.events import LOG


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_folder(tmp_path / "data", split)
    return tmp_path / "data"


def add_others(root: Path) -> None:
    """Add ignored files: other formats, loose files, subfolders of a class, hidden files."""
    for number in range(4):
        Image.new("RGB", (4, 4)).save(root / f"train/cat/{number}.gif")
    (root / "train/dog/phone.HEIC").write_bytes(b"heic")
    (root / "train/dog/README").touch()
    write_image(root / "train/loose.png")
    write_image(root / "train/dog/more/deep/x.png")
    write_image(root / "train/dog/more/y.png")
    (root / "train/dog/.DS_Store").touch()
    write_image(root / "train/dog/more/.thumbnails/y.png")


def test_ignored_files_are_counted_and_change_neither_the_images_nor_the_digest(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fields(index_of(make(root, "train"), root))
    add_others(root)
    assert fields(load_or_read(root, "train")) == before
    content = make(root, "train")
    assert fields(index_of(content, root))["paths"] == before["paths"]
    kinds = {".gif": 4, MISPLACED: 3, ".heic": 1, "without a suffix": 1}
    assert content.header["ignored"] == kinds
    assert main(["data", "index", str(root)]) == DONE
    assert f"train: ignored files: 4 .gif, 3 {MISPLACED}, 1 .heic" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["@eaDir", ".Trash-1000"])
def test_folders_of_the_system_are_not_a_class_and_their_copies_not_images(
    name: str, root: Path
) -> None:
    """Storage systems write thumbnails and deleted files among a user's photographs."""
    before = fields(index_of(make(root, "train"), root))
    for place in (name, f"{name}/cat", f"cat/{name}", f"dog/more/{name}/deep"):
        (root / "train" / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "train/cat/x.jpg", root / "train" / place / "copy.jpg")
    content = make(root, "train")
    assert fields(index_of(content, root))["paths"] == before["paths"]
    assert content.header["ignored"] == {}


def test_a_run_logs_ignored_files_at_its_start(root: Path, tmp_path: Path) -> None:
    add_others(root)
    changes = [
        *("data.source=folder", "data.classes=3", "data.train_samples=4", "polish=null"),
        *("data.val_samples=4", "batch.global_batch=4", "batch.bn_span=null", "model.name=lenet5"),
        *("model.arguments={}", "duration={steps: 1}", "schedule.warmup=null"),
    ]
    run(a_recipe(changes=tuple(changes)), out=tmp_path / "run", data=root, max_steps=1)
    lines = (tmp_path / "run" / LOG).read_text("utf-8").splitlines()
    (note,) = (each["text"] for each in map(json.loads, lines) if each["event"] == "note")
    assert note.startswith("train: ignored files: 4 .gif, ")
