"""Measure a machine with a recipe, and write the result as a cluster file for the planner.

One worker alone measures forward and backward at three device batches, the update, and the rate
of the input pipeline; two workers measure all-reduces of four sizes. The measurements alternate
round by round, so that a slow phase of the machine affects all equally. A worker has one CPU core,
as in a run with as many workers as cores. Its time on a CPU is processor time, without waits for
other programs; an all-reduce consists of waiting, so its shortest time counts.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from largebatch import accelerator
from largebatch.data.pipeline import open_images
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import available_cores
from largebatch.distributed.reducer import divide
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.lab.planner.cluster import Cluster, Measured
from largebatch.lab.planner.prediction import settings
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.launch import start_workers
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.runs.state import grouping_of, kept_exact
from largebatch.training.loss import cross_entropy

ROUNDS = 7
SIZES = (2**12, 2**16, 2**20, 2**24)
"""Message sizes in bytes of the timed all-reduces."""

READ_SECONDS = 1.0
"""Seconds that images are read; the first batches, which open the decoder, do not count."""


def calibrate(recipe: Recipe, out: Path, *, data: Path | None = None) -> list[str]:
    """Write a cluster file of this machine and return a description of the measurements.

    Raises LargebatchError if the file exists, cannot be written, or is not named *.yaml.
    """
    if out.suffix != ".yaml":
        raise LargebatchError(f"--out {out}: a cluster file has a name that ends in .yaml")
    try:  # before minutes of measurement
        out.touch(exist_ok=False)
        out.unlink()
    except OSError as error:
        raise LargebatchError(f"--out {out}: cannot be written: {error.strerror}") from None
    measured = measure(recipe, data=data)
    cluster = cluster_of(measured, name=out.stem)
    text = f"# Measured with largebatch plan --calibrate on {recipe.name}.\n" + dump_yaml(cluster)
    with out.open("x", encoding="utf-8") as file:
        file.write(text)
    return [*describe(measured), f"cluster file: {out}"]


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


def describe(measured: Measured) -> list[str]:
    """Describe the measurements."""
    rate, latency = measured.exchange_gigabytes_per_second, 1e6 * measured.exchange_seconds
    exchange = "not measured" if rate is None else f"{latency:.0f} us and {rate:.2f} GB/s"
    return [
        f"pass: {1000 * measured.seconds_per_pass:.2f} ms",
        f"image: {1000 * measured.seconds_per_image:.3f} ms",
        f"update: {1000 * measured.seconds_per_update:.2f} ms",
        f"all-reduce: {exchange}, {measured.messages} an update",
        f"reading: {measured.images_per_second_read:,.0f} images/s a worker",
    ]


def measure(
    recipe: Recipe,
    *,
    data: Path | None = None,
    dataset: str | None = None,
    workers: int | None = None,
) -> Measured:
    """Measure one worker, and the link between two if there is a place for the second.

    `workers` is the largest number that is to be predicted: for one the link is not measured.
    """
    threads = torch.get_num_threads()
    backend, plan = Serial(), make_plan(recipe, workers=1)
    if backend.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        model = build_model(recipe, backend.device)
        passes, update = _computing(recipe, plan, model, backend)
        read = _reading(recipe, plan, backend, data, dataset)
        sizes = _group_bytes(recipe, model)
    finally:
        torch.set_num_threads(threads)
    image, each = fit_line(passes)
    per_byte: float | None = None
    latency = 0.0
    if workers != 1 and (backend.device.type == "cpu" or _places(backend.device.type) > 1):
        per_byte, latency = fit_line(_exchanging())
    return Measured(
        model=recipe.model.name,
        arguments=recipe.model.arguments,
        classes=recipe.data.classes,
        image_size=recipe.data.image_size,
        precision=recipe.precision,
        settings=settings(recipe),
        device=backend.device.type,
        seconds_per_image=image,
        seconds_per_pass=each,
        seconds_per_update=update,
        gradient_bytes=float(sum(sizes)),
        reduction=recipe.reduction.dtype,
        groups=recipe.execution.groups.model_dump(mode="json"),
        messages=len(sizes) + 1,  # the loss of the step is one more
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
    sizes, seconds = (np.array(list(each), dtype=float) for each in (times, times.values()))
    table, ones = np.stack([sizes / seconds, 1 / seconds], axis=1), np.ones(len(sizes))
    slope, start = np.linalg.lstsq(table, ones)[0]
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


def _group_bytes(recipe: Recipe, model: nn.Module) -> list[int]:
    dtype = recipe.reduction.dtype
    exact, width = kept_exact(dtype, model), 4 if dtype == "fp32" else 2
    grouping = grouping_of(recipe.execution.groups)
    groups = divide(model.named_parameters(), grouping=grouping, exact=exact)
    return [
        sum(weight.numel() * (4 if weight in exact else width) for _, weight in group)
        for group in groups
    ]


def _places(device: str) -> int:
    return available_cores() if device == "cpu" else accelerator.count()


def _computing(
    recipe: Recipe, plan: Plan, model: nn.Module, backend: Backend
) -> tuple[dict[int, float], float]:
    optimizer = build_optimizer(recipe, model, backend)
    criterion = cross_entropy(
        smoothing=recipe.loss.label_smoothing, off_target=recipe.loss.off_target
    )
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(recipe.precision)
    side = recipe.data.image_size

    def forward_and_backward(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(backend.device.type, dtype=half, enabled=half is not None):
            loss = criterion(model(images), labels)
        loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    rivals: dict[int, Callable[[], object]] = {}
    for size in _device_batches(plan):
        images = torch.randn(size, 3, side, side, device=backend.device)
        labels = torch.randint(recipe.data.classes, (size,), device=backend.device)
        rivals[size] = partial(forward_and_backward, images, labels)
    found = _take_turns({**rivals, 0: step}, backend, _clock(backend))
    times = {size: median(each) for size, each in found.items()}
    return {size: times[size] for size in rivals}, times[0]


def _device_batches(plan: Plan) -> list[int]:
    """Return a quarter, a half and all of a device batch, in whole BatchNorm spans or within one.

    >>> from types import SimpleNamespace
    >>> _device_batches(SimpleNamespace(device_batch=96, bn_span=48))
    [24, 48, 96]
    """
    span, sizes = plan.bn_span or 1, set()
    for part in (4, 2, 1):
        size = max(2, plan.device_batch // part)
        sizes.add(size if size < span else size - size % span)
    return sorted(sizes)


def _take_turns(
    rivals: dict[int, Callable[[], object]], backend: Backend, clock: Callable[[], float]
) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {name: [] for name in rivals}
    for _ in range(ROUNDS + 1):
        for name, rival in rivals.items():
            backend.barrier()
            start = clock()
            rival()
            accelerator.synchronize(backend.device)  # sync: this is a measurement
            times[name].append(clock() - start)
    return {name: each[1:] for name, each in times.items()}


def _clock(backend: Backend) -> Callable[[], float]:
    """Return the clock for a worker alone: on a CPU, the process's processor time."""
    return time.process_time if backend.device.type == "cpu" else time.perf_counter


