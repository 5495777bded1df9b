"""Start local workers through torch's elastic launcher, and end all of them when one fails.

A worker is a command, so the program that starts it can be a script, a notebook or a REPL.
`SubprocessContext`, which torchrun is built on, starts and ends the processes and collects exit
codes and error files. launch_agent around it is not used, because it loses the exit codes after a
signal, handles SIGHUP in a run under nohup, and listens on all interfaces.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from largebatch.distributed.environment import (
    LAUNCHER,
    LOST,
    configure_libraries,
    leave_with,
    loopback,
)
from largebatch.errors import (
    DivergedError,
    LargebatchError,
    PeerLostError,
    RequestedStopError,
    SmallerBatchError,
    WorkerFailedError,
    shorten,
)
from largebatch.optional import require_horovod
from largebatch.runs.interrupts import CTRL_C, STOPS, Requests, answering, say_heard

HOST = "127.0.0.1"
LEAVE_SECONDS = 10
"""Seconds that the others have to exit after a worker failed."""

CRASHED, USER, DIVERGED, MEMORY, STOPPED = 1, 2, 5, 6, 130
"""Exit codes of a worker that reported an error, an error that the user can fix, a divergence, that
the run can resume with a smaller device batch, or Ctrl-C before it could save; besides LOST."""

_ECHOES = {LOST: 1, -signal.SIGABRT: 2, STOPPED: 3, **{-number: 3 for number in (*STOPS, CTRL_C)}}
"""Exit codes caused by another worker's failure or a request to stop, most informative first; NCCL
aborts a process that has lost another one."""


def start_workers(
    command: Sequence[str],
    *,
    workers: int,
    horovod: bool = False,
) -> None:
    """Run `python *command` as several workers on this machine and wait for them.

    They get torchrun's variables, with `horovod` those of horovodrun too, and this process's import
    path. The first request to stop is passed on; the second one kills them.

    Raises LargebatchError with a worker's message if the user can fix it, RequestedStopError after
    the first request if the workers do not save, DivergedError if training
    diverged, SmallerBatchError after a worker's, else WorkerFailedError with the failing worker's
    traceback; KeyboardInterrupt after the second request.
    """
    configure_libraries()
    listener = socket.create_server((HOST, 0))  # TCPStore's own would be on all interfaces
    port = listener.getsockname()[1]
    server: AbstractContextManager[dict[str, str]] = nullcontext({})
    if horovod:
        server = horovods_server(f"localhost:{workers}", address=HOST, interface=loopback())
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder, server as shared:
        group = _Workers(
            name="workers",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(workers), tuple(command)),
            envs={
                rank: shared | _environment(rank, workers, port, horovod=horovod)
                for rank in range(workers)
            },
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            group.start()
            _store = TCPStore(
                HOST,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
            with answering(group.pass_on, *STOPS):
                result = group.wait(period=0.1)
        finally:
            group.close(signal.SIGKILL)
        if group.requests.again:
            raise KeyboardInterrupt
        assert result is not None  # it waited without a limit
        if result.failures:
            raise _cause(result.failures, stopping=group.requests.any, ended=group.ended)


@contextmanager
def horovods_server(placement: str, *, address: str, interface: str) -> Iterator[dict[str, str]]:
    """Run the server through which Horovod's workers find each other; yield its variables.

    `placement` has hosts and numbers of workers as horovodrun's -H has them (a:2,b:2). They reach
    the server at `address`, and each other through the network interface of this name. horovodrun's
    own server is not used, because it listens on all interfaces.
    """
    require_horovod()
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    hosts = parse_hosts(placement)
    with RendezvousHTTPServer((address, 0), RendezvousHandler, 0) as server:
        server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_IFACE": interface,
                "HOROVOD_HOSTNAME": "localhost",
                "NCCL_SOCKET_IFNAME": interface,
            }
        finally:
            server.shutdown()  # else its thread would use the closed socket


class _Workers(SubprocessContext):
    """Local processes; this process's signals are passed on by `pass_on` and not by torch."""

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401 -- torch's own
        super().__init__(**arguments)
        self.requests = Requests()
        self.ended: set[int] | None = None
        """Workers that exited by themselves; None until one has failed."""

    def start(self) -> None:
        """Start the workers without changing this process's signal handlers."""
        # torch would log lines beside the one message that start_workers raises.
        logging.getLogger(SubprocessContext.__module__).setLevel(logging.CRITICAL)
        self._start()  # type: ignore[no-untyped-call]  # torch's stubs

    def pass_on(self, number: int, *_: object) -> None:
        """Make the workers save and exit; the second time, kill them.

        A suspended worker (SIGSTOP) is continued, because all would wait for it.
        """
        first = not self.requests.any
        self.requests.add(number)
        if first:
            say_heard()
        passed = CTRL_C if number == signal.SIGINT else signal.Signals(number)
        for handler in self.subprocess_handlers.values():
            if self.requests.again:
                handler.proc.send_signal(signal.SIGKILL)
            elif first:
                handler.proc.send_signal(signal.SIGCONT)  # then the other gets to the main thread
                handler.proc.send_signal(passed)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """End the running workers by SIGTERM; kill them after `timeout`, or LEAVE_SECONDS."""
        if self.ended is None:
            self.ended = set(self._failures)
        super().close(death_sig, timeout or LEAVE_SECONDS)


