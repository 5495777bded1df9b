"""A recipe on a cluster: the time of each part, limit, memory, and cost.

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from pydantic import JsonValue

from largebatch.errors import PlanError
from largebatch.formatting import duration, plural, three_digits
from largebatch.lab.planner.cluster import (
    Cluster,
    ClusterError,
    Generation,
    Gpu,
    Software,
    require_workers,
)
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.execution import GroupsByBytes
from largebatch.recipe.model import RESNET50
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe

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
    # The geometric mean of the two peaks; see the top of this file.
    law = math.sqrt(gpu.memory_gigabytes_per_second * gpu.tensor_teraflops)
    clock = math.cbrt(gpu.watts / (gpu.peak_watts or gpu.watts))
    return constants.scale * constants.deviations[gpu.generation] * law * clock


def machine(
    cluster: Cluster, constants: Constants = FITTED, *, software: Software | None = None
) -> Machine:
    """Describe a cluster by its data sheet and the constants, or by its measurement."""
    if cluster.measured is not None:
        measured = cluster.measured
        return Machine(
            seconds_per_image=measured.seconds_per_image,
            launch=measured.seconds_per_pass,
            update=measured.seconds_per_update,
            link=(measured.exchange_gigabytes_per_second or math.inf) * 1e9,
            network=(cluster.network_gigabytes_per_second or math.inf) * 1e9,
            workers_per_node=cluster.gpus_per_node,
            latency=measured.exchange_seconds * measured.messages,
            statistics=2 * measured.norm_layers * measured.exchange_seconds,
            read=measured.images_per_second_read,
            cores=measured.device == "cpu",
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
    # Reduce-scatter before and all-gather after the exchange between nodes, (n - 1) / n of the
    # bytes each.
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
    return max(1.0, workers / on.workers_per_node) if on.cores else 1.0


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
        # Only what backward computes beyond OVERLAP_FROM images hides anything, by the published
        # runs.
        hidden = BACKWARD * image * max(0, load.device_batch - OVERLAP_FROM)
        exchange = max(0.0, exchange - hidden)
    if not on.sharp:
        # Not hidden by backward: it is the wait for the slowest worker, too. Switches that sum have
        # no tree.
        exchange += on.level * math.log2(_nodes(on, load.workers))
    statistics = on.statistics * math.log2(load.sync_workers) * load.accumulation * turns
    reading = load.accumulation * load.device_batch * turns / on.read
    # A GPU reads while it computes; cores that read do not compute.
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


SIZE = 224  # image size of the published runs

CLASSES = 1000
HEAD_INPUTS = 2049
"""Inputs of ResNet-50's classifier: 2,048 features and its bias."""

JPEG_BYTES = 110_000  # bytes of an ImageNet image

IMAGES_PER_CORE = 300.0
"""Images a second that torchvision decodes and augments (measured, full-size ImageNet JPEGs)."""

KEPT_BYTES = 43e6
"""Bytes that autograd saves of a 224 x 224 image for ResNet-50, in half precision (measured)."""

FIXED_BYTES = 2e9
"""Bytes of libraries, kernels' workspaces and communication buffers on a GPU. An assumption."""

CACHED_BYTES = 2**36
"""Largest split in execution.cache, in bytes, as data.decoders.pixel_cache.LIMIT."""

COSTLESS_ARGUMENTS = {"zero_init_last", "zero_init_residual"}
"""Arguments of ResNet-50 that change no shape, in timm and in torchvision."""

PUBLISHED: dict[Generation, tuple[int, int, int]] = {
    "volta": (3072, 28, 208),
    "ampere": (4320, 15, 408),
    "hopper": (8, 400, 400),
}
"""Most GPUs, and smallest and largest device batch, of the runs that the model was fitted to."""

HELP = {
    "memory": "a smaller execution.device_batch, or GPUs with more memory",
    "launch": "a larger device batch or fewer micro-batches: each costs as much",
    "exchange": "device batches above 100 and several groups, for backward to hide it; SHARP; fp16",
    "statistics": "a batch.bn_span that one device batch holds",
    "input": "execution.decoder=dali, execution.cache, or more CPU cores a GPU",
    "evaluation": "a larger evaluation.every_epochs",
    "start": "a longer run: it is a second of each",
}
"""Ways to shorten each part of a run's time, except computing."""

