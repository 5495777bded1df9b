"""Parquet files as the Hugging Face hub lays them out."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from class_folders import contents, png

from largebatch.cli.main import DONE, USER, main
from largebatch.data.index.index import read_folder

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
    assert command(write_hub(tmp_path / "in"), tmp_path / "out") == DONE
    index = read_folder(tmp_path / "out", "train")
    assert index.classes == ("cat", "dog")
    assert index.labels.tolist() == [0, 1, 0, 1, 1, 0]
    expected = {"cat": [png(n) for n in (0, 2, 5)], "dog": [png(n) for n in (1, 3, 4)]}
    assert contents(tmp_path / "out") == expected
    assert contents(tmp_path / "out", "val") == {"cat": [png(6)], "dog": [png(7)]}


BAD: dict[str, tuple[object, int, str]] = {
    "a GIF": ({"bytes": b"GIF89a" + bytes(40), "path": "x"}, 0, "not a JPEG or PNG image"),
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
    write(source / "data/train-00002-of-00003.parquet", [image(8), content], [0, label])
    assert command(source, tmp_path / "out") == USER
    shown = capsys.readouterr().err
    assert "1 of 10 images cannot be used" in shown
    assert f"train-00002-of-00003.parquet, row 1: {reason}" in shown
    assert not (tmp_path / "out").exists()


@needs_pyarrow
def test_files_of_another_schema_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, tmp_path / "out") == USER
    assert "expected data/train-*.parquet" in capsys.readouterr().err
    source = write_hub(tmp_path / "in")
    nameless = {**FEATURES, "label": {"num_classes": 2, "_type": "ClassLabel"}}
    write(source / "data/train-00000-of-00002.parquet", [image(0)], [0], features=nameless)
    assert command(source, tmp_path / "out") == USER
    assert "found image (Image), label (ClassLabel)" in capsys.readouterr().err
    (source / "data/train-00000-of-00002.parquet").write_bytes(b"PAR1 and no more")
    assert command(source, tmp_path / "out") == USER
    assert "not a whole Parquet file" in capsys.readouterr().err
    other = {**FEATURES, "label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    write(source / "data/train-00000-of-00002.parquet", [image(0)], [0], features=other)
    assert command(source, tmp_path / "out") == USER
    assert "different columns or classes" in capsys.readouterr().err
