"""Ctrl-C twice while a command starts prints no traceback, wherever it comes."""

import subprocess
import sys

import pytest

from largebatch.cli import main as command_line
from largebatch.cli.main import STOPPED, main
from largebatch.runs.interrupts import Requests

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


@pytest.mark.parametrize(
    ("place", "module", "words", "code"),
    [
        pytest.param("torch", "largebatch", ["doctor"], STOPPED, id="its command"),
    ],
)
def test_ctrl_c_twice_at_the_start_prints_no_traceback(
    place: str, module: str, words: list[str], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, place, module, *words],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stderr in {"", "largebatch: stopped at once\n"}
    assert done.returncode == code


def test_an_interrupt_that_becomes_another_error_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in pydantic, where a KeyboardInterrupt becomes a SchemaError."""
    requests = Requests()
    monkeypatch.setattr(command_line, "_INTERRUPTS", requests)
    monkeypatch.setattr("largebatch.cli.doctor.examine", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])
    requests.add()
    assert main(["doctor"]) == STOPPED
    assert capsys.readouterr().err == "largebatch: stopped at once\n"
