"""Start processes through torch's elastic launcher, and end all of them when one fails.

Whatever this package runs in processes of its own is started here: the workers of a run, the runs
of a study, and the workers of a study on hosts of their own. A process is a command, so the program
that starts it can be a script, a notebook or a REPL. `SubprocessContext`, which torchrun is built
on, starts and ends the processes and collects exit codes and error files. launch_agent around it is
not used, because it loses the exit codes after a signal, handles SIGHUP in a run under nohup, and
listens on all interfaces.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
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
    WrongCardError,
    shorten,
)
from largebatch.optional import require_horovod
from largebatch.runs.interrupts import CTRL_C, STOPS, StopRequests, answering, print_stopping

HOST = "127.0.0.1"
LEAVE_SECONDS = 10
"""Seconds that the others have to exit after a process failed."""

CRASHED, USER, DIVERGED, MEMORY, WRONG_CARD, STOPPED = 1, 2, 5, 6, 7, 130
"""Exit codes of a process that reported an error, an error that the user can fix, a divergence,
that the run can resume with a smaller device batch, or without a device that computes wrong
numbers, or Ctrl-C before it could save; besides LOST."""

_CODES: dict[type[Exception], int] = {
    DivergedError: DIVERGED,
    SmallerBatchError: MEMORY,
    WrongCardError: WRONG_CARD,
    LargebatchError: USER,  # after its subclasses above: the first that fits counts
    PeerLostError: LOST,
    WorkerFailedError: CRASHED,  # of processes that this one started: it has the traceback
}
"""Exit codes of errors whose message says all; of others the traceback is reported."""

_ECHOES = {LOST: 1, -signal.SIGABRT: 2, STOPPED: 3, **{-number: 3 for number in (*STOPS, CTRL_C)}}
"""Exit codes caused by another process's failure or a request to stop, most informative first; NCCL
aborts a process that has lost another one."""

_SHOWN_LINES = 20
"""Last lines of the output of a process that exited without reporting, for a message."""


class Command(NamedTuple):
    """A process to start."""

    name: str
    """What messages call it: `worker 1`."""

    arguments: Sequence[str]
    """Arguments of the program."""

    environment: Mapping[str, str] = MappingProxyType({})
    """Variables besides those of this process."""


class Processes(SubprocessContext):
    """Processes of one program that are started, watched and ended together.

    Each has a session of its own, so that Ctrl-C reaches it through this process only, and this
    process's import path. The program reports an error by `reporting_errors`, into a file in
    `folder`. With `keeps_output` its output goes there too, and its end into the message of a
    process that exited without reporting; else it is that of this process.
    """

    def __init__(
        self,
        program: str,
        commands: Sequence[Command],
        *,
        folder: str | Path,
        keeps_output: bool = False,
    ) -> None:
        of_all = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONSAFEPATH": "1",  # and not the folder they are started in
            LAUNCHER: str(os.getpid()),
        }
        super().__init__(
            name="processes",
            entrypoint=program,
            args={rank: tuple(command.arguments) for rank, command in enumerate(commands)},
            envs={rank: of_all | dict(one.environment) for rank, one in enumerate(commands)},
            logs_specs=DefaultLogsSpecs(
                log_dir=str(folder), redirects=Std.ALL if keeps_output else Std.NONE
            ),
        )
        self.names = [command.name for command in commands]
        self.requests = StopRequests()
        self.ended: set[int] | None = None
        """Processes that exited by themselves; None until one has failed."""

    def start(self) -> None:
        """Start the processes without changing this process's signal handlers."""
        # torch would log lines beside the one message that is raised.
        logging.getLogger(SubprocessContext.__module__).setLevel(logging.CRITICAL)
        # Not super().start(), which replaces the signal handlers of this process.
        self._start()  # type: ignore[no-untyped-call]  # torch's stubs

    def run(self) -> None:
        """Start the processes and wait for them.

        The first request to stop is passed on; the second one kills them. Raises as `error`
        returns, and KeyboardInterrupt after the second request.
        """
        try:
            self.start()
            with answering(self.pass_on, *STOPS):
                self.wait(period=0.1)
        finally:
            self.close(signal.SIGKILL)
        if self.requests.again:
            raise KeyboardInterrupt
        error = self.error(stopping=self.requests.any)
        if error is not None:
            raise error

    def poll(self) -> bool:
        """Return True if all have ended; if one has failed, end the others first."""
        return self.wait(timeout=0) is not None

    def pass_on(self, number: int, *_: object) -> None:
        """Make the processes save and exit; the second time, kill them."""
        first = not self.requests.any
        self.requests.add(number)
        if first:
            print_stopping()
        if self.requests.again:
            self.kill()
        elif first:
            self.send(CTRL_C if number == signal.SIGINT else signal.Signals(number))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each process, but not to the children of one.

        A suspended process (SIGSTOP) is continued, because all would wait for it.
        """
        for handler in self.subprocess_handlers.values():
            handler.proc.send_signal(signal.SIGCONT)  # then the other gets to the main thread
            handler.proc.send_signal(number)

    def kill(self) -> None:
        """Kill each process that still runs, with its children; a signal handler may call this."""
        for handler in self.subprocess_handlers.values():
            if handler.proc.returncode is None:
                with suppress(ProcessLookupError):  # it has ended, and was not waited for
                    os.killpg(handler.proc.pid, signal.SIGKILL)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """End the running processes by SIGTERM; kill them after `timeout`, or LEAVE_SECONDS."""
        if self.ended is None:
            # Before the others are signalled: what ends after that may have ended by the signal.
            self.ended = set(self._failures)
        super().close(death_sig, timeout or LEAVE_SECONDS)

    def error(self, *, stopping: bool) -> Exception | None:
        """Return the first failure that no other one caused; else the most informative one.

        That is a LargebatchError with the message of a process whose error the user can fix,
        DivergedError if its training diverged, SmallerBatchError or WrongCardError after one in a
        process, RequestedStopError if they were `stopping` and one did not save, else a
        WorkerFailedError with its traceback. None if all succeeded.
        """
        failures = self._failures
        if not failures:
            return None
        silent = [
            rank
            for rank, failure in failures.items()
            if failure.exitcode == -signal.SIGKILL
            and self.ended is not None
            and rank not in self.ended
        ]

        # A process that did not answer SIGTERM comes last: it waited for one that had failed.
        def informative(rank: int) -> int:
            return len(_ECHOES) if rank in silent else _ECHOES.get(failures[rank].exitcode, 0)

        failure = failures[min(failures, key=informative)]
        if stopping and failure.exitcode in _ECHOES:
            return RequestedStopError("stopped before the workers had finished")
        if failure.exitcode in {LOST, -signal.SIGABRT} and silent:
            names = shorten([str(rank) for rank in sorted(silent)])
            message = f"{self._describe(failure)}; did not respond and was killed: worker {names}"
            return WorkerFailedError(f"{message}; look at its host, or give a longer --timeout")
        kinds = {code: kind for kind, code in _CODES.items() if issubclass(kind, LargebatchError)}
        # A process that did not report has not chosen its exit code: Python ends with 2, too.
        if not Path(failure.error_file).exists():
            kinds = {}
        return kinds.get(failure.exitcode, WorkerFailedError)(self._describe(failure))

    def _describe(self, failure: ProcessFailure) -> str:
        if Path(failure.error_file).exists():
            return failure.message
        rank = failure.local_rank
        code = failure.exitcode
        how = f"killed by {failure.signal_name()}" if code < 0 else f"exit code {code}"
        lines = [f"{self.names[rank]} exited without reporting: {how}"]
        if self.stderrs[rank]:
            output = Path(self.stderrs[rank]).read_text(encoding="utf-8", errors="replace")
            lines += output.strip().splitlines()[-_SHOWN_LINES:]
        return "\n".join(lines)


def start_workers(
    command: Sequence[str],
    *,
    workers: int,
    horovod: bool = False,
) -> None:
    """Run `python *command` as several workers on this machine and wait for them.

    They get torchrun's variables, with `horovod` those of horovodrun too. They meet at a store in
    this process, which listens on the loopback interface only. Raises as Processes.run.
    """
    configure_libraries()
    listener = socket.create_server((HOST, 0))  # TCPStore's own would be on all interfaces
    port = listener.getsockname()[1]
    server: AbstractContextManager[dict[str, str]] = nullcontext({})
    if horovod:
        server = horovods_server(f"localhost:{workers}", address=HOST, interface=loopback())
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder, server as shared:
        commands = [
            Command(
                name=f"worker {rank}",
                arguments=command,
                environment=shared | _environment(rank, workers, port, horovod=horovod),
            )
            for rank in range(workers)
        ]
        # Before the workers, which connect to it at once.
        _store = TCPStore(  # it is closed when nothing refers to it
            HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        Processes(sys.executable, commands, folder=folder).run()


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
    }


@contextmanager
def reporting_errors(name: str | None = None) -> Iterator[None]:
    """Run one of the Processes: write errors to its file, and exit when the launcher is gone.

    `name` is what messages call it; a worker has its rank. An error ends the process at once,
    because threads of libraries may still be busy.
    """
    if name is None:
        name = f"worker {os.environ['RANK']}"
    leave_with(int(os.environ[LAUNCHER]))
    try:
        yield
    except BaseException as error:  # the launcher raises it again
        code, message = _report(error, name)
        leave_with_error(code, message)


def _report(error: BaseException, name: str) -> tuple[int, str]:
    """Return the exit code and the message by which a process reports an error."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return STOPPED, "stopped"
    return CRASHED, f"{name} failed:\n{''.join(traceback.format_exception(error))}"


def leave_with_error(code: int, message: str) -> NoReturn:
    """Write the error of one of the Processes for its launcher, and end the process."""
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    # Renamed when it is complete: the launcher may look at any moment.
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"message": message, "timestamp": time.time()}), encoding="utf-8")
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
