import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from picture_folder import fields, write_folder, write_picture

from largebatch.data.imports import import_data
from largebatch.data.index import read_folder
from largebatch.errors import DataError


def imported(source: Path, out: Path) -> Path:
    import_data("imagefolder", source, out, shard_bytes=10**6, progress=lambda _done, _total: None)
    return out


def zip_of(folder: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*"), reverse=True):
            file.write(path, path.relative_to(folder.parent))
        file.writestr("__MACOSX/train/dog/._a.JPEG", b"left behind")
        file.writestr(f"{folder.name}/readme.txt", b"no picture")


def tar_of(folder: Path, archive: Path, mode: str) -> None:
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, arcname=f"./{folder.name}")


def as_folder(root: Path, source: Path) -> Path:
    return root


def as_zips(root: Path, source: Path) -> Path:
    for split in ("train", "val"):
        zip_of(root / split, source / f"{split}.zip")
    return source


def as_one_zip(root: Path, source: Path) -> Path:
    zip_of(root, source / "all.zip")
    return source / "all.zip"


def as_bare_tars(root: Path, source: Path) -> Path:
    """Without the split in the paths; one of them compressed."""
    for split, mode in (("train", "w"), ("val", "w:gz")):
        with tarfile.open(
            source / f"{split}.{mode.replace('w', 'tar').replace(':', '.')}", mode
        ) as t:  # type: ignore[call-overload]
            for path in (root / split).iterdir():
                t.add(path, arcname=path.name)
    return source


def as_one_tar(root: Path, source: Path) -> Path:
    tar_of(root, source / "all.tgz", "w:gz")
    return source / "all.tgz"


def as_xz(root: Path, source: Path) -> Path:
    tar_of(root, source / "all.tar", "w")
    (source / "all.tar.xz").write_bytes(lzma.compress((source / "all.tar").read_bytes()))
    return source / "all.tar.xz"


@pytest.mark.parametrize("form", [as_folder, as_zips, as_one_zip, as_bare_tars, as_one_tar, as_xz])
def test_class_folders_keep_bytes_and_order_in_every_form(
    tmp_path: Path, form: Callable[[Path, Path], Path]
) -> None:
    root, source = tmp_path / "root", tmp_path / "source"
    source.mkdir()
    for split in ("train", "val"):
        write_folder(root, split)
    out = imported(form(root, source), tmp_path / "out")
    for split in ("train", "val"):
        before, after = read_folder(root, split), read_folder(out, split)
        for sample in range(len(before)):
            path, offset, num_bytes = after.locate(sample)
            content = path.read_bytes()[offset : offset + num_bytes]
            assert content == before.locate(sample).path.read_bytes()
        assert fields(after)["labels"] == fields(before)["labels"]
        assert after.classes == before.classes


def test_broken_pictures_of_an_archive_are_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "root", split)
    (tmp_path / "root/train/dog/b.png").write_bytes(b"")
    write_picture(tmp_path / "root/train/dog/c.png")
    source = as_one_zip(tmp_path / "root", tmp_path)
    with pytest.raises(DataError) as caught:
        imported(source, tmp_path / "out")
    assert "1 of 5 pictures in train cannot be used" in str(caught.value)
    assert "root/train/dog/b.png: the file is empty" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"text", "not a whole zip or tar"), (b"\x1f\x8b\x08", "not a whole zip or tar")],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "all.zip").write_bytes(content)
    with pytest.raises(DataError, match=message):
        imported(tmp_path / "all.zip", tmp_path / "out")


def test_archives_whose_splits_differ_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "root", "train")
    write_picture(tmp_path / "root/val/yak/a.png")
    with pytest.raises(DataError, match="only in train: Zebra, cat, dog; only in val: yak"):
        imported(tmp_path / "root", tmp_path / "out")


def test_real_imagenette_is_imported_with_its_bytes(real_data: Path, tmp_path: Path) -> None:
    source = real_data / "imagenette224"
    out = imported(source, tmp_path / "out")
    train, val = (read_folder(out, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (2500, 1000)
    with (source / "classes.tsv").open() as file:
        assert list(train.classes) == sorted(line.split()[1] for line in file)
    with zipfile.ZipFile(source / "val.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".JPEG"))
        for sample, name in enumerate(names):
            path, offset, num_bytes = val.locate(sample)
            with path.open("rb") as file:
                file.seek(offset)
                assert file.read(num_bytes) == archive.read(name)
            assert name.split("/")[1] == val.classes[val.labels[sample]]
