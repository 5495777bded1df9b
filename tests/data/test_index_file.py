import os
from pathlib import Path

import numpy as np
import pytest

from largebatch.data.index.index import Arrays, open_mapped, pack, unpack
from largebatch.storage import write_whole

ARRAYS: Arrays = {
    "numbers": np.arange(7, dtype=np.int64),
    "table": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "nothing": np.zeros(0, dtype=np.uint32),
}


def test_arrays_round_trip_and_are_read_only() -> None:
    header, found = unpack(pack({"name": "\udcff \u00e9"}, ARRAYS))
    assert header == {"name": "\udcff \u00e9"}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
        with pytest.raises(ValueError, match="read-only"):
            found[name][...] = 1
        assert found[name].ctypes.data % 8 == 0


def test_an_array_of_many_chunks_is_checked_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "file"
    numbers = np.arange(200_000, dtype=np.int64)
    write_whole(file, pack({}, {"numbers": numbers}))
    np.testing.assert_array_equal(open_mapped(file)[1]["numbers"], numbers)
    with file.open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        opened.write(b"\x01")
    with pytest.raises(ValueError, match="damaged"):
        open_mapped(file)


def test_a_failed_write_keeps_the_previous_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"before")

    def fail(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"after")
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == {path: b"before"}
