"""Start local workers through torch's elastic launcher, and end all of them when one ends badly.

A worker is a command, so nothing is needed of the program that starts it: it can be a script, a
notebook or a REPL. `SubprocessContext`, which torchrun is built on, starts and ends the processes
and collects exit codes and error files; launch_agent around it is not used, because it loses the
exit codes after a signal, takes SIGHUP from a run under nohup, and listens on all interfaces.
Workers meet at a store in this process, which listens on the loopback interface only.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from largebatch.distributed.dropped import DroppedWorkers
from largebatch.distributed.environment import (
    ABSENT,
    LAUNCHER,
    LOST,
    let_threads_sleep,
    loopback,
)
from largebatch.distributed.watch import leave_with, report
from largebatch.errors import (
    DivergedError,
    LargebatchError,
    PeerLostError,
    WorkerFailedError,
)
from largebatch.optional import require_horovod
from largebatch.runs.interrupts import HEARD, STOPS, Requests, answering, show_cursor

HOST = "127.0.0.1"
LEAVE_SECONDS = 10
"""How long the others have to leave after a worker failed, or to go on without it."""

CRASHED, USER, DIVERGED, STOPPED = 1, 2, 5, 130
"""Exit codes of a worker that reported: an error, one the user can fix, training that diverged,
Ctrl-C before it could save; and LOST and ABSENT."""

_ECHOES = {ABSENT: 1, LOST: 2, STOPPED: 3, **{-number: 3 for number in STOPS}}
"""Exit codes that another worker's failure or a request to stop causes, the telling one first."""


def start_workers(
    command: Sequence[str], *, workers: int, horovod: bool = False, optional: Collection[int] = ()
) -> None:
    """Run `python *command` as several workers on this machine and wait for them.

    They find their place in the variables torchrun sets, and with `horovod` in those of horovodrun
    as well, and import what this process can import.
    The first request to stop is passed on, as SIGTERM; the second one ends them.
    An `optional` worker may fail: it is no error if the others note that they go on without it, and
    succeed.

    Raises LargebatchError with a worker's message where the user can fix it, DivergedError where
    training diverged, WorkerFailedError with the failing worker's traceback otherwise,
    KeyboardInterrupt after the second request.
    """
    let_threads_sleep()
    store = _open_store()
    server: AbstractContextManager[dict[str, str]] = nullcontext({})
    if horovod:
        server = horovods_server(f"localhost:{workers}", workers=workers)
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder, server as shared:
        group = _Workers(
            name="workers",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(workers), tuple(command)),
            envs={
                rank: shared | _environment(rank, workers, store.port, horovod=horovod)
                for rank in range(workers)
            },
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            optional=optional,
            dropped=DroppedWorkers(store),
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
            raise _cause(result.failures, stopping=group.requests.any, ended=group.ended)


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


@contextmanager
def horovods_server(
    hosts: str, *, workers: int, address: str = HOST, interface: str | None = None
) -> Iterator[dict[str, str]]:
    """Serve what workers of Horovod find each other through; yield where, as variables.

    `hosts` are as horovodrun has them (a:1,b:1); they reach this process at `address`, and each
    other through the network interface of this name, None: loopback.
    horovodrun's own server takes all interfaces, and so it is not used.
    """
    require_horovod()
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    interface = interface or loopback()
    with RendezvousHTTPServer((address, 0), RendezvousHandler, 0) as server:
        server.init(get_host_assignments(parse_hosts(hosts), workers))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": interface,
            "HOROVOD_HOSTNAME": "localhost",
            "NCCL_SOCKET_IFNAME": interface,
        }
        try:
            yield own
        finally:
            server.shutdown()  # else its thread goes on with the socket that is closed


