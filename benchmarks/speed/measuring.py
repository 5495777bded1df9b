"""Shared parts of the benchmarks: ratios of paired times, spread, and result files.

Times of rivals are compared round by round, as pairs measured one after the other, because a
machine that slows down for a while then slows both.
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.speed.sources import sources
from largebatch import accelerator, proof
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import available_cores
from largebatch.distributed.serial import Serial
from largebatch.runs.launch import start_workers
from largebatch.tracking.environment import source_commit, versions

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", ROOT / "benchmarks" / "results"))
DAY = 86400.0

RESAMPLES = 2000
WARM_UP = 3
"""Number of steps of every rival before the first round."""

Step = Callable[[], object]


def take_turns(
    rivals: dict[str, Step],
    *,
    rounds: int,
    steps: int,
    backend: Backend | None = None,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return every rival's seconds per step, round by round; the slowest worker counts.

    In a round each rival makes a few steps, in a new random order, and the device is waited for.
    One worker starts no round after `seconds`, warm-up included, but makes at least one.
    """
    backend = backend or Serial()
    assert seconds == math.inf or backend.world_size == 1, "workers would stop at different rounds"
    end = time.monotonic() + seconds
    for step in rivals.values():
        for _ in range(WARM_UP):
            step()
    draw = random.Random(0)  # the same order on all workers
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(rounds):
        if number and time.monotonic() > end:
            print(f"cut: {number} of {rounds} rounds in {seconds:g} seconds")
            break
        for name in draw.sample(list(rivals), k=len(rivals)):
            _wait_for(backend)
            start = clock()
            for _ in range(steps):
                rivals[name]()
            accelerator.synchronize(backend.device)
            times[name].append((clock() - start) / steps)
    slowest = backend.all_gather(torch.tensor(list(times.values()))).amax(0).tolist()
    return dict(zip(times, slowest, strict=True))


def on_device(step: Step, device: torch.device, *, steps: int = 3) -> dict[str, Any]:
    """Return an accelerator's milliseconds and launches in a step, in all and by kernel.

    Launches include copies and fills. The 25 kernels that take the longest are named.
    """
    if not accelerator.is_remote(device):
        return {}
    step()
    accelerator.synchronize(device)
    activities = supported_activities()
    with profile(activities=activities - {ProfilerActivity.CPU} or activities) as record:
        for _ in range(steps):
            step()
        accelerator.synchronize(device)  # the record must hold the whole steps
    times: dict[str, list[float]] = {}
    for event in record.events() or []:
        if event.device_type.name != "CPU" and not event.is_user_annotation:
            times.setdefault(event.name[:100], []).append(event.time_range.elapsed_us() / 1000)
    if not times:
        return {}  # of a simulated device
    kernels = {
        name: {"milliseconds": sum(values) / steps, "launches": len(values) / steps}
        for name, values in sorted(times.items(), key=lambda item: -sum(item[1]))
    }
    total = {key: sum(it[key] for it in kernels.values()) for key in ("milliseconds", "launches")}
    return {**total, "kernels": dict(list(kernels.items())[:25])}


def in_graph(step: Step, device: torch.device) -> Step:
    """Capture a step of a plain loop as a CUDA graph, on a device that has graphs."""
    if device.type not in accelerator.GRAPHS:
        return step
    accelerator.synchronize(device)
    with accelerator.on(accelerator.stream(device)):
        for _ in range(WARM_UP):
            step()
    accelerator.synchronize(device)
    module = torch.get_device_module(device)
    graph = module.CUDAGraph()
    with module.graph(graph):
        step()

    def replay(_: Step = step) -> None:  # the graph's tensors belong to the step
        graph.replay()

    return replay


def rehearse_kernels() -> None:
    """Use BatchNorm's kernels on the CPU, in Triton's interpreter, if gpu.py rehearses there."""
    if "BENCHMARK_INTERPRETS" in os.environ:
        proof.KERNEL_DEVICES[proof.BATCHNORM].add("cpu")
        proof.decide(accelerator.CPU, {proof.BATCHNORM: None})


def _wait_for(backend: Backend) -> None:
    backend.barrier()
    accelerator.synchronize(backend.device)


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Add --seconds, a time after which a benchmark starts no round."""
    parser.add_argument("--seconds", type=float, default=DAY, help="start no round after that many")


def paired_ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median of ours / theirs over the rounds and its 95 % bootstrap interval.

    The interval holds the middle 95 % of the medians of rounds redrawn with replacement
    (Efron 1979); the draws are the same each time.
    """
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    return {
        "median": statistics.median(ratios),
        "low": medians[round(0.025 * (RESAMPLES - 1))],
        "high": medians[round(0.975 * (RESAMPLES - 1))],
        "n": len(ratios),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return mean, standard deviation, median, smallest and largest."""
    return {
        "mean": statistics.mean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def machine() -> str:
    """Describe the machine."""
    words = [platform.machine(), f"{available_cores()} cores"]
    if names := accelerator.names():
        words.append(f"{len(names)} x {names[0]}")
    return ", ".join(words)


def write(name: str, result: dict[str, Any]) -> Path:
    """Write results/<name>_<hardware>_<date>.json: the circumstances and `result`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{hardware()}_{today()}.json"
    content = {**circumstances(name), **result}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def module() -> str:
    """Return the running script as `python -m` takes it, such as benchmarks.speed.lars."""
    return ".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)


def circumstances(name: str) -> dict[str, Any]:
    """Return the command, machine, date, versions and measured sources of a benchmark."""
    return {
        "command": " ".join(["python -m", module(), *sys.argv[1:]]),
        "machine": machine(),
        "date": today(),
        "commit": source_commit(),
        "versions": versions() | _versions_of_gpu(),
        "sources": sources(name),
    }


def _versions_of_gpu() -> dict[str, str]:
    """Return the versions of what computes on a GPU, without what is not installed."""
    found = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for name in ("triton", "nvidia-cudnn-frontend"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {name: str(version) for name, version in found.items() if version is not None}


def today() -> str:
    """Return the date in UTC."""
    return datetime.now(UTC).date().isoformat()


def hardware() -> str:
    """Return the name of the hardware for a file name."""
    if names := accelerator.names():
        return re.sub(r"[^a-z0-9]+", "-", names[0].lower())
    return f"cpu{available_cores()}"


def on_two_workers(task: str, launch: Callable[[list[str]], object] | None = None) -> Any:  # noqa: ANN401 -- JSON
    """Run this script as two workers with `--worker TASK FILE`; return the content of FILE."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        command = ["-m", module(), *sys.argv[1:], "--worker", task, str(file)]
        (launch or partial(start_workers, workers=2))(command)
        return json.loads(file.read_text())


def newest(name: str, folder: Path, *, machine: str | None = None) -> Path | None:
    """Return the newest results of this name; None without any.

    They are of `machine`, which may be a pattern such as `*`; by default of one like this.
    """
    found = folder.glob(f"{name}_{machine or hardware()}_*.json")
    return max((path for path in found if path.stem.rsplit("_", 2)[0] == name), default=None)


def frozen(name: str) -> Any:  # noqa: ANN401 -- JSON
    """Return the newest results of a study, which are of any machine."""
    path = newest(name, RESULTS, machine="*")
    if path is None:
        raise SystemExit(f"no results of {name}")
    return json.loads(path.read_text(encoding="utf-8"))
