"""Hosts in namespaces: who knows whom, that nothing is left behind, and the times of gradients."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import with_default_signals
from short_studies import needs_hosts
from torch import Tensor, nn

from largebatch.errors import LargebatchError, WorkerFailedError
from largebatch.lab.protocols.simulator import Recorded
from largebatch.lab.studies.hosts import PacedCriterion
from largebatch.lab.studies.namespaces import HostCommand, addresses, run_on_hosts
from largebatch.lab.studies.study import Compute


def test_a_gradient_takes_the_time_that_is_set_and_one_that_took_longer_is_late() -> None:
    """Its value is that of the criterion; evaluation is not slept for."""

    def criterion(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels).square().sum()

    model = nn.Linear(1, 1)
    paced = PacedCriterion(criterion, model, iter([0.05, 1e-9]))
    begun = time.perf_counter()
    outputs = model(torch.ones(1, 1))
    loss = paced(outputs, torch.zeros(1, 1))
    assert time.perf_counter() - begun >= 0.05
    assert loss == criterion(outputs, torch.zeros(1, 1))
    paced(model(torch.ones(1, 1)), torch.zeros(1, 1))
    with torch.no_grad():
        paced(model(torch.ones(1, 1)), torch.zeros(1, 1))
    assert (paced.gradients, paced.late) == (2, 1)


def test_the_times_of_a_worker_follow_from_its_samples_and_the_seed_alone() -> None:
    factor = Recorded(kind="recorded", seconds=(0.5, 1.5))
    compute = Compute(overhead=0.5, sample=0.01, computed=2, factor=factor)

    def first(samples: int, *, seed: int, worker: int) -> list[float]:
        return list(itertools.islice(compute.times(samples, seed=seed, worker=worker), 50))

    times = first(50, seed=1, worker=0)
    assert set(times) == {0.5, 1.5}  # of a second
    assert first(150, seed=1, worker=0) == [2 * each for each in times]
    assert first(50, seed=1, worker=0) == times
    assert first(50, seed=1, worker=1) != times != first(50, seed=2, worker=0)


MARK = "LARGEBATCH_TEST_MARK"

STARTS_AND_WAITS = """
import sys
from pathlib import Path
from largebatch.lab.studies.namespaces import HostCommand, addresses, run_on_hosts
folder = Path(sys.argv[1])
words = ["sh", "-c", f"echo up > {folder}/up-$(hostname); sleep 600"]
commands = [HostCommand(host, words, {}) for host in addresses(2)]
run_on_hosts(commands, hosts=addresses(2), megabits=None)
"""


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


def wait_until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.long
@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_nothing_is_left_when_what_made_the_hosts_is_gone(
    tmp_path: Path, how: signal.Signals
) -> None:
    mark = str(tmp_path)
    study = subprocess.Popen(
        with_default_signals(sys.executable, "-c", STARTS_AND_WAITS, tmp_path),
        env=os.environ | {MARK: mark},
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: all((tmp_path / f"up-{host}").exists() for host in addresses(2)))
    assert len(processes(mark)) > 4
    study.send_signal(how)
    study.wait(60)
    wait_until(lambda: not processes(mark))


@needs_hosts
def test_commands_reach_each_other_and_end_after_one_failed(tmp_path: Path) -> None:
    words = {
        "host1": "ip -brief address show eth0; getent hosts host2; hostname",
        "host2": "tc qdisc show dev eth0; echo a reason >&2; exit 4",
        "host3": "sleep 600",
    }
    commands = [
        HostCommand(host, ["sh", "-c", f"exec >{tmp_path}/{host}; {script}"], {MARK: str(tmp_path)})
        for host, script in words.items()
    ]
    with pytest.raises(WorkerFailedError, match="^worker 1 .*: exit code 4\na reason$"):
        run_on_hosts(commands, hosts=addresses(3), megabits=200)
    wait_until(lambda: not processes(str(tmp_path)))
    text = (tmp_path / "host1").read_text()
    assert "10.9.0.1/16" in text
    assert "10.9.0.2" in text
    assert text.split()[-1] == "host1"
    assert "rate 200Mbit" in (tmp_path / "host2").read_text()


REPORTS = """
from largebatch.errors import DataError
from largebatch.runs.launch import reporting_errors
with reporting_errors():
    raise DataError("image.png: not an image")
"""


@needs_hosts
def test_an_error_of_a_worker_on_a_host_is_raised_as_of_one_without_hosts() -> None:
    command = HostCommand("host1", [sys.executable, "-c", REPORTS], {"RANK": "0"})
    with pytest.raises(LargebatchError, match=r"^image\.png: not an image$"):
        run_on_hosts([command], hosts=addresses(1), megabits=None)
