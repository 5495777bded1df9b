"""Parquet files as the Hugging Face hub lays them out."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from class_folders import contents, images_of, png

from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.index import read_folder
from largebatch.data.order import import_order

needs_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed"
)

CLASSES = ["cat", "dog"]
Features = dict[str, dict[str, Any]]

FEATURES: Features = {
    "image": {"_type": "Image"},
    "label": {"names": CLASSES, "_type": "ClassLabel"},
}


def write(
    path: Path, images: Sequence[object], labels: list[int], *, features: Features = FEATURES
) -> None:
    """Write a file like the library `datasets`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(features)
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [pa.array(images, type=struct), *[pa.array(labels, pa.int64())] * (len(names) - 1)]
    about = json.dumps({"info": {"features": features}})
    table = pa.table(columns, names=names).replace_schema_metadata({"huggingface": about})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


def image(number: int) -> dict[str, object]:
    return {"bytes": png(number), "path": f"{number}.png"}


def write_hub(root: Path, *, val: str = "validation", features: Features = FEATURES) -> Path:
    """Write six training images in two files and two of validation."""
    for part in range(2):
        images = [image(3 * part + n) for n in range(3)]
        write(
            root / f"data/train-{part:05d}-of-00002.parquet",
            images,
            [part, 1, 0],
            features=features,
        )
    path = root / f"data/{val}-00000-of-00001.parquet"
    write(path, [image(6), image(7)], [0, 1], features=features)
    return root


def command(source: Path, out: Path, *options: str) -> int:
    return main(["data", "import", "parquet", str(source), "--out", str(out), *options])


@needs_pyarrow
def test_images_keep_their_bytes_order_and_labels(tmp_path: Path) -> None:
    assert command(write_hub(tmp_path / "in"), tmp_path / "out", "--keep-order") == DONE
    index = read_folder(tmp_path / "out", "train")
    assert index.classes == ("cat", "dog")
    assert index.labels.tolist() == [0, 1, 0, 1, 1, 0]
    expected = {"cat": [png(n) for n in (0, 2, 5)], "dog": [png(n) for n in (1, 3, 4)]}
    assert contents(tmp_path / "out") == expected
    assert contents(tmp_path / "out", "val") == {"cat": [png(6)], "dog": [png(7)]}


@needs_pyarrow
def test_rows_are_shuffled_like_those_of_other_formats(tmp_path: Path) -> None:
    """Against the drawn order; a temporary file is between, since a row is not read by itself."""
    assert command(write_hub(tmp_path / "in"), tmp_path / "out", "--seed", "5") == DONE
    order = import_order(6, seed=5).tolist()
    assert order != sorted(order)
    train = read_folder(tmp_path / "out", "train")
    assert images_of(train) == [png(number) for number in order]
    assert train.labels.tolist() == [[0, 1, 0, 1, 1, 0][number] for number in order]
    assert images_of(read_folder(tmp_path / "out", "val")) == [png(6), png(7)]


BAD: dict[str, tuple[object, int, str]] = {
    "a GIF": ({"bytes": b"GIF89a" + bytes(40), "path": "x"}, 0, "not a JPEG"),
    "a path alone": ({"bytes": None, "path": "x.png"}, 0, "it has no image bytes"),
    "no label": (image(1), -1, "its label is -1, expected a number from 0 to 1"),
    "cut off": ({"bytes": png(1)[:-20], "path": "x"}, 0, "it is truncated"),
}


@needs_pyarrow
@pytest.mark.parametrize(
    ("content", "label", "reason"), [pytest.param(*each, id=name) for name, each in BAD.items()]
)
def test_a_bad_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, label: int, reason: str
) -> None:
    source = write_hub(tmp_path / "in")
    write(source / "data/train-00001-of-00002.parquet", [image(8), content], [0, label])
    assert command(source, tmp_path / "out") == USER
    shown = capsys.readouterr().err
    assert "1 of 7" in shown
    assert f"train-00001-of-00002.parquet, row 1: {reason}" in shown
    assert not (tmp_path / "out").exists()


def names_of(split: str, total: int, *, parts: int | None = None) -> list[str]:
    """The first parts of a set of files, all by default."""
    return [f"{split}-{part:05d}-of-{total:05d}" for part in range(parts or total)]


ONE = ["data/train-00000-of-00001", "data/validation-00000-of-00001"]

