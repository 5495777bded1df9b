"""Seconds of an optimizer step and of an evaluation, from the description of a machine and a run.

A step is the sum of its parts, because the parts were found to add up in published runs:

    step = accumulation (b c + launch) + exposed exchange + shared statistics
    c = 1 / (scale deviation clock sqrt(memory bandwidth x tensor peak))

with b images on a device. The layers of ResNet-50 are bound partly by memory and partly by the
tensor cores, so their rate is assumed to grow as the geometric mean of the two peaks. A data sheet
may give one tensor peak for variants of a chip that draw different power: power follows the cube of
the clock, so these differ by clock = (watts / watts of the peak)^(1/3). The exchange is
a hierarchical all-reduce (Fujitsu's in MLPerf v0.6; Rabenseifner 2004): reduce-scatter in the node,
all-reduce between nodes, all-gather in the node, with `level` seconds for each doubling of the
nodes, for the latencies of its tree and the wait for the slowest of all workers. The constants are
fitted to 27 published runs by benchmarks/studies/planner, of whose systems each was left out once.
"""

import math
from dataclasses import dataclass

from largebatch.lab.planner.cluster import Cluster, Generation, Gpu, Software

WIRE_EFFICIENCY = 0.8
"""Share of a link's bandwidth that all-reduces reach. An assumption: NCCL's own tests show 0.75 to
0.9; the published runs fit as well with 0.6."""

OVERLAP_FROM = 100
"""Images on a device up to which backward hides no exchange.

Four MLPerf v0.6 entries send their gradients in 4 to 16 groups while backward runs, with 39 to 65
images on a GPU, and take as long as if the exchange were not hidden; Dell's, with 208, hide it.
"""

BACKWARD = 2 / 3
"""Share of backward in forward and backward: it computes two gradients for one output."""

BATCHNORM_LAYERS = 53
STATISTICS_SECONDS = 5e-6
"""Seconds of one exchange of BatchNorm statistics between two GPUs of a node. An assumption."""

GRADIENTS = 25_557_032  # parameters of ResNet-50

SPREAD: dict[Generation, float] = {"volta": 1.11, "ampere": 1.13, "hopper": 1.23, "blackwell": 1.42}
"""Factor from a predicted time to either end of the interval that holds 90 % of such runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Constants that no data sheet gives, in seconds unless stated otherwise."""

    scale: float
    """Images a second for sqrt(1 GB/s x 1 TFLOP/s)."""

    deviations: dict[Generation, float]
    """Factor of a generation's rate over the law."""

    launch: dict[Software, float]
    """Seconds of every device batch, whatever its size."""

    level: float
    """Seconds of every step, for each doubling of the nodes; 0 where switches sum."""

    start: dict[Software, float]
    """Seconds from the start of a run until its steps have full speed."""

    evaluation: float
    """Seconds of every evaluation, without its forward passes."""


