"""A recipe on a cluster: the time of each part, limit, memory, energy, cost, and the best batch.

The law of epochs behind the best batch is that of ResNet-50 on ImageNet with LARS to 75.9 % top-1:
epochs(B) = shortest (1 + B / critical), through MLPerf's reference points (`suggest`). Time is
epochs x steps of an epoch x time of a step, so every number of GPUs has a best batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from pydantic import JsonValue

from largebatch.errors import PlanError
from largebatch.formatting import duration, three_digits
from largebatch.lab.planner.calibration import (
    COVERAGE,
    EVALUATE_EVERY,
    IMAGES,
    VALIDATION,
    Published,
    installed_fit,
    installed_left_out,
    published_runs,
    quantile,
)
from largebatch.lab.planner.cluster import Cluster, ClusterError, Gpu, Measured, require_workers
from largebatch.lab.planner.model import (
    GRADIENTS,
    Constants,
    Load,
    Machine,
    evaluation_seconds,
    machine,
    step_seconds,
)
from largebatch.lab.planner.suggest import LARGEST, EpochLaw, fit_epochs, reference_points
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.execution import ConstantGroups, Groups, GroupsByBytes
from largebatch.recipe.model import RESNET50
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe

CLASSES, HEAD_INPUTS = 1000, 2049
"""Outputs and inputs of ResNet-50's classifier, with its bias."""

JPEG_BYTES = 110_000
"""Bytes of an ImageNet image."""

IMAGES_PER_CORE = 300.0
"""Images a second that torchvision decodes and augments (measured, full-size ImageNet JPEGs)."""

KEPT_BYTES = 43e6
"""Bytes that autograd saves of a 224 x 224 image for ResNet-50, in half precision; 86 MB in fp32
(measured)."""

FIXED_BYTES = 2e9
"""Bytes of libraries, kernels' workspaces and communication buffers on a GPU. An assumption."""

TENSORS = 161
"""Gradients of ResNet-50."""

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
    """The interval that holds COVERAGE of such runs."""

    coverage: float
    images_per_second: float
    efficiency: float
    """Share of the time in which GPUs compute at the rate of a large device batch."""

    limit: str
    """The largest part of the time; memory where a device batch does not fit."""

    help: str
    """A way to shorten the largest part that is not computing."""

    read_bytes_per_second: float
    """Bytes that all workers read, if images are decoded each time and reading is not the limit."""

    cores_per_worker: float
    """CPU cores that decoding needs."""

    cores_available: float
    memory_bytes: float | None
    memory_available: float | None
    kilowatt_hours: float | None
    """Upper bound of the energy: of whole nodes, or of the GPUs if `node_watts` is unknown."""

    energy_of: Literal["nodes", "GPUs"]
    cost: float | None
    extrapolates: tuple[str, ...]


def predict(recipe: Recipe, cluster: Cluster, *, workers: int) -> Prediction:
    """Predict the run of a recipe on a number of workers of a cluster.

    Raises ClusterError where the cluster has fewer workers or the model is unknown, PlanError where
    the batch cannot be divided over the workers.
    """
    if cluster.measured is None or cluster.measured.device != "cpu":
        require_workers(cluster, workers)
    if recipe.protocol is not None:
        raise PlanError(
            "protocol: times are predicted of the synchronous core alone; leave protocol out"
        )
    require_known(recipe, cluster)
    plan = make_plan(recipe, workers=workers)
    found = installed_fit()

    def total(constants: Constants) -> float:
        return sum(_parts(recipe, plan, cluster, constants).values())

    parts = _parts(recipe, plan, cluster, found.constants)
    seconds, spread = sum(parts.values()), _spread(cluster, total)
    samples = plan.position(plan.steps) + plan.affine_steps * plan.pieces[-1].global_batch
    on = machine_for(recipe, cluster, found.constants)
    step = step_seconds(on, _load(recipe, plan, cluster, plan.accumulation))
    wanted = samples / (seconds - parts["input"])
    memory = _memory(recipe, plan, cluster)
    available = cluster.gpu.memory_gigabytes * 1e9 if cluster.gpu else None
    fits = memory is None or available is None or memory <= available
    return Prediction(
        recipe=recipe.name,
        cluster=cluster.name,
        workers=workers,
        global_batch=plan.global_batch,
        device_batch=plan.device_batch,
        accumulation=plan.accumulation,
        steps=plan.updates,
        step=asdict(step),
        parts=parts,
        seconds=seconds,
        low=seconds / spread,
        high=seconds * spread,
        coverage=COVERAGE,
        images_per_second=samples / seconds,
        efficiency=parts["compute"] / seconds,
        **_limit(parts, fits=fits),
        read_bytes_per_second=wanted * JPEG_BYTES if decodes(recipe) else 0.0,
        cores_per_worker=wanted / workers / IMAGES_PER_CORE if decodes(recipe) else 0.0,
        cores_available=cluster.cpu_cores / cluster.gpus_per_node,
        memory_bytes=memory,
        memory_available=available,
        **_bill(cluster, workers=workers, seconds=seconds),
        extrapolates=name_beyond(recipe, plan, cluster, needed=wanted / workers),
    )


