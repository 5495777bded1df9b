"""The environment of a run: versions, the commit of the source tree, and the resources it uses."""

import importlib.metadata
import math
import platform
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from largebatch import accelerator, registry
from largebatch.formatting import plural
from largebatch.optional import require_psutil

_PACKAGES = (
    *("largebatch", "torch", "torchvision", "timm", "numpy", "horovod", "nvidia-dali-cuda120"),
    *("pytorch-optimizer", "schedulefree", "triton", "apex"),
)


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *registry.packages()):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def source_commit() -> str | None:
    """Return the git commit of this package's source, with `+` after it if files are changed."""
    folder = Path(__file__).parents[1]  # the package

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(  # noqa: S603 -- the words are ours
            command, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout

    try:
        git("ls-files", "--error-unmatch", "--", "__init__.py")  # else it is another's
        # Only this package: other files of the checkout change nothing in a run.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".").strip()
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()


def device_kind(device: torch.device) -> str:
    """Return the model of a device; two of one kind compute the same bits.

    Of a CPU the number of threads belongs to it, because sums are divided by them.
    """
    if accelerator.is_remote(device):
        return str(accelerator.identity(device)["device"])
    model = platform.machine()
    with suppress(OSError, StopIteration):  # macOS has no /proc
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    kind = torch.backends.cpu.get_cpu_capability()
    return f"cpu {model} {kind}, {plural(torch.get_num_threads(), 'thread')}"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this worker in bytes."""
    if accelerator.is_remote(device):
        return accelerator.peak_memory_bytes(device)
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process since its program started, in bytes.

    Linux's getrusage also counts the process before it became this program, and so the memory of
    a large parent.
    """
    with suppress(OSError, StopIteration):  # macOS has no /proc; in a container it may be hidden
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Sampler:
    """Reads what this process uses, since the last reading where it is a rate."""

    def __init__(self, device: torch.device) -> None:
        self._process = require_psutil().Process()
        self._device = device
        self._process.cpu_percent()  # counts from here on
        self._before = time.perf_counter()
        self._bytes_before = self._bytes_read()

    def read(self) -> list[float]:
        """Return the numbers of events.SYSTEM, in their order."""
        # Rates are those since the last reading, which is some updates ago, not those of a moment.
        now = time.perf_counter()
        total = self._bytes_read()
        seconds = now - self._before
        self._before = now
        read_bytes = total - self._bytes_before
        self._bytes_before = total
        memory = float(self._process.memory_info().rss)
        peak = float(peak_resident_bytes())
        used = [self._process.cpu_percent(), memory, *accelerator.usage(self._device)]
        return [*used, seconds, peak, read_bytes]

    def _bytes_read(self) -> float:
        """Return the bytes that this process has read from disks; NaN if they are not counted."""
        with suppress(Exception):  # macOS has no counters; in a container /proc may be hidden
            return float(self._process.io_counters().read_bytes)
        return math.nan