class _Workers(SubprocessContext):
    """Local processes; this process's signals are passed on by `pass_on` and not by torch."""

    def __init__(
        self,
        *,
        optional: Collection[int],
        dropped: DroppedWorkers,
        **arguments: Any,  # noqa: ANN401 -- torch's own
    ) -> None:
        super().__init__(**arguments)
        self._optional, self._dropped = set(optional), dropped
        self._unexplained: dict[int, float] = {}
        """Optional workers that failed, and until when the others may note it."""

        self.requests = Requests()
        self.ended: set[int] | None = None
        """Workers that ended by themselves, once one has failed."""

    def start(self) -> None:
        """Start them, and leave this process's signal handlers as they are."""
        # Its lines would stand beside the one message that start_workers raises.
        logging.getLogger(SubprocessContext.__module__).setLevel(logging.CRITICAL)
        self._start()  # type: ignore[no-untyped-call]  # torch's stubs

    def pass_on(self, *_: object) -> None:
        """Make the workers save and leave; the second time, end them.

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

    def _poll(self) -> RunProcsResult | None:
        """Return the result once all have ended, or one has whose end is not the others' loss."""
        running, waits = self._running_local_ranks, False
        for rank in sorted(running & self._optional):
            process = self.subprocess_handlers[rank].proc
            code = process.poll()
            if code in {None, 0, USER, DIVERGED}:  # what the user can fix ends all
                continue
            if self._dropped.include(rank):
                running.discard(rank)
                failure = ProcessFailure(rank, process.pid, code, self.error_files[rank])
                show_cursor()
                sys.stderr.write(f"largebatch: {_describe(failure)}; the others go on\n")
            else:
                until = self._unexplained.setdefault(rank, time.monotonic() + LEAVE_SECONDS)
                waits = waits or time.monotonic() < until
        others = [rank for rank in running if rank not in self._unexplained]
        if waits and all(self.subprocess_handlers[rank].proc.poll() is None for rank in others):
            return None
        if running and running <= self._optional and all(map(self._dropped.include, running)):
            for rank in running:  # suspended, and nothing waits for it
                self.subprocess_handlers[rank].proc.kill()
            running.clear()
        found: RunProcsResult | None = super()._poll()
        return found

    def close(self, death_sig: signal.Signals | None = None, timeout: int = LEAVE_SECONDS) -> None:
        """End those that still run: ask them to (SIGTERM), and kill them after `timeout` s."""
        if self.ended is None:
            self.ended = set(self._failures)
        super().close(death_sig, timeout)
        show_cursor()


def _cause(
    failures: Mapping[int, ProcessFailure], *, stopping: bool, ended: Collection[int] | None
) -> Exception:
    """Return the first failure that another one did not cause, or its echo if there is no more.

    A worker that was killed and is not among the `ended` did not leave when it was asked to.
    """

    def echo(rank: int) -> int:
        code = failures[rank].exitcode
        if code == -signal.SIGKILL and ended is not None and rank not in ended:
            return len(_ECHOES)
        return _ECHOES.get(code, 0)

    rank = min(failures, key=echo)
    failure = failures[rank]
    if stopping and failure.exitcode in _ECHOES:
        return LargebatchError("stopped before the workers could save")
    kinds = {USER: LargebatchError, DIVERGED: DivergedError}
    if not Path(failure.error_file).exists():
        kinds = {}
    return kinds.get(failure.exitcode, WorkerFailedError)(_describe(failure))


def _describe(failure: ProcessFailure) -> str:
    """Return what a worker reported, else how it ended."""
    if Path(failure.error_file).exists():
        return failure.message
    code = failure.exitcode
    how = f"killed by {failure.signal_name()}" if code < 0 else f"exit code {code}"
    return f"worker {failure.local_rank} exited without reporting: {how}"


def _environment(rank: int, workers: int, port: int, *, horovod: bool) -> dict[str, str]:
    own = {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(workers),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(workers),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
    return {
        **(own if horovod else {}),
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
    """Run a worker of start_workers: write errors to its file, and end when the launcher is gone.

    An error ends the process at once, since threads of libraries may be in the middle of something.
    """
    leave_with(int(os.environ[LAUNCHER]))
    try:
        yield
    except DivergedError as error:
        code, message = DIVERGED, str(error)
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
    report(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
