"""Workers that wait too long: the named worker, the operation, and no false alarms."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from on_workers import on_workers
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.distributed_c10d import Store

from largebatch.distributed import watch
from largebatch.distributed.connection import connect
from largebatch.distributed.notes import StoreNotes
from largebatch.distributed.watch import Watch
from largebatch.errors import WorkerFailedError

pytestmark = pytest.mark.usefixtures("ends")

LIMIT = 0.4
"""Seconds, of workers that are threads."""

REMEDY = "; look at its host, or give a longer --timeout"


class Unreachable(Store):
    """A store whose machine does not respond."""

    def add(self, key: str, _: int) -> int:
        raise ConnectionError(key)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Messages of the workers at their exit, and True if they print it."""
    found: list[tuple[str, bool]] = []

    def leave(message: str, *, print_it: bool) -> None:
        if (message, print_it) not in found:  # this one returns, and so it is called again
            found.append((message, print_it))

    monkeypatch.setattr(watch, "leave", leave)
    return found


@pytest.fixture
def workers() -> Iterator[list[Watch]]:
    store = HashStore()
    notes = [StoreNotes(store, rank=rank, workers=3) for rank in range(3)]
    made = [Watch(own, rank=rank, timeout=LIMIT) for rank, own in enumerate(notes)]
    yield made
    for each in made:
        each.close()


def wait_for(found: list[tuple[str, bool]], *, number: int) -> None:
    while len(found) < number:
        time.sleep(LIMIT / 20)


def test_waiting_workers_name_the_absent_one(
    ended: list[tuple[str, bool]], workers: list[Watch]
) -> None:
    """One of them prints it: worker 0 may be the absent one."""
    for worker in (1, 2):
        workers[worker].begin("all_reduce float32 [8]", range(3))
    wait_for(ended, number=2)
    message = f"worker 0 has not joined all_reduce float32 [8] for 0.4 s{REMEDY}"
    assert sorted(ended) == [(message, False), (message, True)]


def test_a_worker_waiting_in_another_operation_is_not_absent(
    ended: list[tuple[str, bool]], workers: list[Watch]
) -> None:
    for worker, name in enumerate(["broadcast int64 [1]", "all_reduce float32 [8]", "barrier"]):
        workers[worker].begin(name, range(3))
    wait_for(ended, number=3)
    message = "every worker waits in barrier for 0.4 s; look at the network between them"
    assert message in [text for text, _ in ended]
    assert sorted(printed for _, printed in ended) == [False, False, True]


def test_a_busy_worker_is_waited_for(ended: list[tuple[str, bool]], workers: list[Watch]) -> None:
    with workers[0].busy():
        number = workers[1].begin("broadcast uint8 [9]", [0, 1])
        time.sleep(4 * LIMIT)
    assert not ended
    workers[1].end(number)
    time.sleep(2 * LIMIT)
    assert not ended


def test_a_busy_worker_that_is_suspended_is_absent(
    ended: list[tuple[str, bool]], workers: list[Watch]
) -> None:
    with workers[0].busy():
        workers[1].begin("broadcast uint8 [9]", [0, 1])
        time.sleep(2 * LIMIT)
        workers[0].close()  # as if it were: it says nothing more
        wait_for(ended, number=1)
    assert ended == [
        (
            f"worker 0 has not joined broadcast uint8 [9] for 0.4 s{REMEDY}",
            True,
        )
    ]