def _parts(recipe: Recipe, plan: Plan, cluster: Cluster, constants: Constants) -> dict[str, float]:
    on = machine_for(recipe, cluster, constants)
    parts = dict.fromkeys(("compute", "launch", "exchange", "statistics", "input"), 0.0)
    usual = recipe.data.image_size
    sized = plan.sized(range(plan.train_steps), otherwise=usual)
    sized.append((range(plan.train_steps, plan.updates), usual))
    for part, size in sized:
        for steps, _, accumulation in plan.within(part):
            step = step_seconds(on, _load(recipe, plan, cluster, accumulation, size=size))
            for name in parts:
                parts[name] += len(steps) * getattr(step, name)
    parts["evaluation"] = _forward_seconds(recipe, plan, cluster, on)
    parts["start"] = on.start
    return parts


def count_evaluations(recipe: Recipe, plan: Plan) -> int:
    """Return the number of evaluations: during the run, and at the end of each stage.

    An evaluation that is due at the end of a stage counts once.
    """
    on_the_way = set(plan.evaluate_after) - {0, plan.train_steps, plan.steps}
    return len(on_the_way) + _count_stages(recipe, plan)


def _count_stages(recipe: Recipe, plan: Plan) -> int:
    polish = recipe.polish
    if polish is None:
        return 1
    optional = (plan.clean_steps, polish.ema, polish.swa, plan.affine_steps)
    return 1 + sum(map(bool, optional)) + _measures_last(polish)


def _measures_last(polish: Polish) -> bool:
    """Return True if there is a stage of statistics, if the stages before it are kept."""
    measured = polish.keep == "better" and polish.swa is not None and polish.affine is None
    return polish.statistics is not None and not measured


def _forward_seconds(recipe: Recipe, plan: Plan, cluster: Cluster, on: Machine) -> float:
    pixels = _pixels(cluster, recipe.data.image_size)
    polish, views = recipe.polish, recipe.evaluation.views
    passes = [(plan.val_samples, views * count_evaluations(recipe, plan))]
    if polish is not None and polish.statistics is not None:
        judged = polish.keep == "better" and polish.swa is not None
        passes.append((polish.statistics.samples, _measures_last(polish) + judged))
    if polish is not None and polish.held_out is not None:
        passes.append((polish.held_out, views * _count_stages(recipe, plan)))
    if "generalization_gap" in recipe.monitor:
        passes.append((recipe.train_samples, views * _count_stages(recipe, plan)))
    return sum(
        number * evaluation_seconds(on, workers=plan.workers, samples=samples, pixels=pixels)
        for samples, number in passes
    )


