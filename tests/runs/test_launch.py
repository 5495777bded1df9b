import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from largebatch.distributed.environment import launched_rank
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.errors import (
    BackendError,
    DataError,
    LargebatchError,
    PeerLostError,
    WorkerFailedError,
)
from largebatch.runs.launch import start_workers

pytestmark = pytest.mark.usefixtures("ends")


def place() -> tuple[int | None, str]:
    return launched_rank(), os.environ["WORLD_SIZE"]


def fail_on_one(how: str) -> None:
    """Meet once; then worker 1 ends in some way while worker 0 waits for it."""
    backend = TorchDistributed()
    backend.barrier()
    if backend.rank == 1:
        if how == "raise":
            raise ZeroDivisionError("one of us")
        if how == "user":
            raise DataError("picture.png: not a picture")
        os.kill(os.getpid(), signal.SIGKILL)
    backend.all_reduce(torch.ones(1)).wait()


def lose_peer() -> str:
    """Worker 0 says how it learns that worker 1 is gone; worker 1 leaves without a word."""
    backend = TorchDistributed()
    backend.barrier()
    if backend.rank == 1:
        os._exit(0)
    try:
        backend.all_reduce(torch.ones(1)).wait()
    except PeerLostError as error:
        return str(error)
    return "nothing"


def sleep_until_asked(folder: Path) -> str:
    """Say that this worker is here, then wait for SIGTERM."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    (folder / str(launched_rank())).touch()
    return "asked" if asked.wait(120) else "never asked"


def test_worker_0s_result_is_returned() -> None:
    assert start_workers(place, workers=2) == (0, "2")


def test_a_workers_traceback_is_raised_once() -> None:
    with pytest.raises(WorkerFailedError) as caught:
        start_workers(fail_on_one, "raise", workers=2)
    message = str(caught.value)
    assert message.startswith("worker 1 failed:\nTraceback")
    assert message.count("ZeroDivisionError: one of us") == 1


def test_a_mistake_of_the_user_stays_one_line() -> None:
    with pytest.raises(LargebatchError, match="^picture.png: not a picture$"):
        start_workers(fail_on_one, "user", workers=2)


def test_a_killed_worker_takes_the_others_down() -> None:
    with pytest.raises(WorkerFailedError, match="worker 1 ended without a word: killed by SIGKILL"):
        start_workers(fail_on_one, "kill", workers=2)


def test_a_worker_that_left_silently_is_reported_by_the_others() -> None:
    with pytest.raises(WorkerFailedError, match="worker 1 ended without a word: exit code 0"):
        start_workers(lose_peer, workers=2)


def test_a_request_to_stop_is_passed_on(tmp_path: Path) -> None:
    def ask_when_all_are_here() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    asker = threading.Thread(target=ask_when_all_are_here)
    asker.start()
    handler = signal.getsignal(signal.SIGTERM)
    assert start_workers(sleep_until_asked, tmp_path, workers=2) == "asked"
    asker.join()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_torch_backend_says_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        BackendError, match="needs RANK, WORLD_SIZE, .* --workers N or with torchrun"
    ):
        TorchDistributed()
