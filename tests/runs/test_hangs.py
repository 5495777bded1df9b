"""Two workers over Gloo, of which one does not come: its name, its place, and the dumps."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from on_forked_workers import on_forked_workers
from on_workers import on_workers
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs

from largebatch.distributed.connection import connect
from largebatch.distributed.flight_recorder import (
    HangWatch,
    enable_recorder,
    recorder_variables,
)
from largebatch.errors import PeerLostError, WorkerFailedError
from largebatch.report.hangs import measure_hang, newest_dumps
from largebatch.runs.hangs import hangs_named
from largebatch.runs.run import run

TIMEOUT = 2.0

newer_torch = pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="torch 2.8 keeps the timeout that Gloo starts with"
)


def oversleep() -> None:
    time.sleep(3 * TIMEOUT)


def wait_for_a_worker(folder: Path) -> str:
    """Return the error of worker 0, which waits for a sum that worker 1 does not call."""
    backend = connect("torch", timeout=TIMEOUT)
    reducer = SimpleNamespace(sent_sizes=[5, 77])
    state = SimpleNamespace(
        progress=SimpleNamespace(step=11), updater=SimpleNamespace(reducer=reducer)
    )
    session = cast("Any", SimpleNamespace(backend=backend, state=state))
    for _ in range(3):
        backend.all_reduce(torch.ones(5)).wait()
    if backend.rank == 1:
        with hangs_named(session, folder):
            oversleep()
        return ""
    with pytest.raises(PeerLostError) as caught, hangs_named(session, folder):
        backend.all_reduce(torch.ones(77)).wait()
    return str(caught.value)


@newer_torch
def test_the_error_names_worker_collective_size_update_and_place(tmp_path: Path) -> None:
    line = on_forked_workers(wait_for_a_worker, tmp_path, workers=2)
    for part in ("worker 1", "in oversleep", "all_reduce 4", "77 float32", "group 2 of 2", "12"):
        assert part in line
    folder = newest_dumps(tmp_path)
    assert folder is not None
    hang = measure_hang(folder)
    assert [(worker.rank, worker.how, worker.last) for worker in hang.missing] == [(1, "host", 3)]
    # JSON with torch's own keys: nothing here is a pickle.
    dumps = [json.loads(path.read_bytes()) for path in sorted(folder.glob("worker-*.json"))]
    assert [dump["largebatch"]["worker"] for dump in dumps] == [0, 1]
    assert dumps[0]["entries"][-1]["input_sizes"] == [[77]]


def test_a_late_collective_is_not_blamed_for_a_later_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dumps are written before the timeout; the collective may end in what is left of it."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    store = HashStore()
    watch = HangWatch(
        store, Path(), timeout=lambda: TIMEOUT, describe=dict, explain=lambda *_: "a line"
    )
    store.set("hang/event", "now")
    store.set("hang/line", "worker 1")
    for seconds, line in ((0.0, "worker 1"), (TIMEOUT + 1, "")):
        monkeypatch.setattr(watch, "_dump_time", time.monotonic() - seconds)
        assert watch.line() == line


def suspend_one(folder: Path) -> None:
    """Train; worker 1 is suspended when two updates have been made."""

    def stop(step: int) -> float:
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return 0.1

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("largebatch.runs.state.build_schedule", lambda *_, **__: stop)
        run("digits_96", out=folder, timeout=TIMEOUT, report=False)


def test_the_variables_are_set_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in recorder_variables("2.8.1"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    enable_recorder()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    for name in recorder_variables("2.8.1"):
        monkeypatch.delenv(name, raising=False)


@newer_torch
@pytest.mark.long
@pytest.mark.usefixtures("ends")
def test_a_run_names_a_suspended_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("largebatch.runs.launch.LEAVE_SECONDS", 1)
    with pytest.raises(WorkerFailedError, match="worker 1 .*wrote no dump"):
        on_workers(suspend_one, tmp_path / "run", workers=2)
