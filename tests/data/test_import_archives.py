import gc
import io
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


@pytest.mark.parametrize(
    ("written", "flagged", "read"),
    [
        ("Größe".encode(), True, "Größe"),
        ("Größe".encode(), False, "Größe"),  # as Info-ZIP and macOS write
        ("Größe".encode("cp437"), False, "Größe"),
        ("Größe".encode("latin-1"), False, "Gr÷▀e"),  # wrong, but no name is refused
    ],
)
def test_names_in_a_zip_are_decoded_like_programs_encode_them(
    written: bytes, flagged: bool, read: str, tmp_path: Path
) -> None:
    placeholder = b"_" * len(written)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for split in ("train", "val"):
            file.writestr(f"{split}/{placeholder.decode()}/a.png", png(1))
    content = bytearray(packed.getvalue().replace(placeholder, written))
    if flagged:
        for mark, offset in ((b"PK\3\4", 7), (b"PK\1\2", 9)):
            place = content.find(mark)
            while place >= 0:
                content[place + offset] |= 0x800 >> 8
                place = content.find(mark, place + 1)
    (tmp_path / "all.zip").write_bytes(content)
    assert contents(imported(tmp_path / "all.zip", tmp_path / "out")) == {read: [png(1)]}


def test_a_zip_does_not_unpack_more_than_an_image_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 10**6)
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("train/cat/a.png", "val/cat/a.png"):
            file.writestr(name, png(5))
        file.writestr("train/cat/b.png", bytes(10**7))
    with pytest.raises(
        DataError, match="b.png: it has 10,000,000 bytes unpacked, expected at most"
    ):
        imported(tmp_path / "all.zip", tmp_path / "out")


def test_links_of_a_folder_are_followed(tmp_path: Path) -> None:
    """To an image and to a whole class."""
    raw, root = tmp_path / "raw", tmp_path / "root"
    for path in (raw / "a.png", root / "val/cat/a.png", root / "val/dog/a.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(6))
    (root / "train/dog").mkdir(parents=True)
    (root / "train/dog/b.png").symlink_to(raw / "a.png")
    (root / "train/cat").symlink_to(raw)
    assert contents(imported(root, tmp_path / "out")) == {"cat": [png(6)], "dog": [png(6)]}


REFUSED = {
    "a link to nowhere": (
        tars.symbolic("train/cat/x.png", "../gone.png"),
        "train/cat/x.png is a link to train/gone.png, and there is no such file",
    ),
    "a link to a folder": (
        tars.symbolic("train/yak", "cat"),
        "train/yak is a link to train/cat, and there is no such file",
    ),
    "links in a circle": (
        tars.symbolic("train/cat/x.png", "y.png") + tars.symbolic("train/cat/y.png", "x.png"),
        "train/cat/x.png is a link to train/cat/y.png",
    ),
    "a sparse file": (
        tars.sparse("train/cat/x.png", png(2)),
        "train/cat/x.png is a sparse file; unpack the archive",
    ),
    "a device": (tars.member("train/cat/x.png", kind=tarfile.FIFOTYPE), "x.png is a special"),
    "one path twice": (
        tars.member("./train/cat/a.png", png(3)),
        "there are two files train/cat/a.png; unpack the archive, keep one of them",
    ),
    "a link over a file": (tars.hard("train/cat/a.png", "val/cat/a.png"), "two files train/cat/a"),
}


@pytest.mark.parametrize(
    ("more", "message"), [pytest.param(*each, id=name) for name, each in REFUSED.items()]
)
def test_a_special_file_in_an_archive_is_refused_by_name(
    tmp_path: Path, more: bytes, message: str
) -> None:
    train = tars.member("train/cat/a.png", png(2)) + tars.member("train/dog/a.png", png(3))
    source = tars.write(tmp_path / "all.tar", train, more, VAL)
    with pytest.raises(DataError) as caught:
        imported(source, tmp_path / "out")
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_links_to_itself_is_refused(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
    (tmp_path / "train/cat/again").symlink_to(tmp_path / "train")
    with pytest.raises(DataError, match="train/cat/again: links back to a folder"):
        imported(tmp_path, tmp_path / "out")


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
        (spoil_a_header, "there is no header at byte 1024, or data after its end"),
        (lose_the_end, "the zeros at its end are missing"),
        (cut_an_image, "it is truncated in val/dog/a.png"),
        (count_backwards, "the length of val/dog/a.txt is negative"),
    ],
)
def test_a_tar_that_is_not_whole_is_refused(
    tmp_path: Path, spoil: Callable[[bytearray], None], reason: str
) -> None:
    train = tars.member("train/cat/a.png", png(2)) + tars.member("train/dog/a.png", png(3))
    content = bytearray(train + VAL + tars.END)
    spoil(content)
    (tmp_path / "all.tar").write_bytes(content)
    with pytest.raises(DataError) as caught:
        imported(tmp_path / "all.tar", tmp_path / "out")
    assert f"all.tar: not a whole zip or tar ({reason}); download it again" in str(caught.value)


def test_a_damaged_tar_in_a_tar_is_named(tmp_path: Path) -> None:
    inner = bytearray(tars.member("a.png", png(0)) + tars.member("b.png", png(1)) + tars.END)
    inner[inner.index(b"b.png")] ^= 1
    tars.write(tmp_path / "train.tar", tars.member("n01.tar", bytes(inner)))
    tars.write(tmp_path / "val.tar", tars.member("n01/a.png", png(0)))
    with pytest.raises(DataError, match=r"train.tar: not a whole .*n01.tar in it: there is no"):
        imported(tmp_path, tmp_path / "out")


def test_members_of_a_tar_do_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's tarfile keeps a kilobyte per member, more than a gigabyte for a million."""
    many = [tars.member(f"train/cat/{n}.png", b"x") for n in range(500)]
    source = tars.write(tmp_path / "all.tar", *many)
    kept = []

    def has_bytes(member: tarfile.TarInfo) -> bool:
        if member.name.endswith("/499.png"):
            kept.append(sum(type(each) is tarfile.TarInfo for each in gc.get_objects()))
        return True

    monkeypatch.setattr(archives, "has_bytes", has_bytes)
    with archives.open_files(source, below=(), scratch=tmp_path) as files:
        assert len(files.names) == 500
    assert len(kept) == 1
    assert kept[0] < 10
