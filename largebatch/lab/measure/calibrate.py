"""Measure a machine with a recipe, and write the result as a cluster file for the planner.

One worker alone measures forward and backward at three device batches, the update, and the rate
of the input pipeline, round by round, so that a slow phase of the machine affects all equally. Two
workers measure all-reduces of four sizes. A worker has one CPU core, as in a run with as many
workers as cores. Its time on a CPU is processor time, without waits for other programs.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from largebatch import accelerator
from largebatch.address import Place
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import available_cores
from largebatch.distributed.reducer import divide
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.lab.planner.cluster import Cluster, Measured
from largebatch.lab.planner.prediction import workload
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.launch import start_workers
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.passes import Passes, median_seconds, whole_spans
from largebatch.runs.state import grouping_of, kept_exact
from largebatch.storage import writing

ROUNDS = 7
SIZES = (2**12, 2**16, 2**20, 2**24)
"""Message sizes in bytes of the timed all-reduces."""

NETWORK_SIZES = (2**12, 2**20, 2**26)
"""Bytes of a sum in `doctor --network`: latency-bound, like one layer, and like ResNet-50's."""

REPEATS = 5  # timed all-reduces of each size

READ_SECONDS = 1.0
"""Seconds that images are read; the first batches, which open the decoder, do not count."""


def calibrate(recipe: Recipe, out: Path, *, data: Place | str | None = None) -> None:
    """Write a cluster file of this machine.

    Raises LargebatchError if the file exists, cannot be written, or is not named *.yaml, and for
    an optimizer whose workers share an update.
    """
    if recipe.optimizer.shares_updates:
        kind = recipe.optimizer.kind
        raise LargebatchError(
            f"optimizer.kind: {kind}: --calibrate measures an update of one worker"
        )
    if out.suffix != ".yaml":
        raise LargebatchError(f"--out {out}: a cluster file has a name that ends in .yaml")
    with writing(out, error=LargebatchError):  # before minutes of measurement
        out.touch(exist_ok=False)
        out.unlink()
    measured = measure(recipe, data=data)
    cluster = cluster_of(measured, name=out.stem)
    text = f"# Measured with largebatch plan --calibrate on {recipe.name}.\n" + dump_yaml(cluster)
    with out.open("x", encoding="utf-8") as file:
        file.write(text)


def cluster_of(measured: Measured, *, name: str) -> Cluster:
    """Return this machine as a cluster; of one worker where the link was not measured."""
    alone = measured.exchange_gigabytes_per_second is None
    return Cluster(
        name=name,
        measured=measured,
        gpus_per_node=1 if alone else _places(measured.device),
        nodes=1,
        cpu_cores=available_cores(),
        software="launched",
    )


def measure(
    recipe: Recipe,
    *,
    data: Place | str | None = None,
    dataset: str | None = None,
    workers: int | None = None,
) -> Measured:
    """Measure one worker, and the link between two if there is a place for the second.

    `workers` is the largest number that is to be predicted: for one the link is not measured.
    """
    threads = torch.get_num_threads()
    backend = Serial()
    work = workload(recipe, workers=1)
    plan = work.plan
    device = backend.device
    clock = time.perf_counter if device.type != "cpu" else time.process_time  # of this process
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        model = build_model(recipe, device)
        optimizer = build_optimizer(recipe, model, backend)
        passes = Passes.of(recipe, model, device, side=recipe.data.image_size)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        # The batches are drawn once, so that no time has the drawing in it.
        works: dict[int, Callable[[], None]] = {
            size: partial(passes.train, *passes.batch(size)) for size in _device_batches(plan)
        }
        seconds = median_seconds({**works, 0: update}, device, rounds=ROUNDS, clock=clock)
        seconds_per_update = seconds.pop(0)
        # With a worker on every device, this one has its share of the CPU cores.
        shared = Serial(device)
        shared.local_size = _places(device.type)
        pipeline = open_images(recipe, plan, shared, folder=data, dataset=dataset)
        read = _images_per_second(pipeline, clock)
        dtype = recipe.reduction.dtype
        exact = kept_exact(dtype, model)
        width = 4 if dtype == "fp32" else 2
        grouping = grouping_of(recipe.execution.groups)
        groups = list(divide(model.named_parameters(), grouping=grouping, exact=exact))
    finally:
        torch.set_num_threads(threads)
    seconds_per_image, seconds_per_pass = fit_line(seconds)
    per_byte: float | None = None
    latency = 0.0
    if workers != 1 and (device.type == "cpu" or _places(device.type) > 1):
        per_byte, latency = fit_line(_exchanging())
    weights = [weight for group in groups for _, weight in group]
    return Measured(
        settings=work.settings,
        device=device.type,
        seconds_per_image=seconds_per_image,
        seconds_per_pass=seconds_per_pass,
        seconds_per_update=seconds_per_update,
        gradient_bytes=float(sum(w.numel() * (4 if w in exact else width) for w in weights)),
        messages=len(groups) + 1,  # the loss of the step is one more
        norm_layers=sum(isinstance(layer, SpanBatchNorm) for layer in model.modules()),
        exchange_seconds=latency,
        exchange_gigabytes_per_second=None if per_byte is None else 1e-9 / per_byte,
        images_per_second_read=read,
    )


