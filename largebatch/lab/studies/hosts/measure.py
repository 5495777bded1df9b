"""A measurement on hosts: place and start the workers, and collect their results."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from largebatch.distributed.environment import LOST
from largebatch.errors import StudyError, WorkerFailedError
from largebatch.lab.studies.hosts.namespaces import (
    CARD,
    Command,
    addresses,
    run_on_hosts,
)
from largebatch.lab.studies.hosts.worker import JOB, USER, Job

_PORT = 29_500
_SHOWN_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Placement of workers on hosts, and their links."""

    workers_per_host: Sequence[int]
    megabits: float | None
    """Rate of each host's link in each direction, in Mbit/s; None for no limit."""

    backend: Literal["torch", "horovod"] = "torch"

    @property
    def hosts(self) -> list[str]:
        """Host of every worker, by rank."""
        names = addresses(len(self.workers_per_host))
        pairs = zip(names, self.workers_per_host, strict=True)
        return [name for name, number in pairs for _ in range(number)]


def measure_on_hosts(job: Job, placement: Placement) -> list[dict[str, Any]]:
    """Run a job on hosts made for it; return the result of each worker, by rank.

    Raises StudyError with a worker's message if the user can fix it, WorkerFailedError if a
    worker was lost, BackendError if this machine cannot make hosts.
    """
    hosts = placement.hosts
    with tempfile.TemporaryDirectory(prefix="largebatch-") as name:
        folder = Path(name)
        own = replace(job, options=replace(job.options, out=folder / "run"))
        (folder / "run").mkdir()
        (folder / "job.json").write_bytes(JOB.dump_json(own))
        words = [sys.executable, "-m", "largebatch.lab.studies.hosts.worker"]
        words += [str(folder / "job.json"), str(folder)]
        commands = [
            Command(host, words, environment(rank, hosts), folder / f"output-{rank}")
            for rank, host in enumerate(hosts)
        ]
        codes = run_on_hosts(
            commands,
            hosts=addresses(len(placement.workers_per_host)),
            megabits=placement.megabits,
            horovod=placement.backend == "horovod",
        )
        if any(codes):
            raise_cause(codes, folder)
        files = [folder / f"worker-{rank}.json" for rank in range(len(hosts))]
        return [json.loads(path.read_bytes()) for path in files]


def raise_cause(codes: Sequence[int | None], folder: Path) -> None:
    """Raise the first failure that is not the consequence of another."""
    order = {USER: 0, None: 3, LOST: 2, 0: 4}
    rank = min(range(len(codes)), key=lambda rank: order.get(codes[rank], 1))
    code = codes[rank]
    text = (folder / f"output-{rank}").read_text(errors="replace").strip()
    if code == USER:
        raise StudyError(text.splitlines()[-1] if text else f"worker {rank} failed")
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    last = "\n".join(text.splitlines()[-_SHOWN_LINES:])
    raise WorkerFailedError(f"worker {rank} exited without reporting: {how}\n{last}".rstrip())


def environment(rank: int, hosts: Sequence[str]) -> Mapping[str, str]:
    """Return the variables that torchrun and horovodrun would set, and the network interface."""
    here = hosts[rank]
    local, each = hosts[:rank].count(here), hosts.count(here)
    names = list(dict.fromkeys(hosts))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": str(each),
        "MASTER_ADDR": addresses(len(names))[names[0]],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": CARD,
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(hosts)),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(each),
        "HOROVOD_CROSS_RANK": str(names.index(here)),
        "HOROVOD_CROSS_SIZE": str(len(names)),
        "HOROVOD_HOSTNAME": here,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