SETTINGS = (
    *("model.name", "model.arguments", "data.classes", "data.image_size", "precision"),
    *("reduction.dtype", "execution.groups", "optimizer.kind", "data.source"),
    *("execution.decoder", "execution.cache", "execution.memory_format", "execution.kernels"),
)
"""Keys of a recipe that decide the times of reading, a pass, an update and its messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a recipe computes, reads and sends on a number of workers."""

    name: str
    plan: Plan
    settings: dict[str, JsonValue]
    """Values of SETTINGS."""

    sizes: tuple[tuple[range, int], ...]
    """Updates, and their image size."""

    forward: tuple[tuple[int, int], ...]
    """Samples, and how often they pass forward alone: evaluations and statistics."""

    gradient_bytes: float
    """Bytes that a worker sends of ResNet-50's gradients in an update."""

    overlap: bool
    """False if one group holds all gradients of ResNet-50, which backward cannot hide."""

    averages: bool
    """True if there is an average of the weights, which is another copy."""

    cached_bytes: int
    """Least bytes of the decoded training images: those at the model's image size."""

    @property
    def decodes(self) -> bool:
        """True if image files are read and decoded throughout the run."""
        cached = self.settings["execution.cache"] in {"memory", "device"}
        return self.settings["data.source"] == "folder" and not cached


