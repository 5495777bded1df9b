"""How a command ends early: at Ctrl-C twice, and when nobody reads its output."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from programs import with_default_signals

from largebatch.cli import main as command_line
from largebatch.cli.main import STOPPED, UNREAD, main
from largebatch.runs.interrupts import StopRequests

INTERRUPTED_IMPORT = Path(__file__).parents[1] / "support" / "interrupted_import.py"


def assert_no_traceback(stderr: str) -> None:
    assert "Traceback" not in stderr
    assert stderr.count("\n") <= 1


def test_ctrl_c_twice_at_the_start_prints_no_traceback() -> None:
    command = with_default_signals(
        sys.executable, INTERRUPTED_IMPORT, "torch", "largebatch", "doctor"
    )
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == STOPPED
    assert_no_traceback(done.stderr)


def test_an_interrupt_that_becomes_another_error_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In pydantic, for example, a KeyboardInterrupt becomes a SchemaError."""
    requests = StopRequests()
    monkeypatch.setattr(command_line, "_INTERRUPTS", requests)
    monkeypatch.setattr("largebatch.cli.doctor.examine", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])
    requests.add()
    assert main(["doctor"]) == STOPPED
    assert_no_traceback(capsys.readouterr().err)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_is_gone_is_not_an_error(unbuffered: str) -> None:
    """Unbuffered, the first line fails; buffered, the flush at the end."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "largebatch", "explain", "polish"],
        check=False,
        stdout=write_end,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write_end)
    assert done.returncode == UNREAD
    assert done.stderr == b""


def test_a_broken_pipe_other_than_the_output_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_worker() -> NoReturn:
        raise BrokenPipeError("to a worker")

    monkeypatch.setattr("largebatch.cli.doctor.examine", lose_a_worker)
    with pytest.raises(BrokenPipeError):
        main(["doctor"])