WHOLE: dict[str, tuple[list[str], list[str], list[str]]] = {
    "of the hub": (names_of("data/train", 5), names_of("data/validation", 2), []),
    "of the converter": (["default/train/0000", "default/train/0001"], ["default/val/0000"], []),
    "in two folders": (names_of("train/train", 2), ["validation/validation"], []),
    "of DuckDB": (["split=train/data_0", "split=train/data_1"], ["split=val/data_0"], []),
    "numbered from 1": (["train-1", "train-2"], ["dev-1"], []),
    "with fingerprints": (
        [f"data/train-{part:05d}-of-00002-{16 * letter}" for part, letter in enumerate("ab")],
        ["data/validation-00000-of-00001-" + 16 * "c"],
        [],
    ),
    "beside other splits": (
        names_of("data/train", 1),
        names_of("data/val", 1),
        [
            *names_of("data/train_extra", 2),
            *names_of("data/pretrain", 1),
            *names_of("data/val_matched", 1),
            *("data/train2", "data/train-0-old", "data/test", "default/partial-train/0000"),
            *("small/train-00000-of-00001", ".cache/train-00000-of-00001"),
        ],
    ),
}
"""Files of training, of validation, and others."""

UNCLEAR: dict[str, tuple[list[str], str]] = {
    "several configurations": ([*ONE, *names_of("en/train", 1), "en/val"], "data: train, val"),
    "configurations in one folder": (
        [f"{words}-{split}-00000-of-00001" for words in ("a", "b") for split in ("train", "val")],
        "a: train, val; b: train, val",
    ),
    "a part is missing": ([*names_of("data/train", 5, parts=4), ONE[1]], "train (4 of 5 files)"),
    "a number is missing": (["train/0000", "train/0002", "val/0000"], "train (numbers 0, 2"),
    "sets of two sizes": ([*ONE, *names_of("data/train", 2)], "train# of 1, train# of 2"),
    "two sets": ([*ONE, "data/train"], "train (files of 2 sets"),
    "a file that a browser saved again": (["train", "train-1", "val"], "2 sets: train, train#)"),
    "one number twice": ([*ONE, "data/train-0-of-1"], "train (two files of one number)"),
    "two names of validation": ([*ONE, "data/dev"], "data: dev, train, validation"),
    "another name of validation": ([ONE[0], "data/test"], "--val-name test"),
    "names that contain train and val": (["data/train_extra", "data/val_matched"], "train_extra"),
    "a split's folder": (["0000", "0001"], "default/train/0000.parquet"),
}


@needs_pyarrow
@pytest.mark.parametrize("names", [pytest.param(each, id=name) for name, each in WHOLE.items()])
def test_one_whole_set_of_each_split_is_imported(
    tmp_path: Path, names: tuple[list[str], list[str], list[str]]
) -> None:
    """Every file has one image; each has another class, in the order of the files' numbers."""
    train, val, others = names
    for number, name in enumerate([*train, *val, *others]):
        write(tmp_path / f"in/{name}.parquet", [image(number)] * 2, [0, 1])
    assert command(tmp_path / "in", tmp_path / "out", "--keep-order") == DONE
    found = contents(tmp_path / "out")["cat"], contents(tmp_path / "out", "val")["cat"]
    assert found[0] == [png(number) for number in range(len(train))]
    assert found[1] == [png(len(train) + number) for number in range(len(val))]


@needs_pyarrow
@pytest.mark.parametrize(
    ("names", "part"), [pytest.param(*each, id=name) for name, each in UNCLEAR.items()]
)
def test_files_that_are_not_one_whole_set_are_refused_with_the_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], part: str
) -> None:
    for number, name in enumerate(names):
        write(tmp_path / f"in/{name}.parquet", [image(number)] * 2, [0, 1])
    assert command(tmp_path / "in", tmp_path / "out") == USER
    message = capsys.readouterr().err
    assert part in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@needs_pyarrow
def test_a_configuration_and_a_split_are_chosen(tmp_path: Path) -> None:
    for number, name in enumerate([*ONE, "en/train", "en/test_long", "en/validation"]):
        write(tmp_path / f"in/{name}.parquet", [image(number)] * 2, [0, 1])
    options = ("--val-name", "test_long")
    assert command(tmp_path / "in/en", tmp_path / "out", *options) == DONE
    assert contents(tmp_path / "out")["cat"] == [png(2)]
    assert contents(tmp_path / "out", "val")["cat"] == [png(3)]
    assert command(tmp_path / "in/en", tmp_path / "again", "--val-name", "train") == USER


@needs_pyarrow
def test_files_of_another_schema_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, tmp_path / "out") == USER
    assert "data/train-00000-of-00002.parquet" in capsys.readouterr().err
    source = write_hub(tmp_path / "in")
    nameless = {**FEATURES, "label": {"num_classes": 2, "_type": "ClassLabel"}}
    write(source / "data/train-00000-of-00002.parquet", [image(0)], [0], features=nameless)
    assert command(source, tmp_path / "out") == USER
    assert "image (Image), label (ClassLabel)" in capsys.readouterr().err
    (source / "data/train-00000-of-00002.parquet").write_bytes(b"PAR1 and no more")
    assert command(source, tmp_path / "out") == USER
    assert "not a whole Parquet file" in capsys.readouterr().err
    other = {**FEATURES, "label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    write(source / "data/train-00000-of-00002.parquet", [image(0)], [0], features=other)
    assert command(source, tmp_path / "out") == USER
    assert "different columns or classes" in capsys.readouterr().err
