"""What a process prints cannot end its run: full disks, narrow encodings, closed streams."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from short_runs import DIGITS, SMALL, summary

from largebatch.cli import main as command_line
from largebatch.errors import CheckpointError, DataError
from largebatch.runs.folder import check_folder
from largebatch.runs.output import Output
from largebatch.storage import user_cache
from largebatch.tracking.console import Console, write_to

SHORT = ("duration={steps: 1}", "schedule.warmup=null", "polish=null", "evaluation={}", *SMALL)


def shell(command: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `largebatch WORDS` with the redirections of `command`, in which it is "$@"."""
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "largebatch", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "ended", "code"),
    [("train", 0, 0), ("resume", 75, 75), ("export", 0, 0), ("evaluate", 0, 1)],
)
def test_only_a_command_whose_output_is_its_result_fails_with_it(
    command: str, ended: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Output(io.BytesIO(), encoding="utf-8")
    lost.lost = True
    monkeypatch.setattr(sys, "stdout", lost)
    monkeypatch.setattr(command_line, "_call", lambda _: ended)
    assert command_line.main([command]) == code


@pytest.mark.long
def test_a_run_whose_output_finds_no_space_ends_as_it_would(tmp_path: Path) -> None:
    changes = [word for change in SHORT for word in ("--set", change)]
    words = ["train", str(DIGITS), *changes, "--out", str(tmp_path / "run")]
    done = shell('"$@" <&- >/dev/full', *words)
    assert done.returncode == 0
    assert done.stderr.count("cannot be written") == 1
    assert "Traceback" not in done.stderr
    assert summary(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(("redirection", "code"), [("> /dev/full", 1), ("<&- >&- 2>&-", 0)])
def test_a_command_whose_output_is_lost_fails_without_a_traceback(
    redirection: str, code: int
) -> None:
    done = shell(f'"$@" {redirection}', "recipes")
    assert done.returncode == code
    assert done.stderr.count("\n") == code


def test_characters_that_an_encoding_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    stream = Output(raw, encoding="ascii", errors="backslashreplace")
    print("top-1 – 5 ü", file=stream, flush=True)
    assert raw.getvalue() == b"top-1 \\u2013 5 \\xfc\n"
    plain = io.TextIOWrapper(raw := io.BytesIO(), encoding="latin-1")
    write_to(plain, "– ü")
    assert raw.getvalue() == b"\\u2013 \xfc"


def test_a_process_without_streams_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    Console()._show("line")


def test_a_name_that_is_not_utf_8_and_a_missing_home_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CheckpointError, match="--out"):
        check_folder(Path(os.fsdecode(b"run-\xff")), resume=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        user_cache()
