"""The store of torch's workers, and the checks made there before a process group exists.

Worker 0, or the launcher, serves the store at MASTER_ADDR and MASTER_PORT.
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
from largebatch.distributed.environment import GRACE_SECONDS, number
from largebatch.errors import MismatchError

_LOG = logging.getLogger(__name__)


def open_store(limit: timedelta, *, alone: bool) -> tuple[Any, int, int]:
    """Open the store at MASTER_ADDR and MASTER_PORT; return it with rank and world size.

    Unless torchrun serves the store, worker 0 does: on that address only, or on all interfaces if
    the address is not this host's. `alone` is True if all workers are on this host: then on the
    loopback interface, whatever the address.
    """
    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    listener = None
    serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves and alone:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    if serves and rank == 0:
        listener = listen_on(os.environ["MASTER_ADDR"], number("MASTER_PORT", 0), alone=alone)
    if listener is None:
        joined: tuple[Any, int, int] = next(rendezvous("env://", timeout=limit))
        return joined
    address, port = listener.getsockname()[:2]
    file = listener.detach()
    store = TCPStore(
        address, port, world_size, is_master=True, timeout=limit, master_listen_fd=file
    )
    return store, rank, world_size


def listen_on(address: str, port: int, *, alone: bool) -> socket.socket | None:
    """Return a socket that listens on one address of this host; log a warning if none can.

    An address may belong to another machine that forwards connections. With several hosts, a
    host's own name may resolve to its loopback interface (Debian's 127.0.1.1): then another address
    of that name is used, if there is one.
    """
    places = []
    with suppress(OSError):
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, _, _, _, place in places:
        if alone or not ipaddress.ip_address(place[0]).is_loopback:
            with suppress(OSError):
                return socket.create_server((str(place[0]), int(place[1])), family=family)
    if not alone:
        names = ", ".join(dict.fromkeys(str(place[0]) for *_, place in places)) or "unknown"
        _LOG.warning(
            "MASTER_ADDR %s (%s) is not an address on which this host can listen for others: the "
            "workers' store is open on all interfaces", address, names,
        )  # fmt: skip
    return None


def require_one_type(
    store: Store, own: str, *, rank: int, world_size: int, unit: str | None = None
) -> None:
    """Raise MismatchError on every worker unless all compute on the same type of device.

    Also raised if two workers use the same `unit`, a device's unique name, if it has one. This must
    precede the creation of the process group: NCCL and Gloo would wait for each other. The last
    worker to arrive compares, so that the others make only a few requests for any world size.
    """
    store.set(f"device/{rank}", own)
    store.add(f"on/{own}", 1)
    if unit is not None:
        other = store.compare_set(f"unit/{unit}", "", str(rank)).decode()
        if other != str(rank):
            store.set("shared", f"{other} and {rank} share {unit}")
    if store.add("arrived", 1) == world_size:
        same = store.add(f"on/{own}", 0) == world_size
        difference = "" if same else _difference(store, world_size)
        if unit is not None and same and store.check(["shared"]):
            difference = f"workers {store.get('shared').decode()}; {remedy()}"
        store.set("difference", difference)
    difference = store.get("difference").decode()
    if not difference:
        return
    if store.add("informed", 1) == world_size:
        store.set("all informed", "")
    if rank == 0:  # its process may serve the store
        with suppress(dist.DistStoreError):
            store.wait(["all informed"], timedelta(seconds=GRACE_SECONDS))
    raise MismatchError(difference)


def _difference(store: Store, world_size: int) -> str:
    """Return a message that lists the workers of each type of device."""
    types = store.multi_get([f"device/{worker}" for worker in range(world_size)])
    try:
        require_same([{"device": kind.decode()} for kind in types])
    except MismatchError as error:
        return str(error)
    raise AssertionError("the types are the same")
