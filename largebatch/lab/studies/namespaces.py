"""Hosts on one machine: network namespaces, each with a link to one switch.

The hosts of a job live in namespaces of networks, processes and mounts that belong to one process,
which runs this module as a program, with the file of the job. When this process ends, for any
reason, the kernel ends all of its processes and removes hosts, links and switch; and it ends with
the process that started it. So nothing is left behind, two jobs cannot meet, and the machine's own
network is neither used nor changed.

Links are Ethernet pairs, shaped in both directions by a token bucket (tc-tbf). Its rate counts
Ethernet, IP and TCP headers, 66 bytes of each frame of up to 1,514, so a link of 1 Gbit/s
carries 957 Mbit/s of payload. Queues are long enough that no frame is dropped: if several hosts
send to one, they wait, and nothing is sent twice.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from largebatch.distributed.environment import LAUNCHER
from largebatch.errors import BackendError

PROGRAMS = ("ip", "tc", "unshare", "setpriv", "mount")
"""Required programs."""

OWN_NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
"""Prefix of a command that gets its own namespaces and ends with its parent."""

_NAME = "the process that makes hosts"

CARD = "eth0"
"""Name of the link on each host."""

SWITCH = "10.9.255.254"
"""Address of the process that started the hosts, as seen from them."""

_SHORTEST_BURST = 16_384  # bytes
_BURST_SECONDS = 0.001
_QUEUE = 2**26  # length of a queue in bytes: more than the windows of all connections to a host

_FRAME = 1514
"""Bytes of a full frame, with headers."""

_HEADERS = 66
"""Bytes of its headers: Ethernet (14), IPv4 (20), and TCP with timestamps (32)."""


def addresses(number: int) -> dict[str, str]:
    """Return the names and addresses of some hosts: host1 at 10.9.0.1, and so on."""
    assert number <= 250
    return {f"host{place}": f"10.9.0.{place}" for place in range(1, number + 1)}


def lacking() -> str:
    """Describe what this machine lacks for hosts; empty if nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"the programs {', '.join(absent)} (packages iproute2, util-linux and mount)"
    tried = subprocess.run(  # noqa: S603 -- the words are ours
        [*OWN_NAMESPACES, "ip", "link", "add", "name", "bridge", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1:] or ["no reason given"]
        return f"the right to make network namespaces, which root has ({reason[0]})"
    return ""


def require_hosts() -> None:
    """Raise BackendError if this machine cannot make hosts."""
    missing = lacking()
    if missing:
        raise BackendError(
            f"hosts are network namespaces of this machine, and it lacks {missing}; run this as "
            "root on Linux, in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )


def make_hosts(hosts: Mapping[str, str], *, megabits: float | None = None) -> None:
    """Make hosts with these names and addresses, joined by a switch, that know each other by name.

    `megabits` is the rate of each link in Mbit/s in each direction; None for no limit. Call it
    in its own namespaces.
    """
    # `ip netns` keeps its names in /run: a file system of its own keeps them out of the machine's.
    _call("mount -t tmpfs tmpfs /run")
    _call("ip link set lo up")
    _call("ip link add name bridge type bridge")
    _call(f"ip address add {SWITCH}/16 dev bridge")
    _call("ip link set bridge up")
    for name, address in hosts.items():
        _call(f"ip netns add {name}")
        _call(f"ip link add name to-{name} type veth peer name {CARD} netns {name}")
        _call(f"ip link set to-{name} master bridge up")
        _call(f"ip -n {name} address add {address}/16 dev {CARD}")
        _call(f"ip -n {name} link set {CARD} up")
        _call(f"ip -n {name} link set lo up")
        if megabits is not None:
            _call(f"tc -n {name} qdisc add dev {CARD} root {_shape(megabits)}")
            _call(f"tc qdisc add dev to-{name} root {_shape(megabits)}")
    # Libraries look up the host's own name, and without an entry wait for a name server.
    table = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
    replace_file("/etc/hosts", Path("/run/hosts"), "\n".join(table) + "\n")


def replace_file(path: str, other: Path, text: str) -> None:
    """Replace the content of a file in these namespaces; the new content is written to `other`."""
    other.write_text(text)
    _call(f"mount --bind {other} {path}")


def _shape(megabits: float) -> str:
    """Return tc's token bucket for a rate.

    >>> _shape(1000)
    'tbf rate 1000000kbit burst 125000 limit 67108864'
    """
    # A bucket of 1 ms at the rate. Smaller than a few frames it could never reach the rate.
    burst = max(_SHORTEST_BURST, round(megabits * 1e6 / 8 * _BURST_SECONDS))
    return f"tbf rate {round(megabits * 1000)}kbit burst {burst} limit {_QUEUE}"


def on_host(name: str, *command: str) -> list[str]:
    """Return a command that runs another one on a host, under the host's name."""
    # Gloo and Horovod take the host's name for its address, and all namespaces have the machine's.
    named = f'hostname {name} && exec "$@"'
    return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, "sh", *command]


def payload_bandwidth(megabits: float) -> float:
    """Return the payload in bytes per second of a link with this rate and full frames.

    >>> round(payload_bandwidth(1000) / 1e6, 2)
    119.55
    """
    return megabits * 1e6 / 8 * (_FRAME - _HEADERS) / _FRAME


class Counters(NamedTuple):
    """Bytes of payload that have passed the link of a host."""

    received: int
    sent: int


def read_counters(table: str) -> Counters:
    """Parse /proc/net/dev of a host; headers are left out.

    The kernel counts a segment that the link cuts into frames as one packet with one header.

    >>> read_counters("  eth0: 1066 2 0 0 0 0 0 0 132 2 0 0 0 0 0 0")
    Counters(received=934, sent=0)
    """
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{CARD}:"))
    numbers = [int(word) for word in line.partition(":")[2].split()]
    received_bytes, received_packets = numbers[:2]
    sent_bytes, sent_packets = numbers[8:10]
    return Counters(
        received_bytes - _HEADERS * received_packets, sent_bytes - _HEADERS * sent_packets
    )


class HostCommand(NamedTuple):
    """A process on a host."""

    host: str
    words: Sequence[str]
    environment: Mapping[str, str]


def run_on_hosts(
    commands: Sequence[HostCommand],
    *,
    hosts: Mapping[str, str],
    megabits: float | None,
    horovod: bool = False,
) -> None:
    """Run commands side by side on hosts that are made for them.

    With `horovod` a server on the switch connects the workers of Horovod, one for each command.
    Raises BackendError if this machine cannot make hosts, and as Processes.run if a command fails.
    """
    require_hosts()
    from largebatch.runs.launch import Command, Processes  # torch, which `doctor` does not need

    program, *arguments = [*OWN_NAMESPACES, sys.executable, "-m", __name__]
    with tempfile.TemporaryDirectory(prefix="largebatch-") as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps([hosts, megabits, horovod, commands]))
        makes_hosts = Command(
            name=_NAME,
            arguments=[*arguments, str(job)],
            # Its parent is in another namespace of processes, and has the number 0 in its own.
            environment={LAUNCHER: "0"},
        )
        Processes(program, [makes_hosts], folder=folder).run()


