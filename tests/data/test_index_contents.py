"""Inconsistent index files with a valid checksum: one line, never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from class_folders import write_folder
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from largebatch.cli.main import USER, main
from largebatch.data.datasets.packing import pack_folder
from largebatch.data.index import file as index_file
from largebatch.data.index.file import CHECKSUM, HEADER, open_mapped, pack
from largebatch.data.index.index import find_stored, load_or_read, make
from largebatch.errors import DataError
from largebatch.storage import CHECKSUM_BYTES, checksum

Header = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]
Change = Callable[[Header, Arrays], object]
PLACE = ".largebatch-train.index"


def with_first(name: str, value: int) -> Change:
    """Return a function that sets the first value of an array."""

    def change(_: Header, arrays: Arrays) -> None:
        arrays[name][0] = value

    return change


def as_type(name: str, kind: npt.DTypeLike) -> Change:
    return lambda _, arrays: arrays.update({name: arrays[name].astype(kind)})


def with_key(key: str, value: object) -> Change:
    return lambda header, _: header.update({key: value})


BOTH: dict[str, tuple[Change, str]] = {
    "a label of no class": (with_first("labels", 3), "to 3, expected 0 to 2"),
    "a label below zero": (with_first("labels", -1), "labels range from -1 to 2"),
    "an image without height": (with_first("heights", 0), "heights range from 0 to"),
    "an endless image": (with_first("widths", 2**62), "widths range from"),
    "a length below zero": (with_first("num_bytes", -7), "num_bytes range from -7"),
    "a length of exabytes": (with_first("num_bytes", 2**62), "num_bytes range from"),
    "labels of half": (as_type("labels", np.float16), "labels are float16, expected int64"),
    "a table of labels": (
        lambda _, arrays: arrays.update(labels=arrays["labels"][None]),
        "labels have 2 dimensions",
    ),
    "too few labels": (
        lambda _, arrays: arrays.update(labels=arrays["labels"][1:].copy()),
        "its arrays have unequal lengths",
    ),
    "no images": (
        lambda _, arrays: arrays.update({key: arrays[key][:0] for key in arrays}),
        "it lists no images",
    ),
    "no labels": (lambda _, arrays: arrays.pop("labels"), "its arrays are heights"),
    "another array": (
        lambda _, arrays: arrays.update(more=arrays["labels"]),
        "its arrays are heights, labels, more",
    ),
    "no classes": (with_key("classes", []), "its classes are empty"),
    "numbers for classes": (with_key("classes", [1, 2, 3]), "classes in its header is of another"),
    "two classes alike": (with_key("classes", ["cat"] * 3), "not unique"),
    "a class with a NUL": (with_key("classes", ["a\0", "b", "c"]), "classes in its header is"),
    "half a character": (with_key("classes", ["\ud800", "b", "c"]), "surrogates not allowed"),
    "bad images in words": (with_key("bad", "none"), "bad in its header is of another type"),
    "a bad image without a time": (with_key("bad", [["a", "b"]]), "bad in its header is of ano"),
    "ignored files in words": (with_key("ignored", "none"), "ignored in its header is of another"),
    "another key": (with_key("more", 1), "its header has the keys"),
    "no digest": (with_key("digest", None), "digest in its header is of another type"),
    "the other split": (with_key("split", "val"), "it is of val, expected train"),
    "a time in years to come": (with_key("shards", [["a", 1, 10**30]]), "shards in its header"),
}

FILES: dict[str, tuple[Change, str]] = {
    "names that end early": (with_first("name_ends", 0), "an image in it has no name"),
    "names that end behind the last": (
        lambda _, arrays: arrays["name_ends"].__setitem__(-1, 2**31),
        "expected 2147483648",
    ),
    "a path for a name": (with_first("names", ord("/")), "a name in it has a / or a NUL"),
    "a NUL in a name": (with_first("names", 0), "a name in it has a / or a NUL"),
    "labels unsorted": (
        lambda _, arrays: arrays.update(labels=arrays["labels"][::-1].copy()),
        "its labels are not sorted",
    ),
    "folders elsewhere": (
        lambda header, _: header.update(
            classes=["../x", "cat", "dog"], folders=[["../x", 0], ["cat", 0], ["dog", 0]]
        ),
        "a name in it has a /",
    ),
}

SHARDS: dict[str, tuple[Change, str]] = {
    "an image behind the end": (with_first("offsets", 2**40), "image [0] is outside its shard"),
    "an image before the start": (with_first("offsets", -512), "image [0] is outside its shard"),
    "a shard of none": (with_first("shards", 1), "shards range from 0 to 1, expected 0 to 0"),
    "a shard elsewhere": (
        lambda header, _: header["shards"][0].__setitem__(0, "../../etc/passwd"),
        "a name in it has a /",
    ),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Class folders with an index of three classes in each split."""
    for split in ("train", "val"):
        write_folder(tmp_path / "data", split)
        make(tmp_path / "data", split)
    return tmp_path / "data"


