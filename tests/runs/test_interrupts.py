"""Requests to stop: which signals are one, which are two, and what the second one prints."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import with_default_signals
from short_runs import DIGITS

from largebatch.cli.main import STOPPED, main
from largebatch.runs.interrupts import describe_saved, stop_requests

pytestmark = pytest.mark.usefixtures("ends")

PROGRAM = """
import os, signal, sys, time
from largebatch.runs.interrupts import stop_requests
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with stop_requests(handles_signals=True) as wants_stop:
    print("ready", flush=True)
    try:
        for number in map(int, sys.stdin):
            os.kill(os.getpid(), number)
            print(wants_stop(), flush=True)
    except KeyboardInterrupt:
        print("at once", flush=True)
"""


def answers(
    *signals: tuple[signal.Signals, float],
    words: tuple[str, ...] = (),
    stderr: int = subprocess.PIPE,
) -> list[str]:
    """Return the output of a program that gets these signals, each after its seconds."""
    with subprocess.Popen(
        with_default_signals(sys.executable, "-c", PROGRAM, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=stderr,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = [process.stdout.readline().strip()]
        for number, seconds in signals:
            time.sleep(seconds)
            process.stdin.write(f"{number:d}\n")
            process.stdin.flush()
            found.append(process.stdout.readline().strip())
        process.stdin.close()
    return found[1:]


@pytest.mark.parametrize("number", ["SIGINT", "SIGUSR1"])
def test_every_signal_that_schedulers_send_is_a_request_to_stop(number: str) -> None:
    assert answers((signal.Signals[number], 0)) == ["True"]


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    assert answers((signal.SIGHUP, 0), words=("nohup",)) == ["False"]


def test_signals_that_come_together_are_one_request_and_a_later_one_is_the_second() -> None:
    several = [(signal.SIGUSR1, 0), (signal.SIGTERM, 0), (signal.SIGTERM, 0.1)]
    assert answers(*several, (signal.SIGTERM, 1.2)) == ["True", "True", "True", "at once"]


def test_a_run_that_is_stopped_at_once_names_what_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("largebatch.runs.run.start", stop)
    folder = tmp_path / "run"
    assert main(["train", str(DIGITS), "--out", str(folder)]) == STOPPED
    assert capsys.readouterr().err == "largebatch: stopped at once; nothing is saved\n"
    (folder / "checkpoints").mkdir(parents=True)
    for step in (7, 1200):
        (folder / "checkpoints" / f"step-{step:08d}.safetensors").touch()
    newest = folder / "checkpoints" / "step-00001200.safetensors"
    assert describe_saved(folder) == f"saved is {newest}, after 1,200 steps"


def test_a_time_limit_counts_from_when_it_is_said_to_begin() -> None:
    begun = time.monotonic() - 100
    for limit, is_over in ((90.0, True), (3600.0, False)):
        with stop_requests(handles_signals=False, limit=limit, begun=begun) as wants_stop:
            assert wants_stop() is is_over
