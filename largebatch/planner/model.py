"""Seconds of an optimizer step and of a run, in terms of what a machine and a run are.

A step is the sum of what it waits for, because each part was found to add up in published runs:

    step = accumulation (b c + launch) + exposed exchange + shared statistics
    c = 1 / (scale deviation clock sqrt(memory bandwidth x tensor peak))

with b images on a device. The layers of ResNet-50 are bound partly by memory and partly by the
tensor cores, so their rate is taken to grow as the geometric mean of the two peaks. A data sheet
may give one tensor peak for variants of a chip that draw unlike power: power follows the cube of
the clock, so these differ by clock = (watts / watts of the peak)^(1/3). The exchange is
a hierarchical all-reduce (Fujitsu's in MLPerf v0.6; Rabenseifner 2004): reduce-scatter in the node,
all-reduce between nodes, all-gather in the node, with `level` seconds for each doubling of the
nodes, which holds the latencies of its tree and the wait for the slowest of more and more workers.
"""

import math
from dataclasses import dataclass

from largebatch.planner.cluster import Cluster, Generation, Gpu, Software

WIRE_EFFICIENCY = 0.8
"""Of a link's bandwidth that all-reduces reach. An assumption: NCCL's own tests show 0.75 to 0.9;
the published runs fit as well with 0.6."""

OVERLAP_FROM = 100
"""Images on a device below which backward hides no exchange.

Four MLPerf v0.6 entries send their gradients in 4 to 16 groups while backward runs, with 39 to 65
images on a GPU, and take as long as if the exchange were not hidden; Dell's, with 208, hide it.
"""

BACKWARD = 2 / 3
"""Share of backward in forward and backward: it computes two gradients for one output."""

BATCHNORM_LAYERS = 53
STATISTICS_SECONDS = 5e-6
"""Of one exchange of BatchNorm statistics between two GPUs of a node. An assumption."""

GRADIENTS = 25_557_032
"""Parameters of ResNet-50."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What no data sheet gives, in seconds where not otherwise said."""

    scale: float
    """Images a second for sqrt(1 GB/s x 1 TFLOP/s)."""

    deviations: dict[Generation, float]
    """Of a generation's rate from the law, as a factor."""

    launch: dict[Software, float]
    """Of every device batch, whatever its size."""

    level: float
    """Of every step, for each doubling of the nodes; 0 where switches add up."""

    start: float
    """Of every run, until it makes steps at full speed."""

    evaluation: float
    """Of every evaluation, besides its forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a step's time depends on, of a number of equal nodes."""

    seconds_per_image: float
    launch: float
    update: float = 0.0
    link: float
    """Bytes a second of a worker inside its node, one direction."""

    network: float
    """Bytes a second of a node."""

    workers_per_node: int
    latency: float = 0.0
    """Of the all-reduces of an update inside a node, for each doubling of its workers."""

    statistics: float = 2 * BATCHNORM_LAYERS * STATISTICS_SECONDS
    """Of exchanging BatchNorm statistics once in all layers, between two workers."""

    level: float = 0.0
    sharp: bool = False
    start: float = 0.0
    evaluation: float = 0.0
    read: float = math.inf
    """Images a second that a worker can be given."""

    cores: bool = False
    """Workers are CPU cores: reading takes the time of computing, and more workers than cores take
    turns."""

    oversubscription: float = 1.0
    """How much longer that takes than the sum of the turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run asks of it."""

    workers: int
    device_batch: int
    accumulation: int = 1
    gradient_bytes: float = 2.0 * GRADIENTS
    overlap: bool = True
    """Gradients are sent in groups while backward runs."""

    sync_workers: int = 1
    """Workers who share BatchNorm statistics."""

    pixels: float = 1.0
    """Of an image, relative to 224 x 224."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where the seconds of one optimizer step go."""

    compute: float
    launch: float
    exchange: float
    """Of the all-reduce, what backward does not hide, and the wait for other workers."""

    statistics: float
    input: float
    """What reading takes longer than all the rest."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.launch + self.exchange + self.statistics + self.input


def images_per_second(gpu: Gpu, constants: Constants) -> float:
    """Return the rate of one GPU with a device batch so large that nothing else counts."""
    law = math.sqrt(gpu.memory_gigabytes_per_second * gpu.tensor_teraflops)
    clock = math.cbrt(gpu.watts / (gpu.peak_watts or gpu.watts))
    return constants.scale * constants.deviations[gpu.generation] * law * clock


def machine(cluster: Cluster, constants: Constants, *, software: Software | None = None) -> Machine:
    """Describe a cluster by its data sheet and the constants, or by what was measured on it."""
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
            oversubscription=found.oversubscription,
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
        start=constants.start,
        evaluation=constants.evaluation,
    )


def exchange_seconds(on: Machine, *, workers: int, num_bytes: float) -> float:
    """Return the seconds of a hierarchical all-reduce of `num_bytes` that nothing hides.

    A ring of n sends 2 (n - 1) / n of the bytes; switches that add up, half of that.
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
    return 1 if on.cores else -(-workers // on.workers_per_node)


def _turns(on: Machine, workers: int) -> float:
    """Return how many times longer workers take because they share cores."""
    if not on.cores or workers <= on.workers_per_node:
        return 1.0
    return on.oversubscription * workers / on.workers_per_node


def step_seconds(on: Machine, load: Load) -> Step:
    """Return where the seconds of one optimizer step go."""
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
    return Step(
        compute=compute,
        launch=launch,
        exchange=exchange,
        statistics=statistics,
        input=max(0.0, reading - busy),
    )


def evaluation_seconds(on: Machine, *, workers: int, samples: int, pixels: float = 1.0) -> float:
    """Return the seconds of one evaluation: forward passes, and starting and ending them."""
    forward = (1 - BACKWARD) * on.seconds_per_image * pixels
    return (on.evaluation + math.ceil(samples / workers) * forward) * _turns(on, workers)
