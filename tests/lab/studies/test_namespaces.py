"""Hosts in namespaces: what crosses a link, who knows whom, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from on_hosts import needs_hosts

from largebatch.lab.studies.namespaces import (
    Command,
    addresses,
    read_counters,
    run_on_hosts,
)

PAYLOAD = 3_000_000

RECEIVER = f"""
import socket
listener = socket.create_server(("0.0.0.0", 5000))
connection, _ = listener.accept()
left = {PAYLOAD}
while left:
    left -= len(connection.recv(1 << 16))
print(open("/proc/net/dev").read())
"""
SENDER = f"""
import socket, sys, time
for _ in range(600):
    try:
        connection = socket.create_connection(("host1", 5000))
        break
    except OSError:
        time.sleep(0.1)
connection.sendall(bytes({PAYLOAD}))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(open("/proc/net/dev").read(), socket.gethostname())
"""
MARK = "LARGEBATCH_TEST_MARK"

STARTS_AND_WAITS = """
import signal, sys
from pathlib import Path
from largebatch.lab.studies.namespaces import Command, addresses, run_on_hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script has put aside
folder = Path(sys.argv[1])
words = ["sh", "-c", f"echo up > {folder}/up-$(hostname); sleep 600"]
commands = [Command(host, words, {}, folder / host) for host in addresses(2)]
run_on_hosts(commands, hosts=addresses(2), megabits=None)
"""


@needs_hosts
def test_the_counters_of_a_link_have_the_payload_that_crossed_it(tmp_path: Path) -> None:
    """As whole segments or cut into frames by the shaped link: headers are no part of it."""
    programs = {"host1": RECEIVER, "host2": SENDER}
    commands = [
        Command(host, [sys.executable, "-S", "-c", program], {}, tmp_path / host)
        for host, program in programs.items()
    ]
    assert run_on_hosts(commands, hosts=addresses(2), megabits=200) == [0, 0]
    received = read_counters((tmp_path / "host1").read_text())
    *table, name = (tmp_path / "host2").read_text().splitlines()
    sent = read_counters("\n".join(table))
    assert received.received == pytest.approx(PAYLOAD, rel=1e-3)
    assert sent.sent == pytest.approx(PAYLOAD, rel=1e-3)
    assert abs(received.sent) + abs(sent.received) < 1e-3 * PAYLOAD
    assert name.strip() == "host2"


def processes(mark: str) -> list[int]:
    """Return the processes that have this mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parts[2]))
        except OSError:  # it has ended, or is a zombie
            continue
    return found


def wait_until(condition: object, *, seconds: float = 60.0) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_nothing_is_left_when_what_made_the_hosts_is_gone(
    tmp_path: Path, how: signal.Signals
) -> None:
    mark = str(tmp_path)
    study = subprocess.Popen(
        [sys.executable, "-c", STARTS_AND_WAITS, str(tmp_path)],
        env=os.environ | {MARK: mark},
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: all((tmp_path / f"up-{host}").exists() for host in addresses(2)))
    assert len(processes(mark)) > 4
    study.send_signal(how)
    study.wait(60)
    wait_until(lambda: not processes(mark))


@needs_hosts
def test_commands_that_go_on_after_one_failed_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"host1": "exit 3", "host2": "sleep 600", "host3": "exit 0"}
    commands = [
        Command(host, ["sh", "-c", script], {MARK: str(tmp_path)}, tmp_path / host)
        for host, script in words.items()
    ]
    assert run_on_hosts(commands, hosts=addresses(3), megabits=None) == [3, None, 0]
    wait_until(lambda: not processes(str(tmp_path)))
