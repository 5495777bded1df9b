"""Output into a pipe: progress in plain lines, and a quiet end where somebody stops reading."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from class_folders import write_folder

from largebatch.cli.main import DONE, UNREAD, main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images without an index; the commands run beside it."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_folder(tmp_path / "data", split)
    return Path("data")


def test_importing_and_indexing_show_progress_in_a_pipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("largebatch.tracking.console.LINE_SECONDS", 0)
    number = len(list(folder.glob("*/*/*")))
    assert main(["data", "import", "imagefolder", str(folder), "--out", "shards"]) == DONE
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"importing: {number} of {number}"
    assert [line.split(":")[0] for line in others] == ["train", "val"]


def test_the_first_sheet_of_a_folder_shows_progress_and_the_second_has_nothing_to_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("cache").absolute()))
    assert main(["init", str(folder), "--out", "mine.yaml"]) == DONE
    for index in folder.glob(".*.index"):
        index.unlink()
    monkeypatch.setattr("largebatch.tracking.console.LINE_SECONDS", 0)
    capsys.readouterr()
    show = ["data", "show", "mine.yaml", "--data", str(folder)]
    assert main(show) == DONE
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("reading: ") for line in lines)
    ends = [line for line in lines if line == "reading: 4 of 4"]
    assert len(ends) == 4, "the indexes and the decoded pixels of two splits"
    assert main(show) == DONE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_mistake(unbuffered: str) -> None:
    """The pipe is closed before anything is written; unbuffered, the first line itself fails."""
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
        "from largebatch.cli.main import main; sys.exit(main(['explain', 'polish']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert (done.returncode, done.stderr) == (UNREAD, "")


def test_a_broken_pipe_other_than_the_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> NoReturn:
        raise BrokenPipeError("to a worker")

    monkeypatch.setattr("largebatch.cli.doctor.examine", breaks)
    with pytest.raises(BrokenPipeError, match="to a worker"):
        main(["doctor"])
