"""Output into a pipe: progress in plain lines, and a quiet end where somebody stops reading."""

import os
import subprocess
import sys
from typing import NoReturn

import pytest

from largebatch.cli.main import UNREAD, main


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
