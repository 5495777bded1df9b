"""Archives damaged in any way raise only DataError."""

import io
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import official
import pytest
from importing import png

from largebatch.data.datasets import import_data
from largebatch.errors import DataError

IMAGES = {
    f"{split}/{name}/{n}.png": png(n)
    for split in ("train", "val")
    for name in ("cat", "dog")
    for n in range(2)
}


def read(name: str, source: Path, out: Path) -> None:
    import_data(name, source, out, shard_bytes=10**6, progress=lambda _done, _total: None)


def write_zip(path: Path, method: int) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in IMAGES.items():
            file.writestr(name, content)


def write_tar(path: Path, mode: str) -> None:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in IMAGES.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.5  # which gives it an extended header
            tar.addfile(info, io.BytesIO(content))


WHOLE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "idx": ("fashion-mnist", official.write_fashion),
    "packed pickles": ("cifar10", official.write_cifar),
    "zip": ("imagefolder", lambda source: write_zip(source, zipfile.ZIP_DEFLATED)),
    "zip with LZMA": ("imagefolder", lambda source: write_zip(source, zipfile.ZIP_LZMA)),
    "tar": ("imagefolder", lambda source: write_tar(source, "w")),
    "tar.gz": ("imagefolder", lambda source: write_tar(source, "w:gz")),
    "tar.xz": ("imagefolder", lambda source: write_tar(source, "w:xz")),
}


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Truncate a file, or change some bytes, mostly among the first."""
    changed = bytearray(content)
    if chance.random() < 0.3:
        return content[: chance.randrange(len(content))]
    for _ in range(chance.choice([1, 2, 10])):
        end = chance.choice([len(content), min(len(content), 300)])
        changed[chance.randrange(end)] = chance.choice([0, 255, chance.randrange(256)])
    return bytes(changed)


@pytest.mark.parametrize("form", WHOLE)
def test_any_damage_is_a_data_error_or_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    name, write = WHOLE[form]
    source, chance, refused = tmp_path / "source", random.Random(0), 0
    write(source)
    official.declare(monkeypatch, source)
    files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    for attempt in range(40):
        path = chance.choice(sorted(files))
        content = path.read_bytes()
        path.write_bytes(damaged(content, chance))
        try:
            read(name, source, tmp_path / f"out{attempt}")
        except DataError as error:
            assert len(str(error)) > 40  # noqa: PT017 -- either outcome is right
            refused += 1
        else:
            assert (tmp_path / f"out{attempt}/train/000000.tar").exists()
        path.write_bytes(content)
    assert refused > 5
    read(name, source, tmp_path / "out")
