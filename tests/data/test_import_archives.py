"""Archives: links, names, damage, and members that no module of Python writes."""

import io
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tars
from importing import contents, imported, png

from largebatch.data.datasets import archives
from largebatch.errors import DataError

VAL = tars.member("val/cat/a.png", png(0)) + tars.member("val/dog/a.png", png(1))
TRAIN = tars.member("train/cat/a.png", png(2)) + tars.member("train/dog/a.png", png(3))


def test_links_in_a_tar_are_the_images_they_point_to(tmp_path: Path) -> None:
    """The result is that of Python's tarfile; the first link points to another link."""
    source = tars.write(
        tmp_path / "all.tar",
        tars.symbolic("./train/cat/0.png", "1.png"),
        tars.symbolic("train/cat/1.png", "../../blobs/a1b2"),
        tars.member("./blobs/a1b2", png(10)),
        tars.member("train/dog/1.png", png(11)),
        tars.hard("train/dog/2.png", "train/dog/1.png"),
        tars.hard("train/dog/3.png", "blobs/a1b2"),
        tars.symbolic(".hidden", "nowhere"),
        VAL,
    )
    found = contents(imported(source, tmp_path / "out"))
    assert found == {"cat": [png(10), png(10)], "dog": [png(11), png(11), png(10)]}
    with tarfile.open(source) as tar:
        tar.extractall(tmp_path / "by Python", filter="tar")
    for name in ("cat", "dog"):
        folder = tmp_path / "by Python/train" / name
        assert [path.read_bytes() for path in sorted(folder.iterdir())] == found[name]


def test_a_zip_does_not_unpack_more_than_an_image_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 10**6)
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("train/cat/a.png", "val/cat/a.png"):
            file.writestr(name, png(5))
        file.writestr("train/cat/b.png", bytes(10**7))
    with pytest.raises(DataError, match="b.png: it has 10,000,000 bytes unpacked"):
        imported(tmp_path / "all.zip", tmp_path / "out")


@pytest.mark.parametrize("prefix", ["../../", "/"])
@pytest.mark.parametrize("form", ["tar", "zip"])
def test_a_path_out_of_the_archive_stays_inside(tmp_path: Path, prefix: str, form: str) -> None:
    (tmp_path / "in").mkdir()
    source = tmp_path / "in" / f"all.{form}"
    images = {f"{prefix}train/cat/a.png": png(3), f"{prefix}val/cat/a.png": png(1)}
    if form == "tar":
        tars.write(source, *(tars.member(*each) for each in images.items()))
    else:
        with zipfile.ZipFile(source, "w") as file:
            for name, content in images.items():
                file.writestr(name, content)
    before = set(tmp_path.rglob("*"))
    out = imported(source, tmp_path / "out")
    assert contents(out) == {"cat": [png(3)]}
    assert {path for path in set(tmp_path.rglob("*")) - before if out not in path.parents} == {out}


def with_path(name: str) -> bytes:
    """Return a member whose unchanged path is in an extended header."""
    record = f" path={name}\n"
    length = len(record) + 2
    text = f"{length + (length >= 99)}{record}".encode()
    return tars.member("pax", text, kind=tarfile.XHDTYPE) + tars.member("x", png(5))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        pytest.param(
            tars.symbolic("train/cat/x.png", "../gone.png"),
            "train/cat/x.png is a link to train/gone.png",
            id="a link to nowhere",
        ),
        pytest.param(
            tars.symbolic("train/cat/x.png", "/etc/passwd"), "to etc/passwd", id="a link outside"
        ),
        pytest.param(tars.symbolic("train/yak", "cat"), "train/yak is a", id="a link to a folder"),
        pytest.param(
            tars.symbolic("train/cat/x.png", "y.png") + tars.symbolic("train/cat/y.png", "x.png"),
            "train/cat/x.png is a link to train/cat/y.png",
            id="links in a circle",
        ),
        pytest.param(tars.sparse("train/cat/x.png", png(2)), "train/cat/x.png is a", id="sparse"),
        pytest.param(
            tars.member("train/cat/x.png", kind=tarfile.FIFOTYPE), "x.png is a", id="a device"
        ),
        pytest.param(
            tars.member("./train/cat/a.png", png(3)), "two files train/cat/a.png", id="a path twice"
        ),
        pytest.param(
            with_path("train/c\0t/b.png") + with_path("val/c\0t/b.png"), r"'c\x00t'", id="a NUL"
        ),
    ],
)
def test_a_special_file_in_an_archive_is_refused_by_name(
    tmp_path: Path, more: bytes, part: str
) -> None:
    source = tars.write(tmp_path / "all.tar", TRAIN, more, VAL)
    with pytest.raises(DataError) as caught:
        imported(source, tmp_path / "out")
    assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


def spoil_a_header(content: bytearray) -> None:
    """Python's tarfile takes it for the end."""
    content[content.index(b"train/dog/a.png") + 1] ^= 1


def lose_the_end(content: bytearray) -> None:
    del content[-len(tars.END) :]


def cut_an_image(content: bytearray) -> None:
    del content[-len(tars.END) - 300 :]


def count_backwards(content: bytearray) -> None:
    """Write a negative length, which makes older versions of Python's tarfile loop."""
    start = content.index(b"val/dog/a.png")
    header = content[start : start + 512]
    header[124:136] = (2**96 - 2048).to_bytes(12, "big")
    header[0:13] = b"val/dog/a.txt"
    content[start : start + 512] = tars.with_sum(header)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_a_header, "at byte 1024"),
        (lose_the_end, "zeros at its end"),
        (cut_an_image, "truncated in val/dog/a.png"),
        (count_backwards, "val/dog/a.txt is negative"),
    ],
)
def test_a_tar_that_is_not_whole_is_refused(
    tmp_path: Path, spoil: Callable[[bytearray], None], reason: str
) -> None:
    content = bytearray(TRAIN + VAL + tars.END)
    spoil(content)
    (tmp_path / "all.tar").write_bytes(content)
    with pytest.raises(DataError, match=f"all.tar: .*{reason}"):
        imported(tmp_path / "all.tar", tmp_path / "out")


def write_zip(path: Path, images: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, content in images.items():
            file.writestr(name, content)


def write_tar(path: Path, images: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in images.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.5  # which gives it an extended header
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_any_damage_is_a_data_error_or_loses_nothing(
    tmp_path: Path, write: Callable[[Path, dict[str, bytes]], None]
) -> None:
    places = [(s, c, n) for s in ("train", "val") for c in ("cat", "dog") for n in range(2)]
    write(tmp_path / "source", {f"{s}/{c}/{n}.png": png(n) for s, c, n in places})
    whole, chance, refused = (tmp_path / "source").read_bytes(), random.Random(0), 0
    for attempt in range(12):
        content = bytearray(whole)
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)) :]
        for _ in range(chance.choice([1, 2, 10])) if len(content) == len(whole) else ():
            end = chance.choice([len(content), min(len(content), 300)])
            content[chance.randrange(end)] = chance.choice([0, 255, chance.randrange(256)])
        (tmp_path / "source").write_bytes(content)
        try:
            imported(tmp_path / "source", tmp_path / f"out{attempt}")
        except DataError:
            refused += 1
        else:
            assert (tmp_path / f"out{attempt}/train/000000.tar").exists()
    assert refused > 2
