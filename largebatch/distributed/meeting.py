"""Where torch's workers meet before they have a process group, and what they compare there.

Worker 0, or what started the workers, serves a store at MASTER_ADDR and MASTER_PORT.
"""

import ipaddress
import logging
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from largebatch.distributed.agreement import require_same
from largebatch.distributed.backend import remedy
from largebatch.distributed.environment import GRACE_SECONDS
from largebatch.errors import MismatchError

_LOG = logging.getLogger(__name__)


def open_store(limit: timedelta, *, alone: bool) -> tuple[Any, int, int]:
    """Open the store at MASTER_ADDR and MASTER_PORT; return it with rank and number of workers.

    Worker 0 serves it on that address only, unless torchrun does so already; where the address is
    not this host's own, on all. `alone`: all workers are on this host.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = None
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = listen_on(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), alone=alone)
    if listener is None:
        met: tuple[Any, int, int] = next(rendezvous("env://", timeout=limit))
        return met
    address, port = listener.getsockname()[:2]
    file = listener.detach()
    store = TCPStore(
        address, port, world_size, is_master=True, timeout=limit, master_listen_fd=file
    )
    return store, rank, world_size


def listen_on(address: str, port: int, *, alone: bool) -> socket.socket | None:
    """Return a socket that listens on one address of this host; log a warning where none can.

    An address may be another machine's that passes connections on, and the name of a host among
    several may mean the loopback interface to that host itself (Debian's 127.0.1.1): then another
    address of that name is taken, if it has one.
    """
    found = []
    with suppress(OSError):
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in found:
        if alone or not ipaddress.ip_address(place[0]).is_loopback:
            with suppress(OSError):
                return socket.create_server((str(place[0]), int(place[1])), family=family)
    if not alone:
        places = ", ".join(dict.fromkeys(str(place[0]) for *_, place in found)) or "unknown"
        _LOG.warning(
            "MASTER_ADDR %s (%s) is no address at which this host can listen for others: the "
            "workers' store is open on all of its interfaces", address, places,
        )  # fmt: skip
    return None


def require_one_type(
    store: Store, own: str, *, rank: int, world_size: int, unit: str | None = None
) -> None:
    """Raise MismatchError on every worker unless all compute on the same type of device.

    So it does where two compute on one `unit`, if their devices have such names. Asked before the
    process group is made: NCCL and Gloo would wait for each other. The worker that comes last
    compares, so that each of the others makes a few requests, however many there are.
    """
    store.set(f"device/{rank}", own)
    store.add(f"on/{own}", 1)
    if unit is not None:
        other = store.compare_set(f"unit/{unit}", "", str(rank)).decode()
        if other != str(rank):
            store.set("shared", f"{other} and {rank} share {unit}")
    if store.add("arrived", 1) == world_size:
        alike = store.add(f"on/{own}", 0) == world_size
        difference = "" if alike else _difference(store, world_size)
        if unit is not None and alike and store.check(["shared"]):
            difference = f"workers {store.get('shared').decode()}; {remedy()}"
        store.set("difference", difference)
    difference = store.get("difference").decode()
    if not difference:
        return
    if store.add("informed", 1) == world_size:
        store.set("all informed", "")
    if rank == 0:  # whose process may hold the store
        with suppress(dist.DistStoreError):
            store.wait(["all informed"], timedelta(seconds=GRACE_SECONDS))
    raise MismatchError(difference)


def _difference(store: Store, world_size: int) -> str:
    """Describe which workers have which type of device."""
    types = store.multi_get([f"device/{worker}" for worker in range(world_size)])
    try:
        require_same([{"device": found.decode()} for found in types])
    except MismatchError as error:
        return str(error)
    raise AssertionError("the types are alike")