def fit_line(times: dict[int, float]) -> tuple[float, float]:
    """Return slope and intercept in seconds of a line, by least squares of relative errors.

    Neither is below 0. Raises LargebatchError if larger batches take no longer.

    >>> tuple(round(each, 9) for each in fit_line({10: 0.12, 20: 0.22, 40: 0.42}))
    (0.01, 0.02)
    """
    sizes, seconds = (np.array(list(values), dtype=float) for values in (times, times.values()))
    table = np.stack([sizes / seconds, 1 / seconds], axis=1)
    ones = np.ones(len(sizes))
    slope, start = np.linalg.lstsq(table, ones)[0]
    # A negative slope or start has no meaning. Of the two lines with one of them 0, the better one
    # counts.
    if min(slope, start) < 0:  # then one of the two is 0
        alone = table.sum(axis=0) / np.square(table).sum(axis=0)
        errors = np.square(table * alone - 1).sum(axis=0)
        slope, start = np.where(errors == errors.min(), alone, 0.0)
    if slope == 0:
        shown = ", ".join(f"{size:,}: {1000 * time:.3g} ms" for size, time in times.items())
        raise LargebatchError(
            f"--calibrate: larger sizes took no longer ({shown}), so their cost is unknown; "
            "measure again when less else runs on this machine, or with a larger batch"
        )
    return float(slope), float(start)


def _places(device: str) -> int:
    return available_cores() if device == "cpu" else accelerator.count()


def _device_batches(plan: Plan) -> list[int]:
    """Return a quarter, a half and all of a device batch, in whole BatchNorm spans or within one.

    >>> from types import SimpleNamespace
    >>> _device_batches(SimpleNamespace(device_batch=96, bn_span=48))
    [24, 48, 96]
    """
    sizes = {max(2, plan.device_batch // part) for part in (4, 2, 1)}
    return sorted({whole_spans(size, plan.bn_span or 1) for size in sizes})


def _images_per_second(pipeline: Pipeline, clock: Callable[[], float]) -> float:
    """Return the rate of an input pipeline whose worker does nothing else.

    Raises LargebatchError if the run is too short to be timed.
    """
    seen = 0
    steps = pipeline.plan.train_steps
    # The first batches open files and start threads.
    with closing(pipeline.training(range(steps), clean=False)) as batches:
        for _ in islice(batches, 2):
            pass
        start = clock()
        for images, _ in batches:
            seen += len(images)
            if clock() - start > READ_SECONDS:
                break
        seconds = clock() - start
    if not seen or seconds <= 0:
        raise LargebatchError(
            f"--calibrate: {steps:,} updates are too few to time reading; give a longer duration, "
            "such as --set duration='{steps: 100}'"
        )
    return seen / seconds


def _exchanging() -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "exchange.json")
        start_workers(["-m", "largebatch.lab.measure.calibrate", str(file)], workers=2)
        seconds_by_size: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {int(size): float(seconds) for size, seconds in seconds_by_size.items()}


def measure_network(backend: Backend, *, sizes: Sequence[int] = NETWORK_SIZES) -> dict[int, float]:
    """Return the seconds of a sum over all workers by its bytes: median of REPEATS, slowest worker.

    The result is the same on every worker.
    """
    seconds_by_size = {}
    for size in sizes:
        tensor = torch.ones(size // 4, device=backend.device)
        durations = []
        for number in range(REPEATS + 2):  # the first two connect
            # Else the wait for a worker that is late would be counted as time of the sum.
            backend.barrier()
            start = time.perf_counter()
            backend.all_reduce(tensor).wait()
            accelerator.synchronize(tensor.device)  # sync: this is a measurement
            if number >= 2:
                durations.append(time.perf_counter() - start)
            # Else the numbers would grow with each sum.
            tensor.fill_(1)
        # Of the slowest worker, since an update waits for it.
        seconds = torch.tensor(median(durations), dtype=torch.float64).to(backend.device)
        seconds_by_size[size] = float(backend.all_gather(seconds).max())
    return seconds_by_size


def bandwidth(size: int, *, workers: int, seconds: float) -> float:
    """Return the bytes per second that each worker sends in a ring: 2 (n - 1) / n of the sum's."""
    return size * 2 * (workers - 1) / workers / seconds


def exchange(file: Path) -> None:
    """Run one of two workers; worker 0 writes the seconds by message size."""
    backend = connect("torch")
    if backend.device.type == "cpu":
        torch.set_num_threads(1)
    seconds_by_size = measure_network(backend, sizes=SIZES)
    if backend.rank == 0:
        file.write_text(json.dumps(seconds_by_size), encoding="utf-8")
    backend.close()


if __name__ == "__main__":
    exchange(Path(sys.argv[1]))