def machine_for(recipe: Recipe, cluster: Cluster, constants: Constants) -> Machine:
    """Describe a cluster for a recipe, whose decoder decides the rate of images."""
    on = machine(cluster, constants)
    if cluster.gpu is None or not decodes(recipe):
        return on
    if recipe.execution.decoder == "dali":
        return replace(on, read=cluster.gpu.decoded_images_per_second or math.inf)
    return replace(on, read=IMAGES_PER_CORE * cluster.cpu_cores / cluster.gpus_per_node)


def _load(
    recipe: Recipe, plan: Plan, cluster: Cluster, accumulation: int, *, size: int | None = None
) -> Load:
    measured = cluster.measured
    return Load(
        workers=plan.workers,
        device_batch=plan.device_batch,
        accumulation=accumulation,
        gradient_bytes=measured.gradient_bytes if measured else gradient_bytes(recipe),
        overlap=not sends_at_once(recipe.execution.groups),
        sync_workers=plan.sync_workers,
        pixels=_pixels(cluster, size or recipe.data.image_size),
    )


def gradient_bytes(recipe: Recipe) -> float:
    """Return the bytes that a worker sends of ResNet-50's gradients in an update."""
    numbers = GRADIENTS + (recipe.data.classes - CLASSES) * HEAD_INPUTS
    return numbers * (4.0 if recipe.reduction.dtype == "fp32" else 2.0)


def sends_at_once(groups: Groups) -> bool:
    """Return True if one group holds all gradients of ResNet-50, which backward cannot hide."""
    match groups:
        case ConstantGroups():
            return groups.tensors >= TENSORS
        case GroupsByBytes():
            return groups.megabytes * 1e6 >= 4 * GRADIENTS
        case _:
            return False


def _pixels(cluster: Cluster, size: int) -> float:
    usual = cluster.measured.image_size if cluster.measured else PUBLISHED_SIZE
    return (size / usual) ** 2


def _spread(cluster: Cluster, total: Callable[[Constants], float]) -> float:
    """Return the factor from the predicted time to either end of its interval."""
    if cluster.measured is not None:
        return 1 + cluster.measured.error
    left_out = installed_left_out()
    return math.exp(quantile(left_out) * installed_fit().deviation(total))


def _memory(recipe: Recipe, plan: Plan, cluster: Cluster) -> float | None:
    """Return the bytes on a GPU: weights, gradients and momentum in fp32, and saved activations.

    An average of the weights is another copy of them; with execution.cache: device all training
    images are on the GPU too.
    """
    if cluster.gpu is None:
        return None
    averaged = recipe.polish is not None and bool(recipe.polish.ema or recipe.polish.swa)
    kept = plan.device_batch * KEPT_BYTES * _pixels(cluster, recipe.data.image_size)
    cached = cached_bytes(recipe) if recipe.execution.cache == "device" else 0
    return (3 + averaged) * 4 * GRADIENTS + kept + cached + FIXED_BYTES


def _limit(parts: dict[str, float], *, fits: bool) -> dict[str, Any]:
    if not fits:
        return {"limit": "memory", "help": f"against memory: {HELP['memory']}"}
    largest = sorted(parts, key=lambda name: -parts[name])
    wait = next(name for name in largest if name != "compute")
    share = parts[wait] / sum(parts.values())
    return {"limit": largest[0], "help": f"against {wait}, {share:.0%}: {HELP[wait]}"}


def _bill(cluster: Cluster, *, workers: int, seconds: float) -> dict[str, Any]:
    nodes, hours = math.ceil(workers / cluster.gpus_per_node), seconds / 3600
    watts = None
    if cluster.node_watts is not None:
        watts = nodes * cluster.node_watts
    elif cluster.gpu is not None:
        watts = workers * cluster.gpu.watts
    price = cluster.price_per_gpu_hour
    return {
        "energy_of": "GPUs" if cluster.node_watts is None else "nodes",
        "kilowatt_hours": None if watts is None else watts * hours / 1000,
        "cost": None if price is None else price * nodes * cluster.gpus_per_node * hours,
    }