def workload(recipe: Recipe, *, workers: int) -> Workload:
    """Return the work of a recipe on a number of workers.

    Raises PlanError where the batch cannot be divided over them, for a protocol, and where the
    images cannot fit execution.cache, however small they are.
    """
    if recipe.protocol is not None:
        raise PlanError("protocol: only updates that wait for all are predicted; leave it out")
    data = recipe.data
    cache = recipe.execution.cache
    # At the least, as images of the size that is trained on.
    cached = 3 * data.train_samples * data.image_size**2
    if cache in {"memory", "device"} and cached > CACHED_BYTES:
        raise PlanError(
            f"execution.cache: {cache}: {data.train_samples:,} images of {data.image_size} x "
            f"{data.image_size} take {cached / 1e9:.0f} GB or more, and a cache holds "
            f"{CACHED_BYTES / 1e9:.0f} GB; --set execution.cache=none --set execution.decoder=dali"
        )
    plan = make_plan(recipe, workers=workers)
    sizes = plan.sized(range(plan.train_steps), otherwise=data.image_size)
    sizes.append((range(plan.train_steps, plan.updates), data.image_size))
    polish = recipe.polish or Polish.model_construct()
    # A stage of statistics is left out where those before it are kept.
    judged = polish.keep == "better" and polish.swa is not None
    last = polish.statistics is not None and not (judged and polish.affine is None)
    optional = (plan.clean_steps, polish.ema, polish.swa, plan.affine_steps)
    stages = 1 + sum(map(bool, optional)) + last
    # An evaluation that is due at the end of a stage counts once.
    evaluations = len(set(plan.evaluate_after) - {0, plan.train_steps, plan.steps}) + stages
    views = recipe.evaluation.views
    forward = [(plan.val_samples, views * evaluations)]
    if polish.statistics is not None:
        forward.append((polish.statistics.samples, last + judged))
    if polish.held_out is not None:
        forward.append((polish.held_out, views * stages))
    if "generalization_gap" in recipe.monitor:
        forward.append((recipe.train_samples, views * stages))
    settings = {key: attrgetter(key)(recipe) for key in SETTINGS}
    groups = recipe.execution.groups
    settings |= {"execution.groups": groups.model_dump(mode="json")}
    # Only the last layer depends on the classes.
    numbers = GRADIENTS + (data.classes - CLASSES) * HEAD_INPUTS
    return Workload(
        name=recipe.name,
        plan=plan,
        settings=settings,
        sizes=tuple(sizes),
        forward=tuple(forward),
        gradient_bytes=numbers * (4.0 if recipe.reduction.dtype == "fp32" else 2.0),
        overlap=not isinstance(groups, GroupsByBytes) or groups.megabytes * 1e6 < 4 * GRADIENTS,
        averages=bool(polish.ema or polish.swa),
        cached_bytes=cached if cache == "device" else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted run of one recipe on one cluster. Times are in seconds."""

    recipe: str
    cluster: str
    workers: int
    global_batch: int
    device_batch: int
    accumulation: int
    steps: int
    step: dict[str, float]
    """Parts of an update with the first global batch; their sum is its time."""

    parts: dict[str, float]
    """Parts of the whole run."""

    seconds: float
    low: float
    high: float
    """The interval that holds 90 % of such runs."""

    images_per_second: float
    efficiency: float
    """Share of the time in which GPUs compute at the rate of a large device batch."""

    limit: str
    """The largest part of the time; memory where a device batch does not fit."""

    help: str
    """A way to shorten the largest part that is not computing."""

    read_bytes_per_second: float
    """Bytes that all workers read, if images are decoded each time and reading is not the limit."""

    memory_bytes: float | None
    memory_available: float | None
    cost: float | None
    """Price of whole nodes."""

    extrapolates: tuple[str, ...]
    """Settings in which the run exceeds the published ones."""


def predict(work: Workload, cluster: Cluster) -> Prediction:
    """Predict a run on a cluster.

    Raises ClusterError where the cluster has fewer workers or the times of the model are unknown.
    """
    plan = work.plan
    workers = plan.workers
    if cluster.measured is None or cluster.measured.device != "cpu":
        require_workers(cluster, workers)
    _require_known(work, cluster)
    on = machine(cluster)
    if cluster.gpu is not None and work.decodes and work.settings["execution.decoder"] != "dali":
        on = replace(on, read=IMAGES_PER_CORE * cluster.cpu_cores / cluster.gpus_per_node)
    first = step_seconds(on, _load(work, cluster, plan.accumulation))
    parts = dict.fromkeys(first, 0.0)
    for part, size in work.sizes:
        for steps, _, accumulation in plan.within(part):
            step = step_seconds(on, _load(work, cluster, accumulation, size=size))
            for name in parts:
                parts[name] += len(steps) * step[name]
    usual = _pixels(work, cluster, work.sizes[-1][1])
    parts["evaluation"] = sum(
        times * evaluation_seconds(on, workers=workers, samples=samples, pixels=usual)
        for samples, times in work.forward
    )
    parts["start"] = on.start
    seconds = sum(parts.values())
    # The affine stage repeats the last global batch size after the schedule has ended.
    samples = plan.position(plan.steps) + plan.affine_steps * plan.pieces[-1].global_batch
    # The rate of reading at which nothing would wait for it.
    wanted = samples / (seconds - parts["input"])
    memory = None
    available = None
    if cluster.measured is not None:
        spread = 1 + cluster.measured.error
    else:
        assert cluster.gpu is not None
        spread = SPREAD[cluster.gpu.generation]
        available = cluster.gpu.memory_gigabytes * 1e9
        # Weights, gradients and momentum in float32, and an average.
        memory = (3 + work.averages) * 4 * GRADIENTS + work.cached_bytes + FIXED_BYTES
        memory += plan.device_batch * KEPT_BYTES * usual
    # Computing cannot be shortened by a setting, so help is for the largest other part.
    wait = max((name for name in parts if name != "compute"), key=lambda name: parts[name])
    limit = max(parts, key=lambda name: parts[name])
    remedy = f"against {wait}, {parts[wait] / seconds:.0%}: {HELP[wait]}"
    if memory is not None and available is not None and memory > available:
        limit = "memory"
        remedy = f"against memory: {HELP['memory']}"
    price = cluster.price_per_gpu_hour
    nodes = math.ceil(workers / cluster.gpus_per_node)
    return Prediction(
        recipe=work.name,
        cluster=cluster.name,
        workers=workers,
        global_batch=plan.global_batch,
        device_batch=plan.device_batch,
        accumulation=plan.accumulation,
        steps=plan.updates,
        step=first,
        parts=parts,
        seconds=seconds,
        low=seconds / spread,
        high=seconds * spread,
        images_per_second=samples / seconds,
        efficiency=parts["compute"] / seconds,
        limit=limit,
        help=remedy,
        read_bytes_per_second=wanted * JPEG_BYTES if work.decodes else 0.0,
        memory_bytes=memory,
        memory_available=available,
        cost=price and price * nodes * cluster.gpus_per_node * seconds / 3600,
        extrapolates=tuple(_beyond(work, cluster)),
    )


def _load(work: Workload, cluster: Cluster, accumulation: int, *, size: int | None = None) -> Load:
    measured = cluster.measured
    return Load(
        workers=work.plan.workers,
        device_batch=work.plan.device_batch,
        accumulation=accumulation,
        gradient_bytes=measured.gradient_bytes if measured else work.gradient_bytes,
        overlap=work.overlap,
        sync_workers=work.plan.sync_workers,
        pixels=_pixels(work, cluster, size or work.sizes[-1][1]),
    )


def _pixels(work: Workload, cluster: Cluster, size: int) -> float:
    """Return the pixels of an image, relative to those of the published or measured runs."""
    return (size / (SIZE if cluster.measured is None else work.sizes[-1][1])) ** 2


def _beyond(work: Workload, cluster: Cluster) -> Iterator[str]:
    if cluster.gpu is None:
        return
    plan = work.plan
    kind = work.settings["optimizer.kind"]
    generation = cluster.gpu.generation
    if generation in PUBLISHED:
        most, smallest, largest = PUBLISHED[generation]
        if plan.workers > most:
            yield f"published runs on {generation} GPUs have at most {most:,}"
        if not smallest <= plan.device_batch <= largest:
            yield f"device batches are {smallest} to {largest} there"
    else:
        yield f"no published run on {generation} GPUs: its data sheet alone"
    if plan.accumulation > 1 or plan.batch_changes:
        yield "published runs have one micro-batch"
    if work.settings["precision"] != "fp16":
        yield "published runs compute in fp16"
    if {size for _, size in work.sizes} != {SIZE}:
        yield f"published runs have images of {SIZE} x {SIZE}"
    if kind not in {"lars", "sgd"}:
        yield f"the additional time of an update of {kind} is unknown"


def _require_known(work: Workload, cluster: Cluster) -> None:
    """Raise ClusterError where the times of the model on this cluster are unknown."""
    measured = cluster.measured
    settings = work.settings
    if measured is not None:
        for key, value in settings.items():
            other = measured.settings.get(key)
            if value != other:
                raise ClusterError(
                    f"{key}: {value}: {cluster.name} was measured with {other}; measure "
                    "this recipe with `largebatch plan --calibrate`"
                )
        return
    name = settings["model.name"]
    arguments = settings["model.arguments"]
    assert isinstance(arguments, dict)
    changed = sorted(arguments.keys() - COSTLESS_ARGUMENTS)
    if name not in RESNET50 or changed:
        key = f"model.arguments: {', '.join(changed)}" if changed else f"model.name: {name}"
        raise ClusterError(
            f"{key}: {cluster.name} is calibrated with published runs of {RESNET50[0]} as it is; "
            "measure others with `largebatch plan --calibrate`"
        )
    if settings["precision"] not in {"fp16", "bf16"}:
        raise ClusterError(
            f"precision: {settings['precision']}: the published runs compute in fp16; plan this "
            "with --set precision=fp16"
        )


def describe(prediction: Prediction) -> dict[str, str]:
    """Return a prediction as rows of text by name."""
    step = sum(prediction.step.values())
    rows = {
        "recipe": prediction.recipe,
        "cluster": f"{prediction.cluster}, {plural(prediction.workers, 'worker')}",
        "global batch": f"{prediction.global_batch:,} = {plural(prediction.workers, 'worker')} x "
        f"{plural(prediction.accumulation, 'micro-batch')} x {prediction.device_batch}",
        "time": f"{duration(prediction.seconds)}, 90% of such runs within "
        f"{duration(prediction.low)} to {duration(prediction.high)}",
        "a step": f"{1000 * step:.2f} ms, {prediction.steps:,} of them: "
        f"{_shares(prediction.step, step)}",
        "the run": _shares(prediction.parts, prediction.seconds),
        "not included": "the job's own start, queues, checkpoints, the report, slower software",
        "throughput": f"{prediction.images_per_second:,.0f} images/s, "
        f"{prediction.images_per_second / prediction.workers:,.0f} a worker, efficiency "
        f"{prediction.efficiency:.0%}",
    }
    if prediction.read_bytes_per_second:
        read = three_digits(prediction.read_bytes_per_second / 1e9)
        rows["input"] = f"{read} GB/s of JPEG files in all"
    if prediction.memory_bytes is not None and prediction.memory_available is not None:
        used = prediction.memory_bytes / 1e9
        available = prediction.memory_available / 1e9
        rows["memory"] = f"{used:.0f} of {available:.0f} GB a GPU"
    if prediction.cost is not None:
        rows["cost"] = f"{prediction.cost:,.2f}"
    unfit = ": a device batch does not fit, so there is no such run"
    rows["limited by"] = prediction.limit + unfit * (prediction.limit == "memory")
    rows["what helps"] = prediction.help
    if prediction.extrapolates:
        rows["extrapolates"] = "; ".join(prediction.extrapolates)
    return rows


def _shares(parts: dict[str, float], whole: float) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in ordered if part > 0.005 * whole)