FITTED = Constants(
    scale=4.14309,
    deviations={"volta": 1.04257, "ampere": 0.99999, "hopper": 0.96545, "blackwell": 1.0},
    launch={"launched": 9.31966e-3, "graphs": 1.89837e-3},
    level=3.55386e-4,
    start={"launched": 4.76195, "graphs": 0.626828},
    evaluation=3.93062e-2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes, by the figures that decide the time of a step."""

    seconds_per_image: float
    launch: float
    update: float = 0.0
    link: float
    """Bytes a second of a worker inside its node, one direction."""

    network: float
    """Bytes a second of a node."""

    workers_per_node: int
    latency: float = 0.0
    """Seconds of an update's all-reduces inside a node, for each doubling of its workers."""

    statistics: float = 2 * BATCHNORM_LAYERS * STATISTICS_SECONDS
    """Seconds of exchanging BatchNorm statistics once in all layers, between two workers."""

    level: float = 0.0
    sharp: bool = False
    start: float = 0.0
    evaluation: float = 0.0
    read: float = math.inf
    """Images a second that a worker can read."""

    cores: bool = False
    """True if workers are CPU cores: reading takes time from computing, and more workers than cores
    take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a step."""

    workers: int
    device_batch: int
    accumulation: int = 1
    gradient_bytes: float = 2.0 * GRADIENTS
    overlap: bool = True
    """True if gradients are sent in groups while backward runs."""

    sync_workers: int = 1
    """Number of workers that share BatchNorm statistics."""

    pixels: float = 1.0
    """Pixels of an image, relative to 224 x 224."""


def images_per_second(gpu: Gpu, constants: Constants) -> float:
    """Return the rate of one GPU with a device batch that is large enough to hide all else."""
    law = math.sqrt(gpu.memory_gigabytes_per_second * gpu.tensor_teraflops)
    clock = math.cbrt(gpu.watts / (gpu.peak_watts or gpu.watts))
    return constants.scale * constants.deviations[gpu.generation] * law * clock


def machine(
    cluster: Cluster, constants: Constants = FITTED, *, software: Software | None = None
) -> Machine:
    """Describe a cluster by its data sheet and the constants, or by its measurement."""
    if cluster.measured is not None:
        found = cluster.measured
        return Machine(
            seconds_per_image=found.seconds_per_image,
            launch=found.seconds_per_pass,
            update=found.seconds_per_update,
            link=(found.exchange_gigabytes_per_second or math.inf) * 1e9,
            network=(cluster.network_gigabytes_per_second or math.inf) * 1e9,
            workers_per_node=cluster.gpus_per_node,
            latency=found.exchange_seconds * found.messages,
            statistics=2 * found.norm_layers * found.exchange_seconds,
            read=found.images_per_second_read,
            cores=found.device == "cpu",
        )
    assert cluster.gpu is not None
    return Machine(
        seconds_per_image=1 / images_per_second(cluster.gpu, constants),
        launch=constants.launch[software or cluster.software],
        link=cluster.gpu.link_gigabytes_per_second * 1e9 * WIRE_EFFICIENCY,
        network=(cluster.network_gigabytes_per_second or math.inf) * 1e9 * WIRE_EFFICIENCY,
        workers_per_node=cluster.gpus_per_node,
        level=constants.level,
        sharp=cluster.sharp,
        start=constants.start[software or cluster.software],
        evaluation=constants.evaluation,
    )


def exchange_seconds(on: Machine, *, workers: int, num_bytes: float) -> float:
    """Return the seconds of a hierarchical all-reduce of `num_bytes` without overlap.

    A ring of n sends 2 (n - 1) / n of the bytes; switches that sum send half of that.
    """
    nodes = _nodes(on, workers)
    inside = workers if on.cores else min(workers, on.workers_per_node)
    seconds = 2 * num_bytes * (inside - 1) / inside / on.link
    seconds += on.latency * math.log2(inside)
    if nodes > 1:
        sent = num_bytes if on.sharp else 2 * num_bytes * (nodes - 1) / nodes
        seconds += sent / on.network
    return seconds * _turns(on, workers)


def _nodes(on: Machine, workers: int) -> int:
    return 1 if on.cores else math.ceil(workers / on.workers_per_node)


def _turns(on: Machine, workers: int) -> float:
    """Return the factor by which sharing cores slows workers down."""
    if not on.cores or workers <= on.workers_per_node:
        return 1.0
    return workers / on.workers_per_node


def step_seconds(on: Machine, load: Load) -> dict[str, float]:
    """Return the seconds of the parts of one optimizer step, which add up to its time.

    `exchange` is the part of the all-reduce that backward does not hide, and the wait for other
    workers; `input` is the time of reading beyond that of all other parts.
    """
    turns = _turns(on, load.workers)
    image = on.seconds_per_image * load.pixels * turns
    compute = load.accumulation * load.device_batch * image + on.update * turns
    launch = load.accumulation * on.launch * turns
    exchange = exchange_seconds(on, workers=load.workers, num_bytes=load.gradient_bytes)
    if load.overlap and not on.cores:
        hidden = BACKWARD * image * max(0, load.device_batch - OVERLAP_FROM)
        exchange = max(0.0, exchange - hidden)
    if not on.sharp:
        exchange += on.level * math.log2(_nodes(on, load.workers))
    statistics = on.statistics * math.log2(load.sync_workers) * load.accumulation * turns
    reading = load.accumulation * load.device_batch * turns / on.read
    busy = 0.0 if on.cores else compute + launch + exchange + statistics
    return {
        "compute": compute,
        "launch": launch,
        "exchange": exchange,
        "statistics": statistics,
        "input": max(0.0, reading - busy),
    }


def evaluation_seconds(on: Machine, *, workers: int, samples: int, pixels: float = 1.0) -> float:
    """Return the seconds of one evaluation: forward passes, and their start and end."""
    forward = (1 - BACKWARD) * on.seconds_per_image * pixels
    return (on.evaluation + math.ceil(samples / workers) * forward) * _turns(on, workers)
