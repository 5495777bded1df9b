"""Start local workers, end all of them when one ends badly, and pass requests to stop on.

Each worker is a fresh process that finds its place in the environment variables torchrun would set,
and hands its result or its error back through a pipe. The first error that is not merely the echo
of another worker's end is raised here, once, and the other workers are stopped.
"""

import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from largebatch.distributed.environment import GRACE_SECONDS
from largebatch.errors import LargebatchError, PeerLostError, WorkerFailedError
from largebatch.runs.interrupts import STOPS, answering

LEAVE_SECONDS = 60.0
"""How long they have to finish the record of a run that ended in an orderly way."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection


def start_workers(function: Callable[..., T], *args: object, workers: int) -> T:
    """Call `function(*args)` in new processes on this machine and return worker 0's result.

    Raises LargebatchError with a worker's message where the user can fix it, WorkerFailedError with
    the failing worker's traceback otherwise. SIGINT and SIGTERM are passed on as SIGTERM.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    group: list[_Worker] = []
    patience = LEAVE_SECONDS
    with _passing_signals_on(group) as asked:
        try:
            for rank in range(workers):
                ours, theirs = context.Pipe(duplex=False)
                places = _environment(rank, workers=workers, port=port)
                process = context.Process(target=_work, args=(theirs, places, function, args))
                process.start()
                theirs.close()
                group.append(_Worker(rank, process, ours))
            result: T = _gather(group)
        except WorkerFailedError:
            patience = GRACE_SECONDS
            if asked.is_set():
                raise LargebatchError("stopped before the run began; nothing was saved") from None
            raise
        finally:
            _stop(group, patience)
    return result


def _work(
    pipe: Connection,
    places: dict[str, str],
    function: Callable[..., object],
    args: Sequence[object],
) -> None:
    """Run in the worker: call the function and send what came of it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(places)
    try:
        outcome: tuple[str, object] = ("done", function(*args))
    except PeerLostError as error:
        outcome = ("lost", str(error))
    except LargebatchError as error:
        outcome = ("user", str(error))
    except BaseException:  # the parent raises it again
        outcome = ("crash", f"worker {places['RANK']} failed:\n{traceback.format_exc()}")
    pipe.send(outcome)
    pipe.close()
    if outcome[0] != "done":
        # Threads of libraries may be in the middle of something, at which C++ would complain.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_with_parent() -> None:
    """Leave when the process that started this one is gone: nobody would wait for the result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _gather(group: Sequence[_Worker]) -> Any:  # noqa: ANN401 -- what the function returns
    """Wait for every worker; raise the first cause of failure, or its echo if there is no more."""
    waiting = list(group)
    result = echo = None
    deadline = math.inf
    while waiting and time.monotonic() < deadline:
        ready = wait(
            [worker.pipe for worker in waiting],
            None if math.isinf(deadline) else max(0.0, deadline - time.monotonic()),
        )
        for worker in [worker for worker in waiting if worker.pipe in ready]:
            waiting.remove(worker)
            kind, value = _receive(worker)
            _raise_cause(kind, value)
            if kind == "lost":
                echo, deadline = value, min(deadline, time.monotonic() + GRACE_SECONDS)
            elif worker.rank == 0:
                result = value
    if echo is not None:
        raise WorkerFailedError(echo)
    return result


def _raise_cause(kind: str, value: Any) -> None:  # noqa: ANN401 -- a message, or a result
    if kind == "user":
        raise LargebatchError(value)
    if kind == "crash":
        raise WorkerFailedError(value)


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        outcome: tuple[str, Any] = worker.pipe.recv()
    except EOFError:
        worker.process.join(GRACE_SECONDS)
        code = worker.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "crash", f"worker {worker.rank} ended without a word: {how}"
    return outcome


def _stop(group: Sequence[_Worker], patience: float) -> None:
    """Give workers some seconds to leave by themselves, then leave no process behind."""
    deadline = time.monotonic() + patience
    for worker in group:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


@contextmanager
def _passing_signals_on(group: Sequence[_Worker]) -> Iterator[threading.Event]:
    """Let workers save and leave when this process is asked to; the second time, end them.

    Yields whether it was asked.
    """
    asked = threading.Event()

    def pass_on(*_: object) -> None:
        for worker in group:
            if worker.process.is_alive():
                if asked.is_set():
                    worker.process.kill()
                else:
                    worker.process.terminate()
        asked.set()

    with answering(pass_on, *STOPS):
        yield asked


def _environment(rank: int, *, workers: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