def describe(prediction: Prediction) -> dict[str, str]:
    """Return a prediction as rows of text by name."""
    step = sum(prediction.step.values())
    rows = {
        "recipe": prediction.recipe,
        "cluster": f"{prediction.cluster}, {prediction.workers:,} workers",
        "global batch": f"{prediction.global_batch:,} = {prediction.workers:,} workers x "
        f"{prediction.accumulation} micro-batches x {prediction.device_batch}",
        "time": f"{duration(prediction.seconds)}, {prediction.coverage:.0%} of such runs within "
        f"{duration(prediction.low)} to {duration(prediction.high)}",
        "a step": f"{1000 * step:.2f} ms, {prediction.steps:,} of them: "
        f"{_shares(prediction.step, step)}",
        "the run": _shares(prediction.parts, prediction.seconds),
        "included": "getting up to speed, updates, waits for input, evaluations, statistics",
        "not included": "the job's own start (a minute or two), queues, checkpoints, the report, "
        "slower software",
        "throughput": f"{prediction.images_per_second:,.0f} images/s, "
        f"{prediction.images_per_second / prediction.workers:,.0f} a worker, efficiency "
        f"{prediction.efficiency:.0%}",
        "input": _input(prediction),
    }
    if prediction.memory_bytes is not None and prediction.memory_available is not None:
        rows["memory"] = (
            f"{prediction.memory_bytes / 1e9:.0f} of {prediction.memory_available / 1e9:.0f} "
            "GB a GPU"
        )
    if prediction.kilowatt_hours is not None:
        alone = ", GPUs alone" if prediction.energy_of == "GPUs" else ""
        rows["energy"] = f"at most {three_digits(prediction.kilowatt_hours)} kWh{alone}"
    if prediction.cost is not None:
        rows["cost"] = f"{prediction.cost:,.2f}"
    unfit = ": a device batch does not fit, so there is no such run"
    rows["limited by"] = prediction.limit + unfit * (prediction.limit == "memory")
    rows["what helps"] = prediction.help
    if prediction.extrapolates:
        rows["extrapolates"] = "; ".join(prediction.extrapolates)
    return rows


def _input(prediction: Prediction) -> str:
    if not prediction.read_bytes_per_second:
        return "no image files are decoded on the way"
    return (
        f"{three_digits(prediction.read_bytes_per_second / 1e9)} GB/s of JPEG files in all; "
        f"decoding on CPUs takes {prediction.cores_per_worker:.1f} cores a worker, which has "
        f"{prediction.cores_available:g}"
    )