def _cause(
    failures: Mapping[int, ProcessFailure], *, stopping: bool, ended: Collection[int] | None
) -> Exception:
    """Return the first failure that no other one caused; else the most informative one."""
    silent = [
        rank
        for rank, failure in failures.items()
        if failure.exitcode == -signal.SIGKILL and ended is not None and rank not in ended
    ]

    def informative(rank: int) -> int:
        return len(_ECHOES) if rank in silent else _ECHOES.get(failures[rank].exitcode, 0)

    rank = min(failures, key=informative)
    failure = failures[rank]
    if stopping and failure.exitcode in _ECHOES:
        return RequestedStopError("stopped before the workers had finished")
    if failure.exitcode in {LOST, -signal.SIGABRT} and silent:
        names = shorten([str(each) for each in sorted(silent)])
        message = f"{_describe(failure)}; did not respond and was killed: worker {names}"
        return WorkerFailedError(f"{message}; look at its host, or give a longer --timeout")
    kinds = {USER: LargebatchError, DIVERGED: DivergedError, MEMORY: SmallerBatchError}
    if not Path(failure.error_file).exists():
        kinds = {}
    return kinds.get(failure.exitcode, WorkerFailedError)(_describe(failure))


def _describe(failure: ProcessFailure) -> str:
    if Path(failure.error_file).exists():
        return failure.message
    code = failure.exitcode
    how = f"killed by {failure.signal_name()}" if code < 0 else f"exit code {code}"
    return f"worker {failure.local_rank} exited without reporting: {how}"


def _environment(rank: int, workers: int, port: int, *, horovod: bool) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    if horovod:
        numbers |= {"HOROVOD_RANK": rank, "HOROVOD_SIZE": workers}
        numbers |= {"HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": workers}
        numbers |= {"HOROVOD_CROSS_RANK": 0, "HOROVOD_CROSS_SIZE": 1}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # worker 0 opens none
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",  # and not the folder they are started in
        LAUNCHER: str(os.getpid()),
    }


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Run a worker of start_workers: write errors to its file, and exit when the launcher is gone.

    An error ends the process at once, because threads of libraries may still be busy.
    """
    leave_with(int(os.environ[LAUNCHER]))
    try:
        yield
    except DivergedError as error:
        code, message = DIVERGED, str(error)
    except SmallerBatchError as error:
        code, message = MEMORY, str(error)
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
    leave_with_error(code, message)


def leave_with_error(code: int, message: str) -> NoReturn:
    """Write the error of a worker of start_workers for its launcher, and end the process."""
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": message, "timestamp": time.time()}), encoding="utf-8")
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