class _Shared(Serial):
    """A worker that leaves their share of the CPU cores to other workers of its machine."""

    def __init__(self, device: torch.device, local_size: int) -> None:
        super().__init__(device)
        self.local_size = local_size


def _reading(
    recipe: Recipe, plan: Plan, backend: Backend, data: Path | None, dataset: str | None = None
) -> float:
    """Return the images per second of the input pipeline for one worker that does nothing else.

    The worker has its share of the CPU cores with a worker on every device. Raises
    LargebatchError if the run is too short to be timed.
    """
    shared = _Shared(backend.device, _places(backend.device.type))
    pipeline, seen, clock = (
        open_images(recipe, plan, shared, folder=data, dataset=dataset),
        0,
        _clock(backend),
    )
    with closing(pipeline.training(range(plan.train_steps), clean=False)) as batches:
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
            f"--calibrate: {plan.train_steps:,} updates are too few to time reading; give a "
            "longer duration, such as --set duration='{steps: 100}'"
        )
    return seen / seconds


def _exchanging() -> dict[int, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "exchange.json")
        start_workers(["-m", "largebatch.lab.measure.calibrate", str(file)], workers=2)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {int(size): float(seconds) for size, seconds in found.items()}


def exchange(file: Path) -> None:
    """Run one of two workers; worker 0 writes the seconds by message size."""
    backend = connect("torch")
    if backend.device.type == "cpu":
        torch.set_num_threads(1)
    tensors = {size: torch.zeros(size // 4, device=backend.device) for size in SIZES}
    rivals: dict[int, Callable[[], object]] = {
        size: partial(_all_reduce, backend, tensor) for size, tensor in tensors.items()
    }
    found = _take_turns(rivals, backend, time.perf_counter)
    if backend.rank == 0:
        shortest = {size: min(times) for size, times in found.items()}
        file.write_text(json.dumps(shortest), encoding="utf-8")
    backend.close()


def _all_reduce(backend: Backend, tensor: torch.Tensor) -> None:
    backend.all_reduce(tensor).wait()


if __name__ == "__main__":
    exchange(Path(sys.argv[1]))