def _shares(parts: dict[str, float], whole: float) -> str:
    """Format the parts of a time as percentages, largest first."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in ordered if part > 0.005 * whole)


PUBLISHED_SIZE = 224
COSTLESS_ARGUMENTS = {"zero_init_last", "zero_init_residual"}
"""Arguments of ResNet-50 that change no shape, in timm and in torchvision."""

SETTINGS = (
    "optimizer.kind",
    "data.source",
    "execution.decoder",
    "execution.cache",
    "execution.memory_format",
    "execution.kernels",
)
"""Keys of a recipe that, with its model, decide the times of reading, a pass and an update."""

CACHED_BYTES = 2**34
"""Largest split in execution.cache, in bytes, as data.decoders.pixel_cache.LIMIT."""


def name_beyond(recipe: Recipe, plan: Plan, cluster: Cluster, *, needed: float) -> tuple[str, ...]:
    """Name the settings in which a run exceeds the published ones.

    `needed` are the images a second that each GPU needs.
    """
    gpu = cluster.gpu
    if gpu is None:
        return ()
    own = [run for run in published_runs() if run.generation == gpu.generation]
    kind, sizes = recipe.optimizer.kind, {recipe.data.image_size}
    sizes |= {piece.image_size for piece in plan.sizes}
    dali = decodes(recipe) and recipe.execution.decoder == "dali"
    fed = max((run.epochs * IMAGES / run.seconds / run.workers for run in own), default=0.0)
    beyond = {
        **_beyond_generation(plan, gpu, own),
        "published runs have one micro-batch": plan.accumulation > 1 or bool(plan.batch_changes),
        "published runs compute in fp16": recipe.precision != "fp16",
        f"published runs have images of {PUBLISHED_SIZE} x {PUBLISHED_SIZE}": (
            sizes != {PUBLISHED_SIZE}
        ),
        f"the additional time of an update of {kind} is unknown": (kind not in {"lars", "sgd"}),
        "additional messages of adasum are not counted": recipe.reduction.kind == "adasum",
        f"how fast DALI decodes on {gpu.name} is not known, {needed:,.0f} images/s are needed": (
            dali and gpu.decoded_images_per_second is None and needed > fed
        ),
    }
    return tuple(text for text, holds in beyond.items() if holds)


def _beyond_generation(plan: Plan, gpu: Gpu, own: Sequence[Published]) -> dict[str, bool]:
    if not own:
        return {f"no published run on {gpu.generation} GPUs: its data sheet alone": True}
    most, batches = max(run.workers for run in own), [run.device_batch for run in own]
    names = {run.cluster.gpu.name for run in own if run.cluster.gpu}
    return {
        f"published runs on {gpu.generation} GPUs have at most {most:,}": plan.workers > most,
        f"device batches are at least {min(batches)} there": plan.device_batch < min(batches),
        f"device batches are at most {max(batches)} there": plan.device_batch > max(batches),
        f"no published run is on {gpu.name}": gpu.name not in names,
    }


def require_known(recipe: Recipe, cluster: Cluster) -> None:
    """Raise ClusterError where the times of the recipe's model on this cluster are unknown."""
    require_cacheable(recipe)
    found = cluster.measured
    if found is None:
        if recipe.model.name not in RESNET50:
            raise ClusterError(
                f"model.name: {recipe.model.name}: {cluster.name} is calibrated with published "
                f"runs of {RESNET50[0]}; measure others with `largebatch plan --calibrate`"
            )
        changed = sorted(recipe.model.arguments.keys() - COSTLESS_ARGUMENTS)
        if changed:
            raise ClusterError(
                f"model.arguments: {', '.join(changed)}: {cluster.name} is calibrated with "
                f"published runs of {RESNET50[0]} as it is; measure others with `largebatch "
                "plan --calibrate`"
            )
        if recipe.precision not in {"fp16", "bf16"}:
            raise ClusterError(
                f"precision: {recipe.precision}: the published runs compute in fp16; plan this "
                "with --set precision=fp16"
            )
        return
    for key, (value, measured) in _compared(recipe, found).items():
        if value != measured:
            raise ClusterError(
                f"{key}: {value}: {cluster.name} was measured with {measured}; measure this "
                "recipe with `largebatch plan --calibrate`"
            )


def decodes(recipe: Recipe) -> bool:
    """Return True if image files are read and decoded throughout the run."""
    return recipe.data.source == "folder" and recipe.execution.cache is None


def cached_bytes(recipe: Recipe) -> int:
    """Return the least bytes of the decoded training images: those at the model's image size."""
    return 3 * recipe.data.train_samples * recipe.data.image_size**2


def require_cacheable(recipe: Recipe) -> None:
    """Raise PlanError where the images cannot fit execution.cache, however small they are."""
    cache, least = recipe.execution.cache, cached_bytes(recipe)
    if cache is not None and least > CACHED_BYTES:
        side = recipe.data.image_size
        raise PlanError(
            f"execution.cache: {cache}: {recipe.data.train_samples:,} images of {side} x {side} "
            f"take {least / 1e9:.0f} GB or more, and a cache holds {CACHED_BYTES / 1e9:.0f} GB; "
            "--set execution.cache=null --set execution.decoder=dali"
        )


def _compared(recipe: Recipe, found: Measured) -> dict[str, tuple[object, object]]:
    return {
        "model.name": (recipe.model.name, found.model),
        "model.arguments": (recipe.model.arguments, found.arguments),
        "data.classes": (recipe.data.classes, found.classes),
        "data.image_size": (recipe.data.image_size, found.image_size),
        "precision": (recipe.precision, found.precision),
        "reduction.dtype": (recipe.reduction.dtype, found.reduction),
        "execution.groups": (recipe.execution.groups.model_dump(mode="json"), found.groups),
        **{key: (value, found.settings.get(key)) for key, value in settings(recipe).items()},
    }


