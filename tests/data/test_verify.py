"""`largebatch data verify`: bytes that changed behind the same length and time of a file."""

import os
from pathlib import Path

import pytest
from class_folders import write_folder

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets.packing import pack_folder
from largebatch.data.index.index import load_or_read, make


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        write_folder(tmp_path / "data", split)
        make(tmp_path / "data", split)
    return tmp_path / "data"


@pytest.fixture
def shards(root: Path, tmp_path: Path) -> Path:
    out = tmp_path / "shards"
    pack_folder(root, out, shard_bytes=10**6, progress=lambda _done, _total: None)
    return out


def spoil(path: Path, place: int) -> None:
    """Change a bit like a failing disk: length and time do not change."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_changed_bytes_of_a_file_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(root), "--write"]) == DONE
    assert "train: the checksums of 4 images" in capsys.readouterr().out
    assert main(["data", "verify", str(root)]) == DONE
    assert "train: 0 of 4 differ\nval: 0 of 4 differ\n" in capsys.readouterr().out
    spoil(root / "train/dog/b.png", 60)
    spoil(root / "val/cat/x.jpg", -5)
    assert len(load_or_read(root, "train")) == 4  # a run would notice nothing
    assert main(["data", "verify", str(root)]) == USER
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"{root}/train/dog/b.png: ")
    assert lines[2].startswith(f"{root}/val/cat/x.jpg: ")
    assert lines[1::2] == ["train: 1 of 4 differ", "val: 1 of 4 differ"]
    assert "2 of 8 images" in shown.err


def test_changed_bytes_of_a_shard_are_named_with_their_offset(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = load_or_read(shards, "train")
    assert index.offsets is not None
    assert main(["data", "verify", str(shards), "--write"]) == DONE
    spoil(shards / "train/000000.tar", int(index.offsets[2]) + 20)
    capsys.readouterr()
    assert main(["data", "verify", str(shards)]) == USER
    assert f"train/000000.tar (byte {int(index.offsets[2])})" in capsys.readouterr().out


@pytest.mark.parametrize("length", [0, 100])
def test_damaged_checksums_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    assert main(["data", "verify", str(root), "--write"]) == DONE
    place = root / ".largebatch-train.checksums"
    place.write_bytes(place.read_bytes()[:length])
    assert main(["data", "verify", str(root)]) == USER
    assert "these checksums are damaged" in capsys.readouterr().err
