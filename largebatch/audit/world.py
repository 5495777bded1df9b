"""Whether as many workers are connected as the launcher started."""

import socket

from largebatch import accelerator
from largebatch.audit.findings import Finding, Level
from largebatch.audit.ranks import Ranks
from largebatch.distributed.environment import launched_size, number, slurm_nodes, slurm_tasks
from largebatch.formatting import plural

_FIX = (
    "initialise the process group from the launcher's variables: init_process_group with env://, "
    "or hvd.init, and torchrun with --nnodes and a --rdzv-endpoint that all nodes reach"
)


def check_world(ranks: Ranks) -> list[Finding]:
    """Compare the number of connected workers with the variables of launchers."""
    local, hosts = ranks.backend.local_size, ranks.gather(socket.gethostname())
    seen = {
        "the launcher started": launched_size(),
        "SLURM started": slurm_tasks(),
        "SLURM gave this job": slurm_nodes(),
    }
    what, most = max(seen.items(), key=lambda it: it[1])
    size = plural(ranks.size, "worker")
    if most > ranks.size:
        noun = "node" if what.endswith("job") else "worker"
        level: Level = "note" if noun == "node" and slurm_tasks() == 1 else "fault"
        text = f"{size} connected, but {what} {plural(most, noun)}: each world trains alone"
        return [
            Finding(check="world size", level=level, text=text, remedy=_FIX, figure=float(most))
        ]
    idle = accelerator.count() - local
    if idle > 0:
        text = f"{size} connected; {local} on a machine where each sees {local + idle} GPUs"
        remedy = f"start {local + idle} workers on each machine, or ignore this if that is meant"
        return [
            Finding(check="world size", level="note", text=text, remedy=remedy, figure=float(idle))
        ]
    text = f"{size} on {plural(len(set(hosts)), 'host')}, as launched"
    found = [Finding(check="world size", level="fine", text=text, figure=float(ranks.size))]
    return found + _uneven(hosts, ranks)


def _uneven(hosts: list[str], ranks: Ranks) -> list[Finding]:
    """Return a note if LOCAL_WORLD_SIZE is not the number of workers on a host."""
    here = hosts.count(hosts[ranks.rank])
    own = number("LOCAL_WORLD_SIZE", here)
    wrong = [pair for pair in ranks.gather([own, here]) if pair[0] > pair[1]]
    if not wrong:
        return []
    text = f"LOCAL_WORLD_SIZE is {wrong[0][0]}, but {plural(wrong[0][1], 'worker')} is on that host"
    remedy = "do not set LOCAL_WORLD_SIZE yourself: the launcher does, and it decides the devices"
    return [
        Finding(
            check="world size", level="note", text=text, remedy=remedy, figure=float(wrong[0][0])
        )
    ]