def _run_job(job: Path) -> None:
    """Make the hosts of a job in these namespaces, and run its commands."""
    from largebatch.runs.launch import Command, Processes, horovods_server

    hosts, megabits, horovod, content = json.loads(job.read_text())
    commands = [HostCommand(*command) for command in content]
    make_hosts(hosts, megabits=megabits)
    server: AbstractContextManager[dict[str, str]] = nullcontext({})
    if horovod:
        hosts_of_workers = [command.host for command in commands]
        placement = ",".join(f"{host}:{hosts_of_workers.count(host)}" for host in hosts)
        server = horovods_server(placement, address=SWITCH, interface=CARD)
    program, *_ = on_host("")
    with server as shared:
        workers = [
            Command(
                name=f"worker {rank}",
                arguments=on_host(command.host, *command.words)[1:],
                environment={**shared, **command.environment},
            )
            for rank, command in enumerate(commands)
        ]
        Processes(program, workers, folder=job.parent / "workers", keeps_output=True).run()


def _call(command: str) -> None:
    subprocess.run(command.split(), check=True)  # noqa: S603 -- the words are ours


if __name__ == "__main__":
    from largebatch.runs.launch import reporting_errors

    with reporting_errors(_NAME):
        _run_job(Path(sys.argv[1]))
    os._exit(0)  # and with it all that still runs here