def test_a_store_that_hangs_does_not_blind_the_watch(
    ended: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As does a TCPStore whose process is suspended: it ignores its own timeout."""
    monkeypatch.setattr(watch, "GRACE_SECONDS", LIMIT)
    go_on = threading.Event()

    class Hangs(Store):
        def add(self, key: str, number: int) -> int:
            go_on.wait()
            return number

    worker = Watch(StoreNotes(Hangs(), rank=1, workers=2), rank=1, timeout=LIMIT)
    worker.begin("barrier", [0, 1])
    wait_for(ended, number=1)
    go_on.set()
    worker.close()
    assert ended[0][0].startswith("a worker has not joined barrier for 0.4 s; the store that")


def test_until_the_first_update_a_worker_waits_six_times_as_long(
    ended: list[tuple[str, bool]],
) -> None:
    alone = Watch(None, rank=0, timeout=LIMIT, starting=True)
    alone.begin("barrier", range(2))
    time.sleep(3 * LIMIT)
    assert not ended
    alone.started()
    wait_for(ended, number=1)
    alone.close()
    assert ended[0][0].startswith("a worker has not joined barrier for 0.4 s; the store that")


def answering(asked: list[bool], *, leaves: bool) -> watch.Rescue:
    """Return a function that records whether the main thread is blocked."""

    def rescue(still: Callable[[], bool]) -> bool:
        asked.append(still())
        return leaves

    return rescue


def test_a_failed_operation_ends_the_worker_even_if_its_main_thread_misses_it(
    ended: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's are completed then, and the device, and what waits for it, stays where it is."""
    monkeypatch.setattr(watch, "GRACE_SECONDS", LIMIT)
    alone, asked = Watch(None, rank=1, timeout=100 * LIMIT), list[bool]()
    alone._period = LIMIT / 20
    alone.before_leaving(answering(asked, leaves=True))
    alone.begin("all_reduce float32 [8]", range(3), has_failed=lambda: True)
    wait_for(ended, number=1)
    alone.close()
    lost = "worker 1 lost contact with another worker (all_reduce float32 [8] failed)"
    assert ended == [(lost, True)]
    assert asked[0]


@pytest.mark.parametrize("failed", [True, False])
def test_a_worker_that_saves_its_state_is_not_ended(
    failed: bool, ended: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GRACE_SECONDS", LIMIT)
    alone, asked = Watch(None, rank=0, timeout=LIMIT), list[bool]()
    alone.before_leaving(answering(asked, leaves=False))
    alone.begin("barrier", range(2), has_failed=lambda: failed)
    time.sleep(6 * LIMIT)
    alone.close()
    assert asked == [True]
    assert not ended


def forgotten() -> bool:
    raise ValueError("no such handle")


def test_a_completed_operation_ends_no_worker(
    ended: list[tuple[str, bool]], workers: list[Watch]
) -> None:
    """Whether its result was waited for or not, or is forgotten by the library."""
    workers[0].begin("all_reduce float32 [8]", range(3), lambda: True)
    workers[1].begin("all_reduce float32 [8]", range(3), forgotten)
    with workers[2].during("barrier", range(3)):
        pass
    time.sleep(3 * LIMIT)
    assert not ended


@pytest.mark.parametrize("store", [None, Unreachable()], ids=["none", "unreachable"])
def test_without_a_store_a_worker_still_exits(
    ended: list[tuple[str, bool]], store: Store | None
) -> None:
    notes = None if store is None else StoreNotes(store, rank=0, workers=2)
    alone = Watch(notes, rank=0, timeout=LIMIT)
    alone.begin("barrier", range(2))
    wait_for(ended, number=1)
    alone.close()
    assert ended[0][0].startswith("a worker has not joined barrier for 0.4 s; the store that")


def suspend_one(library: str, how: str) -> None:
    """Run two barriers; in between, worker 1 is suspended while the others wait for it."""
    backend = connect("horovod" if library == "horovod" else "torch", timeout=10, splits=False)
    backend.all_reduce(torch.ones(5)).wait()
    if backend.rank == 1:
        if how == "suspended":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(120)
    backend.all_reduce(torch.ones(7)).wait()


@pytest.mark.long
@pytest.mark.parametrize("how", ["suspended", pytest.param("asleep", marks=pytest.mark.long)])
@pytest.mark.parametrize("library", ["torch", pytest.param("horovod", marks=pytest.mark.long)])
def test_a_silent_worker_ends_the_run_with_its_number(library: str, how: str) -> None:
    if library == "horovod":
        pytest.importorskip("horovod.torch", reason="horovod is not installed")
    message = re.escape(f"worker 1 has not joined all_reduce float32 [7] for 10 s{REMEDY}")
    with pytest.raises(WorkerFailedError, match=f"^{message}$"):
        on_workers(suspend_one, library, how, workers=3, horovod=library == "horovod")
