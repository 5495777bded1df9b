"""Atomic files and folders, and leftovers of killed writers."""

import os
import stat
from pathlib import Path

import pytest

from largebatch.errors import CheckpointError, DataError
from largebatch.storage import new_folder, remove_leftovers, whole_file, write_whole, writing


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", [".", "/", "empty/.."])
def test_the_working_directory_is_not_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (tmp_path / "here" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    refused = pytest.raises(DataError, match=f"^{out}: ")
    with refused, new_folder(Path(out)):
        pass
    here = Path(".")  # noqa: PTH201 -- what a command line has
    with pytest.raises(CheckpointError, match=r"^\.: "), writing(here):
        write_whole(here, b"a page")


def test_a_folder_that_another_process_filled_meanwhile_is_kept(tmp_path: Path) -> None:
    def write_late() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "own").write_text("late")
            (tmp_path / "out").mkdir()
            (tmp_path / "out/first").write_text("whole")

    with pytest.raises(DataError):
        write_late()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]


def test_only_partial_files_are_leftovers(tmp_path: Path) -> None:
    (tmp_path / "notes.partial").write_text("a name that is not ours")
    with whole_file(tmp_path / "summary.json") as file:
        file.write(b"{}")
    (tmp_path / ".summary.json.0123.partial").write_bytes(b"{")
    remove_leftovers(tmp_path, tmp_path / "absent")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.partial", "summary.json"]


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="expected a file"):
            write_whole(tmp_path / name, b"a page")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "link").is_symlink()
