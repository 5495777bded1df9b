"""Local workers: their results and errors, what ends them, and what they are reached through."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from on_workers import on_workers
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from largebatch.distributed.connection import connect
from largebatch.distributed.environment import LAUNCHER
from largebatch.distributed.torch_distributed import TorchDistributed
from largebatch.errors import DataError, LargebatchError, RequestedStopError, WorkerFailedError
from largebatch.runs.interrupts import CTRL_C, stop_requests
from largebatch.runs.launch import Command, Processes, start_workers

pytestmark = pytest.mark.usefixtures("ends")
long = pytest.mark.long

PROGRAM = """
import sys, on_workers, test_launch
from pathlib import Path
on_workers.on_workers(getattr(test_launch, sys.argv[2]), Path(sys.argv[1]), workers=2)
"""


def all_listeners(library: str) -> list[str]:
    """Return the addresses at which this worker and its launcher listen, as Linux writes them."""
    backend = connect("horovod" if library == "horovod" else "torch")
    backend.all_reduce(torch.ones(1)).wait()
    held = set()
    for process in ("self", os.environ[LAUNCHER]):
        for path in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(str(path.readlink()))
    lines = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")).splitlines()
    sockets = [line.split() for line in lines]
    found = [own[1] for own in sockets if own[3] == "0A" and f"socket:[{own[9]}]" in held]
    backend.barrier()
    backend.close()
    return found


def fail_on_one(how: str) -> None:
    """Meet once; then worker 1 ends in some way while worker 0 waits for it."""
    backend = TorchDistributed()
    backend.barrier()
    if backend.rank == 1:
        if how == "raise":
            raise ZeroDivisionError("one of us")
        if how == "user":
            raise DataError("image.png: not an image")
        os.kill(os.getpid(), signal.SIGKILL)
    backend.all_reduce(torch.ones(1)).wait()


def sleep_until_asked(folder: Path) -> str:
    """Show that this worker is here, then wait for SIGTERM."""
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    (folder / str(os.getpid())).touch()
    for _ in range(1200):
        if asked:
            return "asked"
        time.sleep(0.1)
    return "never asked"


def stop_when_asked(folder: Path) -> str:
    """Answer as a run does, and take a while to save."""
    with stop_requests(handles_signals=False) as wants_stop:
        (folder / str(os.getpid())).touch()
        while not wants_stop():
            time.sleep(0.05)
        time.sleep(1.5)
        return "saved"


def sleep(folder: Path) -> None:
    """Show that this worker is here, and do not answer requests to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(CTRL_C, signal.SIG_IGN)
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def here(folder: Path) -> list[int]:
    """Wait until both workers are there; return their process ids."""
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.05)
    return [int(path.name) for path in folder.iterdir()]


@contextmanager
def once_here(folder: Path, act: Callable[[], None]) -> Iterator[None]:
    """Act in a thread as soon as both workers are there."""

    def wait_and_act() -> None:
        here(folder)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("library", ["torch", pytest.param("horovod", marks=pytest.mark.long)])
def test_local_workers_listen_on_the_loopback_interface_only(library: str) -> None:
    if library == "horovod":
        pytest.importorskip("horovod.torch", reason="horovod is not installed")
    found = on_workers(all_listeners, library, workers=2, horovod=library == "horovod")
    assert found
    assert {address.split(":")[0] for address in found} == {"0100007F"}


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        pytest.param("kill", WorkerFailedError, "^worker 1 .*SIGKILL$", marks=long),
        pytest.param("raise", WorkerFailedError, "^worker 1 failed:\nTraceback", marks=long),
        pytest.param("user", LargebatchError, "^image.png: not an image$", marks=long),
    ],
)
def test_a_worker_that_fails_ends_the_others_and_its_error_is_raised_once(
    how: str, error: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message) as caught:
        on_workers(fail_on_one, how, workers=2)
    assert str(caught.value).count("ZeroDivisionError: one of us") == (how == "raise")
    assert how != "kill" or capfd.readouterr() == ("", "")


