"""Ignored files among images are counted by kind and named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tars
from class_folders import fields, write_folder, write_image
from importing import imported, png
from PIL import Image
from short_runs import a_recipe

from largebatch import run
from largebatch.cli.main import DONE, main
from largebatch.data.datasets import import_data
from largebatch.data.index.folder import NESTED, SYSTEMS, list_ignored
from largebatch.data.index.index import index_of, load_or_read, make, read_folder, refresh
from largebatch.tracking.events import LOG

READ = ".bmp .jfif .jpe .jpeg .jpg .pgm .png .ppm .tif .tiff .webp"


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


def test_ignored_files_are_counted_by_kind_and_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_others(root)
    assert main(["data", "index", str(root)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:7] == [
        f"train: 9 files ignored (read are {READ}):",
        "  4 .gif: train/cat/0.gif, train/cat/1.gif, train/cat/2.gif, ...",
        f"  2 {NESTED}: train/dog/more/deep/x.png, train/dog/more/y.png",
        "  1 .heic: train/dog/phone.HEIC",
        "  1 beside the class folders or shards: train/loose.png",
        "  1 without a suffix: train/dog/README",
    ]
    assert lines[-1].endswith("4 training and 4 validation images, 9 other files ignored")


def test_ignored_files_change_neither_the_images_nor_the_digest(root: Path) -> None:
    before = fields(index_of(make(root, "train"), root))
    add_others(root)
    assert fields(load_or_read(root, "train")) == before
    content = refresh(root, "train", drop_bad=False, progress=lambda _done, _total: None)
    assert content.ignored
    assert fields(index_of(content, root)) == before
    assert fields(load_or_read(root, "train")) == before


def test_files_beside_shards_are_counted(root: Path, tmp_path: Path) -> None:
    shards = imported(root, tmp_path / "shards")
    (shards / "train/000000.idx").touch()
    assert [tuple(each) for each in list_ignored(shards, "train")] == [
        ("beside the class folders or shards", 1, ["train/000000.idx"])
    ]


@pytest.mark.parametrize("above", ["", "train"])
def test_an_import_names_folders_that_become_no_class(
    above: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "train/phone/new").mkdir(parents=True)
    (root / "train/phone/new/1.heic").touch()
    (root / "train/notes.txt").touch()
    (root / "train/cat/notes.txt").touch()
    for name in ("Zebra", "cat", "dog"):
        write_image(root / f"train/{name}/second.png")
    shutil.rmtree(root / "val")
    source = root if above else root / "train"
    words = ["data", "import", "imagefolder", str(source), "--out", str(tmp_path / "out")]
    assert main([*words, "--val-fraction", "0.5"]) == DONE
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not a class" in line)
    named = f"{above}/phone".lstrip("/")
    assert line == f"{source}: not a class, because it has no readable image: {named}"


SYSTEM = (
    *("@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found", "System Volume Information"),
    *("@Recycle", "@tmp", "__MACOSX", "#snapshot", "Network Trash Folder", ".Trash-1000"),
)


def add_copies(root: Path, name: str) -> list[str]:
    """Add a copy of an image at every depth in folders of this name; return their paths."""
    places = (name, f"{name}/cat", f"cat/{name}", f"cat/{name}/x.jpg", f"dog/more/{name}/deep")
    for place in places:
        (root / "train" / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(root / "train/cat/x.jpg", root / "train" / place / "copy.jpg")
    return sorted(f"train/{place}/copy.jpg" for place in places)


@pytest.mark.parametrize("name", SYSTEM)
def test_folders_of_the_system_are_no_class_and_their_copies_no_images(
    name: str, root: Path
) -> None:
    """Storage systems write thumbnails and deleted files among a user's photographs."""
    before = fields(index_of(make(root, "train"), root))
    added = add_copies(root, name)
    content = refresh(root, "train", drop_bad=False, progress=lambda *_: None)
    assert fields(index_of(content, root))["paths"] == before["paths"]
    counted = {} if name.startswith(".") else {SYSTEMS: (5, added[:3])}
    assert {kind: (number, names) for kind, number, names in content.ignored} == counted


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param("folder", "@eaDir", id="folder"),
        pytest.param("one split", "#recycle", id="one split"),
        pytest.param("zip", "__MACOSX", id="zip"),
        pytest.param("tar", "lost+found", id="tar"),
    ],
)
def test_an_import_leaves_folders_of_the_system_out_and_says_so(
    form: str, name: str, root: Path, tmp_path: Path
) -> None:
    add_copies(root, name)
    for number in range(2):
        for class_name in ("cat", "dog", "Zebra"):
            write_image(root / f"train/{class_name}/{number}.png", width=3 + number)
    (root / name).mkdir()
    (root / f"train/empty/{name}").mkdir(parents=True)
    shutil.copy(root / "train/cat/x.jpg", root / f"train/empty/{name}/copy.jpg")
    source, options = root, dict[str, object]()
    if form == "one split":
        source, options = root / "train", {"val_fraction": 0.3}
    elif form != "folder":
        source = Path(shutil.make_archive(str(tmp_path / "all"), form, tmp_path, "data"))
    remarks = import_data(
        *("imagefolder", source, tmp_path / "out"),
        shard_bytes=10**6,
        progress=lambda *_: None,
        options=options,
    )
    assert f"6 {SYSTEMS}" in "".join(remarks)
    assert (f"{root}: not imported: {name}" in remarks) == (form == "folder")
    if form == "one split":
        assert remarks[2].endswith("not a class, because it has no readable image: empty")
    splits = [read_folder(tmp_path / "out", split) for split in ("train", "val")]
    assert splits[0].classes == ("Zebra", "cat", "dog")
    assert sum(map(len, splits)) == (10 if form == "one split" else 14)


def test_a_deleted_sample_of_a_shard_is_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "train").mkdir()
    samples = [
        tars.member(f"./{folder}/0.{end}", content)
        for folder in ("a", "#recycle", "b/@eaDir")
        for end, content in (("png", png(0)), ("cls", b"0"))
    ]
    tars.write(tmp_path / "train/0.tar", *samples)
    content = make(tmp_path, "train", drop_bad=True)
    assert len(content.arrays["labels"]) == 1
    bad = [path.removeprefix("train/0.tar/./") for path, *_ in content.bad]
    assert bad == ["#recycle/0", "b/@eaDir/0"]


def one_step(root: Path, out: Path) -> list[dict[str, Any]]:
    """Train one update on the folder and return the records of the run."""
    recipe = a_recipe(
        changes=(
            *("data.source=folder", "data.classes=3", "data.train_samples=4", "polish=null"),
            *(
                "data.val_samples=4",
                "batch.global_batch=4",
                "batch.bn_span=null",
                "model.name=lenet5",
            ),
            *("model.arguments={}", "duration={steps: 1}", "schedule.warmup=null"),
        )
    )
    run(recipe, out=out, data=root, max_steps=1)
    return [json.loads(line) for line in (out / LOG).read_text("utf-8").splitlines()]


def test_a_run_logs_ignored_files_at_its_start(root: Path, tmp_path: Path) -> None:
    add_others(root)
    (root / "train/loose.png").rename(root / "train/loose.txt")
    records = one_step(root, tmp_path / "run")
    (note,) = (record["text"] for record in records if record["event"] == "note")
    assert note.startswith(f"train: 9 files ignored (read are {READ}): 4 .gif: train/cat/0.gif, ")
    assert "; 1 .heic: train/dog/phone.HEIC; " in note
