import resource
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tars
from importing import contents, imported, png

from largebatch.errors import DataError


def compressed(folder: Path) -> Path:
    """A tgz that is much longer unpacked."""
    plain = tars.write(
        folder / "plain",
        tars.member("train/cat/a.png", png(0)),
        tars.member("val/cat/a.png", png(0)),
        tars.member("zeros", bytes(10**6)),
    )
    with tarfile.open(plain) as read, tarfile.open(folder / "all.tgz", "w:gz") as tar:
        for info in read:
            tar.addfile(info, read.extractfile(info))
    plain.unlink()
    return folder / "all.tgz"


def test_a_compressed_tar_is_unpacked_beside_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small and full"))
    out = imported(compressed(tmp_path), tmp_path / "new/folder/out")
    assert contents(out) == {"cat": [png(0)]}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """Longer writes fail like on a full disk, with another error number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_while_unpacking_is_an_error_with_the_path(tmp_path: Path) -> None:
    source = compressed(tmp_path)
    with no_file_longer_than(500_000), pytest.raises(DataError) as caught:
        imported(source, tmp_path / "new/out")
    assert str(caught.value) == (
        f"{tmp_path}/new: {source} cannot be unpacked there (File too large), beside the output; "
        "make room for both, or choose another place with --out"
    )


def test_a_full_disk_while_writing_shards_is_an_error_with_the_path(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat/a.png").write_bytes(png(0, side=100))
    with no_file_longer_than(20_000), pytest.raises(DataError) as caught:
        imported(tmp_path, tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path}/out: cannot be written (File too large); make room or choose another place"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "val"]


def test_an_existing_output_is_refused_before_the_archive_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(DataError, match="out: already exists"):
        imported(tmp_path / "no such archive", tmp_path / "out")