BY_RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
time.sleep(float(sys.argv[2]))
"""


def test_a_lost_worker_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("largebatch.runs.launch.LEAVE_SECONDS", 0.5)
    with pytest.raises(WorkerFailedError, match="^worker 1 .*SIGKILL$"):
        start_workers(["-S", "-c", BY_RANK, "SIGKILL", "600"], workers=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        pytest.param([3, -9, 3], "worker 1 .*: killed by SIGKILL", id="killed"),
        pytest.param([-15, 1, 3], "worker 1 .*: exit code 1", id="crashed"),
        pytest.param([-15, 3, 3], "worker 1 .*: exit code 3", id="lost"),
    ],
)
def test_the_failure_that_another_one_did_not_cause_is_raised(
    tmp_path: Path, codes: list[int], message: str
) -> None:
    commands = [Command(f"worker {rank}", [], {}) for rank in range(len(codes))]
    group = Processes("true", commands, folder=tmp_path)
    for rank, code in enumerate(codes):
        group._failures[rank] = ProcessFailure(rank, pid=1, exitcode=code, error_file="absent")
    error = group.error(stopping=False)
    assert isinstance(error, WorkerFailedError)
    assert re.match(message, str(error))
    assert isinstance(group.error(stopping=True), RequestedStopError) == (codes == [-15, 3, 3])


def test_a_request_to_stop_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with once_here(tmp_path, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert on_workers(sleep_until_asked, tmp_path, workers=2) == "asked"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert capfd.readouterr().err.count("\n") == 1  # the note of one process, not of each


@pytest.mark.long
def test_a_second_request_ends_workers_that_do_not_answer(tmp_path: Path) -> None:
    def ask_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)  # sooner is the same request

    with once_here(tmp_path, ask_twice), pytest.raises(KeyboardInterrupt):
        on_workers(sleep, tmp_path, workers=2)
    assert not any(Path(f"/proc/{worker}").exists() for worker in here(tmp_path))


@pytest.mark.long
def test_a_signal_to_every_process_is_one_request(tmp_path: Path) -> None:
    """Schedulers send it to all, and the launcher passes it on besides."""

    def signal_all() -> None:
        for process in [*here(tmp_path), os.getpid()]:
            os.kill(process, signal.SIGUSR1)

    with once_here(tmp_path, signal_all):
        assert on_workers(stop_when_asked, tmp_path, workers=2) == "saved"


@pytest.mark.long
def test_a_request_to_stop_wakes_a_worker_that_is_suspended(tmp_path: Path) -> None:
    def suspend_one() -> None:
        os.kill(here(tmp_path)[0], signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)

    with once_here(tmp_path, suspend_one):
        assert on_workers(sleep_until_asked, tmp_path, workers=2) == "asked"


def test_workers_leave_when_what_started_them_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "sleep"]
    with subprocess.Popen(command, env=environment) as launcher:
        workers = here(tmp_path)
        launcher.kill()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        time.sleep(0.05)


@pytest.mark.long
def test_pages_are_imported_after_the_training(
    tmp_path: Path,
) -> None:
    """Neither timm nor torchvision has anything to do for a network of this package."""
    changes = ["model={name: cifar_resnet8}", "polish=null"]
    words = [word for change in changes for word in ("--set", change)]
    words += ["--workers", "2", "--max-steps", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "largebatch", "train", "digits_96", *words],
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    before, _, after = done.stdout.partition("step 1/")
    imports, later = (
        [line.rpartition("|")[2].strip() for line in part.splitlines() if "import time:" in line]
        for part in (before, after)
    )
    pages = {"jinja2", "matplotlib.figure", "largebatch.report.page"}
    assert pages <= set(later)
    unused = {
        "timm",
        "torchvision",
        "sklearn",
        "scipy",
        "pandas",
        "wandb",
        "optuna",
        "largebatch.lab",
    }
    unused |= {"largebatch.audit", "torch._inductor.compile_fx", "tensorboard", "nvidia.dali"}
    assert not unused & {*imports, *later}
    assert not pages & set(imports)
