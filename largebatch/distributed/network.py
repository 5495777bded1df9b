"""Network speed between the workers' hosts: all-reduces over all workers, and between two hosts.

Each host is measured with the next one, and the last one with the first; pairs without a common
host are measured at the same time. So a slow host is slow in both of its pairs, and the time does
not grow with the number of hosts.
"""

import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from largebatch import accelerator
from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend, Group

SIZES = (2**12, 2**20, 2**26)
"""Bytes of a sum: latency-bound, like one layer, and like ResNet-50's gradients in fp16 or more."""

REPEATS = 5
SLOW = 0.5
"""A pair is slow below this fraction of the median bandwidth of the hosts."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two hosts, and the bandwidth of a sum over their workers in bytes per second."""

    hosts: tuple[str, str]
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Network:
    """Result of the measurement; the same on every worker."""

    hosts: tuple[str, ...]
    seconds: dict[int, float]
    """Seconds of a sum over all workers, by its bytes: the median of REPEATS, slowest worker."""

    pairs: tuple[Pair, ...]
    """Pairs of hosts; empty if all workers are on one host."""

    @property
    def slow_pairs(self) -> tuple[Pair, ...]:
        """Pairs far below the hosts' median bandwidth, taken in the better pair of each host.

        The median of all pairs does not work: of three hosts, a slow one is in two pairs.
        """
        if not self.pairs:
            return ()
        best = [
            max(pair.bandwidth for pair in self.pairs if host in pair.hosts) for host in self.hosts
        ]
        least = SLOW * statistics.median(best)
        return tuple(pair for pair in self.pairs if pair.bandwidth < least)

    @property
    def slow_hosts(self) -> tuple[str, ...]:
        """Hosts with slow pairs only, if other hosts have fast ones."""
        slow = self.slow_pairs
        fine = {host for pair in self.pairs if pair not in slow for host in pair.hosts}
        return tuple(host for host in self.hosts if slow and host not in fine)


def measure_network(backend: Backend, *, sizes: Sequence[int] = SIZES) -> Network:
    """Time sums of `sizes` bytes over all workers, and of the last size between pairs of hosts."""
    ranks = _ranks_by_host(backend)
    seconds = {size: max(_times(backend, backend, size)) for size in sizes}
    pairs = [pair for hosts in rounds(list(ranks)) for pair in _pairs(hosts, ranks, backend, sizes)]
    return Network(hosts=tuple(ranks), seconds=seconds, pairs=tuple(pairs))


def bandwidth(size: int, *, workers: int, seconds: float) -> float:
    """Return the bytes per second that each worker sends in a ring: 2 (n - 1) / n of the sum's."""
    return size * 2 * (workers - 1) / workers / seconds


def rounds(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Pair each host with the next, in rounds in which every host occurs at most once.

    >>> rounds(["a", "b", "c"])
    [[('a', 'b')], [('b', 'c')], [('c', 'a')]]
    >>> rounds(["a", "b", "c", "d"])
    [[('a', 'b'), ('c', 'd')], [('b', 'c'), ('d', 'a')]]
    """
    if len(hosts) < 3:
        return [[(hosts[0], hosts[1])]] if len(hosts) == 2 else []
    pairs = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    last = [pairs.pop()] if len(hosts) % 2 else []
    return [part for part in (pairs[::2], pairs[1::2], last) if part]


def _pairs(
    paired_hosts: Sequence[tuple[str, str]],
    ranks: dict[str, list[int]],
    backend: Backend,
    sizes: Sequence[int],
) -> Iterator[Pair]:
    """Measure pairs at the same time; unpaired hosts wait."""
    parts = [sorted(ranks[first] + ranks[second]) for first, second in paired_hosts]
    paired = {rank for part in parts for rank in part}
    rest = [rank for rank in range(backend.world_size) if rank not in paired]
    group = backend.split([*parts, rest] if rest else parts)
    times = _times(group, backend, sizes[-1])
    for hosts, part in zip(paired_hosts, parts, strict=True):
        slowest = max(times[rank] for rank in part)
        yield Pair(hosts, bandwidth(sizes[-1], workers=len(part), seconds=slowest))


def _times(group: Group, backend: Backend, size: int) -> list[float]:
    tensor = torch.ones(size // 4, device=backend.device)
    durations = []
    for number in range(REPEATS + 2):  # the first two connect
        backend.barrier()
        start = time.perf_counter()
        group.all_reduce(tensor).wait()
        accelerator.synchronize(tensor.device)  # sync: this is a measurement
        if number >= 2:
            durations.append(time.perf_counter() - start)
        tensor.fill_(1)
    own = torch.tensor([statistics.median(durations)], dtype=torch.float64, device=backend.device)
    times: list[float] = backend.all_gather(own).flatten().tolist()
    return times


def _ranks_by_host(backend: Backend) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(gather_values(socket.gethostname(), backend, backend.device)):
        ranks.setdefault(host, []).append(rank)
    return ranks
