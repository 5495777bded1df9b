"""Resources that a worker uses: processor, memory, disk, network and GPU."""

import time
from contextlib import suppress

import torch

from largebatch import accelerator
from largebatch.optional import require_psutil
from largebatch.tracking.environment import peak_resident_bytes


class Sampler:
    """Reads the system's counters, and their increase since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self._psutil = require_psutil()
        self._process = self._psutil.Process()
        self._device = device
        self._process.cpu_percent()  # counts from here on
        self._before = time.perf_counter(), self._counters()

    def read(self) -> list[float]:
        """Return the numbers of events.SYSTEM, in their order."""
        now, counters = time.perf_counter(), self._counters()
        then, before = self._before
        self._before = now, counters
        seconds = now - then
        rates = [(b - a) / seconds for a, b in zip(before, counters, strict=True)]
        memory, peak = float(self._process.memory_info().rss), float(peak_resident_bytes())
        used = [self._process.cpu_percent(), memory, *rates, *accelerator.usage(self._device)]
        return [*used, seconds, peak]

    def _counters(self) -> list[float]:
        """Return bytes read, written, received and sent so far; NaN if not counted."""
        disk, network = [float("nan")] * 2, [float("nan")] * 2
        with suppress(Exception):  # macOS has none; in a container /proc may be hidden or empty
            counted = self._process.io_counters()
            disk = [float(counted.read_bytes), float(counted.write_bytes)]
        with suppress(Exception):  # as above
            networks = self._psutil.net_io_counters(pernic=True)
            wired = [each for name, each in networks.items() if not name.startswith("lo")]
            received = sum(each.bytes_recv for each in wired)
            network = [float(received), float(sum(each.bytes_sent for each in wired))]
        return [*disk, *network]
