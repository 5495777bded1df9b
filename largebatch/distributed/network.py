"""Network speed between the workers: the time of all-reduces over all of them."""

import statistics
import time
from collections.abc import Sequence

import torch

from largebatch import accelerator
from largebatch.distributed.backend import Backend

SIZES = (2**12, 2**20, 2**26)
"""Bytes of a sum: latency-bound, like one layer, and like ResNet-50's gradients in fp16 or more."""

REPEATS = 5


def measure_network(backend: Backend, *, sizes: Sequence[int] = SIZES) -> dict[int, float]:
    """Return the seconds of a sum over all workers by its bytes: median of REPEATS, slowest worker.

    The result is the same on every worker.
    """
    found = {}
    for size in sizes:
        tensor = torch.ones(size // 4, device=backend.device)
        durations = []
        for number in range(REPEATS + 2):  # the first two connect
            backend.barrier()
            start = time.perf_counter()
            backend.all_reduce(tensor).wait()
            accelerator.synchronize(tensor.device)  # sync: this is a measurement
            if number >= 2:
                durations.append(time.perf_counter() - start)
            tensor.fill_(1)
        own = torch.tensor(statistics.median(durations), dtype=torch.float64).to(backend.device)
        found[size] = float(backend.all_gather(own).max())
    return found


def bandwidth(size: int, *, workers: int, seconds: float) -> float:
    """Return the bytes per second that each worker sends in a ring: 2 (n - 1) / n of the sum's."""
    return size * 2 * (workers - 1) / workers / seconds