def settings(recipe: Recipe) -> dict[str, JsonValue]:
    """Return the values of SETTINGS in a recipe."""
    return {key: attrgetter(key)(recipe) for key in SETTINGS}


SMALLEST_DEVICE_BATCH = 8
RATIO = 2 ** (1 / 8)
"""Ratio of two consecutive batches that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A run to 75.9 % top-1."""

    workers: int
    global_batch: int
    accumulation: int
    epochs: float
    seconds: float


def has_epoch_law(recipe: Recipe, cluster: Cluster) -> bool:
    """Return True if the law holds for the recipe's data and the cluster's model."""
    return cluster.gpu is not None and recipe.data.classes == CLASSES


def best_batches(recipe: Recipe, cluster: Cluster) -> list[Point]:
    """Return the best batch for one GPU, two, four ... and all of a cluster."""
    return [
        min(batches(recipe, cluster, workers=workers), key=lambda point: point.seconds)
        for workers in _numbers(cluster)
    ]


def batches(recipe: Recipe, cluster: Cluster, *, workers: int) -> list[Point]:
    """Return the time with each batch between the smallest reference point and the largest run.

    Raises ClusterError where an image does not fit a GPU's memory.
    """
    assert cluster.gpu is not None
    law = fit_epochs(reference_points())
    on = machine_for(recipe, cluster, installed_fit().constants)
    fits = (cluster.gpu.memory_gigabytes * 1e9 - FIXED_BYTES) / KEPT_BYTES
    if fits < 1:
        raise ClusterError(
            f"{cluster.name}: gpu.memory_gigabytes: {cluster.gpu.memory_gigabytes:g}: libraries "
            f"take {FIXED_BYTES / 1e9:g} GB and an image {KEPT_BYTES / 1e9:g}; give the GPU's own"
        )
    return [
        _point(on, law, _load_of_batch(recipe, workers, batch, most=math.floor(fits)), batch=batch)
        for batch in _batches(workers)
    ]


def _load_of_batch(recipe: Recipe, workers: int, batch: int, *, most: int) -> Load:
    share = batch // workers
    accumulation = math.ceil(share / most)
    return Load(
        workers=workers,
        device_batch=math.ceil(share / accumulation),
        accumulation=accumulation,
        gradient_bytes=gradient_bytes(recipe),
        overlap=not sends_at_once(recipe.execution.groups),
    )


def _point(on: Machine, law: EpochLaw, load: Load, *, batch: int) -> Point:
    epochs = law(batch)
    one = evaluation_seconds(on, workers=load.workers, samples=VALIDATION)
    steps = epochs * IMAGES / batch
    return Point(
        workers=load.workers,
        global_batch=batch,
        accumulation=load.accumulation,
        epochs=epochs,
        seconds=on.start + steps * step_seconds(on, load).seconds + epochs / EVALUATE_EVERY * one,
    )


def _batches(workers: int) -> list[int]:
    """Return multiples of the workers, from the smallest reference point to the largest run."""
    smallest = reference_points()[0].batch
    number = math.ceil(math.log(LARGEST / smallest, RATIO))
    shares = (smallest * RATIO**place / workers for place in range(number + 1))
    found = {max(SMALLEST_DEVICE_BATCH, math.ceil(share)) * workers for share in shares}
    within = {batch for batch in found if batch <= LARGEST}
    return sorted(within or {SMALLEST_DEVICE_BATCH * workers})


def _numbers(cluster: Cluster) -> Iterator[int]:
    """Yield powers of two of GPUs in a node, then of nodes, and the whole cluster."""
    workers = 1
    while workers < cluster.gpus_per_node:
        yield workers
        workers *= 2
    workers = cluster.gpus_per_node
    while workers < cluster.workers:
        yield workers
        workers *= 2
    yield cluster.workers
