"""How a command ends early: at Ctrl-C twice, and where nobody reads any longer."""

import os
import subprocess
import sys
from typing import NoReturn

import pytest
from programs import with_default_signals

from largebatch.cli import main as command_line
from largebatch.cli.main import STOPPED, UNREAD, main
from largebatch.runs.interrupts import StopRequests

PROGRAM = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == place:
            sys.meta_path.remove(self)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

place, module, *sys.argv[1:] = sys.argv[1:]
sys.meta_path.insert(0, Interrupts())
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_twice_at_the_start_prints_no_traceback() -> None:
    command = with_default_signals(sys.executable, "-c", PROGRAM, "torch", "largebatch", "doctor")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stderr in {"", "largebatch: stopped at once\n"}
    assert done.returncode == STOPPED


def test_an_interrupt_that_becomes_another_error_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in pydantic, where a KeyboardInterrupt becomes a SchemaError."""
    requests = StopRequests()
    monkeypatch.setattr(command_line, "_INTERRUPTS", requests)
    monkeypatch.setattr("largebatch.cli.doctor.examine", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])
    requests.add()
    assert main(["doctor"]) == STOPPED
    assert capsys.readouterr().err == "largebatch: stopped at once\n"


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
