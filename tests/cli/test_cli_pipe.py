"""Output that somebody stops reading: `largebatch ... | head` ends quietly."""

import os
import subprocess
import sys

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


def test_another_pipe_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object) -> int:
        raise BrokenPipeError("to a worker")

    monkeypatch.setattr("largebatch.cli.main._doctor", breaks)
    with pytest.raises(BrokenPipeError, match="to a worker"):
        main(["doctor"])
