"""Malicious archives are refused by name before they use disk or memory."""

import io
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tars
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from importing import contents, imported, png
from PIL import Image

from largebatch.data.index.folder import read_classes
from largebatch.data.index.headers import MAX_BYTES, BadImageError, measure
from largebatch.data.index.index import read_folder
from largebatch.errors import DataError

VAL = tars.member("val/cat/a.png", png(1)) + tars.member("val/dog/a.png", png(2))
TRAIN = tars.member("train/cat/a.png", png(3)) + tars.member("train/dog/a.png", png(4))


@pytest.fixture
def memory() -> Iterator[None]:
    """Fail a test that allocates more than a hundred megabytes in Python."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 10**6


def refused(source: Path, out: Path) -> str:
    """Return the message of an import that must fail and leave nothing."""
    before = set(out.parent.iterdir())
    with pytest.raises(DataError) as caught:
        imported(source, out)
    assert set(out.parent.iterdir()) == before
    return str(caught.value)


def with_path(name: str) -> bytes:
    """Return a member whose unchanged path is in an extended header."""
    record = f" path={name}\n"
    length = len(record) + 2
    text = f"{length + (length >= 99)}{record}".encode()
    return tars.member("pax", text, kind=tarfile.XHDTYPE) + tars.member("x", png(5))


@pytest.mark.parametrize("prefix", ["../../", "/", "//", "./.././"])
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


def test_a_nul_in_a_name_does_not_drop_an_image_from_a_tar(tmp_path: Path) -> None:
    more = [with_path(f"{split}/c\0t/b.png") for split in ("train", "val")]
    source = tars.write(tmp_path / "all.tar", TRAIN, VAL, *more)
    assert r"'c\x00t' is not a valid class name" in refused(source, tmp_path / "out")


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\0"])
def test_a_class_name_with_a_line_break_is_refused(tmp_path: Path, mark: str) -> None:
    """Otherwise it would be two classes, and the later labels would be wrong."""
    (tmp_path / "classes.txt").write_text(f"a{mark}b\nc\n")
    with pytest.raises(DataError, match="expected one unique name per line"):
        read_classes(tmp_path)


def test_an_image_above_the_maximum_length_is_refused_unread() -> None:
    def read(position: int, length: int) -> bytes:
        pytest.fail("it was read")

    with pytest.raises(BadImageError, match=r"it has 536,870,913 bytes, expected at most"):
        measure(read, MAX_BYTES + 1)


def huge(form: str) -> bytes:
    """Return an image of 50,000 x 50,000 pixels by its header."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, format=form)
    content = bytearray(buffer.getvalue())
    if form == "bmp":
        content[18:26] = struct.pack("<II", 50_000, 50_000)
    elif form == "jpeg":
        at = content.index(b"\xff\xc0") + 5
        content[at : at + 4] = struct.pack(">HH", 50_000, 50_000)
    elif form == "ppm":
        content = content.replace(b"8 8", b"50000 50000")
    return bytes(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("form", ["bmp", "jpeg", "ppm"])
def test_an_image_of_too_many_pixels_is_refused_before_memory_is_allocated(
    tmp_path: Path, form: str, memory: None
) -> None:
    """The header is checked before any decoder reads it."""
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / f"a.{form}").write_bytes(huge(form))
    with pytest.raises(DataError, match=rf"train/cat/a.{form}: (it has|Image size)"):
        read_folder(tmp_path, "train")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "train/", "val/", "train/cat/", "../", "/", "train/cat/a.tar/"]),
            st.text("a./\0\x1b\udcff ", max_size=4),
            st.sampled_from(["", ".png", ".cls", ".tar", ".jpg"]),
            st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]),
            st.sampled_from(["", "a.png", "../../x", "/", "\0", "."]),
        ),
        max_size=4,
    ),
    st.binary(max_size=8),
)
@example([("train/", "..", ".png", tarfile.SYMTYPE, "..")], b"")
@example([("", "", "", tarfile.REGTYPE, "")], b"")
@example([("train/cat/", "a", ".tar", tarfile.REGTYPE, "")], b"\xff" * 8)
def test_any_members_are_images_or_one_message(
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[str, str, str, bytes, str]],
    spoiled: bytes,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    more = []
    for start, middle, end, kind, to in members:
        content = png(1) if kind == tarfile.REGTYPE else b""
        more.append(tars.member(f"{start}{middle}{end}", content, kind=kind, to=to))
    archive = bytearray(b"".join([TRAIN, VAL, *more]))
    for place, byte in enumerate(spoiled):
        archive[-1 - 97 * place] = byte
    source = tars.write(folder / "all.tar", bytes(archive))
    try:
        imported(source, folder / "out")
    except DataError as error:
        assert str(error)  # noqa: PT017 -- either outcome is right
    assert {path.name for path in folder.iterdir()} <= {"all.tar", "out"}
