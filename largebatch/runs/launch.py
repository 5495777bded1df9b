"""Start local workers through torch's elastic launcher, and end all of them when one ends badly.

A worker is a command, so nothing is needed of the program that starts it: it can be a script, a
notebook or a REPL. `SubprocessContext`, which torchrun is built on, starts and ends the processes
and collects exit codes and error files; launch_agent around it is not used, because it loses the
exit codes after a signal, takes SIGHUP from a run under nohup, and listens on all interfaces.
Workers meet at a store in this process, which listens on the loopback interface only.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from largebatch.distributed.environment import LAUNCHER
from largebatch.errors import LargebatchError, PeerLostError, WorkerFailedError
from largebatch.runs.interrupts import HEARD, STOPS, Requests, answering, show_cursor

HOST = "127.0.0.1"
LEAVE_SECONDS = 10
"""How long the others have to leave after a worker failed."""

CRASHED, USER, LOST, STOPPED = 1, 2, 3, 130
"""Exit codes of a worker that reported: an error, one the user can fix, the loss of a peer, Ctrl-C
before it could save."""

_ECHOES = {LOST: 1, STOPPED: 2, **{-number: 2 for number in STOPS}}
"""Exit codes that another worker's failure or a request to stop causes, the telling one first."""


def start_workers(command: Sequence[str], *, workers: int) -> None:
    """Run `python *command` as several workers on this machine and wait for them.

    They find their place in the variables torchrun sets and import what this process can import.
    The first request to stop is passed on, as SIGTERM; the second one ends them.

    Raises LargebatchError with a worker's message where the user can fix it, WorkerFailedError with
    the failing worker's traceback otherwise, KeyboardInterrupt after the second request.
    """
    store = _open_store()
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder:
        group = _Workers(
            name="workers",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(workers), tuple(command)),
            envs={rank: _environment(rank, workers, store.port) for rank in range(workers)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            group.start()
            with answering(group.pass_on, *STOPS):
                result = group.wait(period=0.1)
        finally:
            group.close(signal.SIGKILL)
        if group.requests.again:
            raise KeyboardInterrupt
        assert result is not None  # it waited without a limit
        if result.failures:
            raise _cause(result.failures, stopping=group.requests.any)


def _open_store() -> TCPStore:
    """Open the store through which workers find each other; by itself it takes all interfaces."""
    listener = socket.create_server((HOST, 0))
    return TCPStore(
        HOST,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class _Workers(SubprocessContext):
    """Local processes; this process's signals are passed on by `pass_on` and not by torch."""

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 -- torch's own
        super().__init__(**arguments)
        self.requests = Requests()

    def start(self) -> None:
        """Start them, and leave this process's signal handlers as they are."""
        # Its lines would stand beside the one message that start_workers raises.
        logging.getLogger(SubprocessContext.__module__).setLevel(logging.CRITICAL)
        self._start()  # type: ignore[no-untyped-call]  # torch's stubs

    def pass_on(self, *_: object) -> None:
        """Let the workers save and leave; the second time, end them.

        One that is suspended (SIGSTOP) goes on, for otherwise all would wait for it.
        """
        first = not self.requests.any
        self.requests.add()
        if first:
            os.write(2, HEARD)
        for handler in self.subprocess_handlers.values():
            if self.requests.again:
                handler.proc.send_signal(signal.SIGKILL)
            elif first:
                handler.proc.send_signal(signal.SIGCONT)  # first: it goes to the main thread then
                handler.proc.send_signal(signal.SIGTERM)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = LEAVE_SECONDS) -> None:
        """End those that still run: ask them to (SIGTERM), and kill them after `timeout` s."""
        super().close(death_sig, timeout)
        show_cursor()


def _cause(failures: Mapping[int, ProcessFailure], *, stopping: bool) -> Exception:
    """Return the first failure that another one did not cause, or its echo if there is no more."""
    rank = min(failures, key=lambda rank: _ECHOES.get(failures[rank].exitcode, 0))
    failure = failures[rank]
    if stopping and failure.exitcode in _ECHOES:
        return LargebatchError("stopped before the workers could save")
    if not Path(failure.error_file).exists():
        code = failure.exitcode
        how = f"killed by {failure.signal_name()}" if code < 0 else f"exit code {code}"
        return WorkerFailedError(f"worker {rank} exited without reporting: {how}")
    kind = LargebatchError if failure.exitcode == USER else WorkerFailedError
    return kind(failure.message)


def _environment(rank: int, workers: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # worker 0 opens none
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",  # and not the folder they are started in
        LAUNCHER: str(os.getpid()),
    }


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Be a worker that start_workers started: leave errors in its file, and leave when it is gone.

    An error ends the process at once, since threads of libraries may be in the middle of something.
    """
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    try:
        yield
    except LargebatchError as error:
        code, message = USER, str(error)
    except PeerLostError as error:
        code, message = LOST, str(error)
    except KeyboardInterrupt:
        code, message = STOPPED, "stopped"
    except BaseException:  # the launcher raises it again
        code, message = CRASHED, f"worker {os.environ['RANK']} failed:\n{traceback.format_exc()}"
    else:
        return
    report = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    part = report.with_suffix(".part")
    part.write_text(json.dumps({"message": message, "timestamp": time.time()}), encoding="utf-8")
    part.replace(report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_launcher() -> None:
    while os.getppid() == int(os.environ[LAUNCHER]):
        time.sleep(1)
    os._exit(CRASHED)