@pytest.fixture
def shards(root: Path, tmp_path: Path) -> Path:
    """The same images in one shard for each split."""
    out = tmp_path / "shards"
    pack_folder(root, out, shard_bytes=10**6, progress=lambda _done, _total: None)
    for split in ("train", "val"):
        make(out, split)
    return out


def rewrite(folder: Path, change: Change) -> None:
    """Change the index and update its checksum."""
    header, arrays = open_mapped(folder / PLACE)
    copies = {name: array.copy() for name, array in arrays.items()}
    change(header, copies)
    (folder / PLACE).write_bytes(pack(header, copies))


def refused(folder: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands that read the index end with one line that names the file and the fault."""
    with pytest.raises(DataError) as caught:
        load_or_read(folder, "train")
    assert fault in str(caught.value)
    assert main(["data", "index", str(folder)]) == USER
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1
    assert shown.startswith(f"largebatch: {folder / PLACE}: its checksum is right but its content")


@pytest.mark.parametrize(
    ("change", "fault"),
    [pytest.param(*each, id=name) for name, each in (BOTH | FILES).items()],
)
def test_an_inconsistent_index_of_folders_is_refused(
    root: Path, change: Change, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(root, change)
    refused(root, fault, capsys)


@pytest.mark.parametrize(
    ("change", "fault"),
    [pytest.param(*each, id=name) for name, each in (BOTH | SHARDS).items()],
)
def test_an_inconsistent_index_of_shards_is_refused(
    shards: Path, change: Change, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(shards, change)
    refused(shards, fault, capsys)


def write(folder: Path, arrays: Arrays) -> None:
    """Write a file of these arrays with a valid checksum."""
    content = save({**arrays, CHECKSUM: np.zeros(CHECKSUM_BYTES, np.uint8)})[:-CHECKSUM_BYTES]
    (folder / PLACE).write_bytes(content + checksum([content]))


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"1", b"{", b"[" * 10**6, b'{"format": 5', b"\xff", b"9" * 10**4, b"{}"],
    ids=["empty", "list", "number", "cut", "brackets", "half", "no text", "digits", "no keys"],
)
def test_a_file_without_a_valid_header_is_not_an_index(root: Path, header: bytes) -> None:
    """Like a damaged one, it is rebuilt."""
    write(root, {HEADER: np.frombuffer(header, np.uint8)})
    assert not list(find_stored(root, "train"))
    assert len(load_or_read(root, "train")) == 4
    assert len(list(find_stored(root, "train"))) == 1


def test_a_huge_header_is_not_parsed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "MAX_HEADER", 10**6)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    write(root, {HEADER: np.full(10**6 + 1, ord(" "), np.uint8)})
    with pytest.raises(ValueError, match="its header has 1,000,001 bytes"):
        open_mapped(root / PLACE)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3", "F8_E5M2", "I8", "BOOL"])
def test_an_array_type_that_numpy_lacks_is_a_value_error(root: Path, kind: str) -> None:
    """16-bit and 8-bit numbers with a valid checksum."""
    size = 2 if kind == "BF16" else 1
    head = {
        name: {"dtype": each, "shape": [1], "data_offsets": [start, end]}
        for name, each, start, end in (
            ("labels", kind, 0, size),
            (CHECKSUM, "U8", size, size + 1),
        )
    }
    text = json.dumps(head).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(size + 1)
    (root / PLACE).write_bytes(content + checksum([content]))
    assert len(load_or_read(root, "train")) == 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=3),
    st.none() | st.integers(0, 2**12),
)
@example([], 0)
@example([], 4)
@example([(7, 255)], None)
@example([(0, 255), (1, 255), (2, 255)], None)
def test_any_change_under_a_valid_checksum_is_an_index_or_one_message(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]], end: int | None
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("any"))
    make(folder, "train")
    content = bytearray((folder / PLACE).read_bytes()[:-CHECKSUM_BYTES][:end])
    for place, byte in changes:
        if content:
            content[place % len(content)] = byte
    (folder / PLACE).write_bytes(bytes(content) + checksum([content]))
    try:
        assert len(load_or_read(folder, "train")) == 4
    except DataError as error:
        assert str(folder) in str(error)  # noqa: PT017 -- either outcome is right
