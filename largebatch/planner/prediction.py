"""A recipe on a cluster: its steps, the time of each part, what limits, and what that takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from largebatch.errors import PlanError
from largebatch.planner.calibration import COVERAGE, installed_fit, installed_left_out, quantile
from largebatch.planner.cluster import Cluster, require_workers
from largebatch.planner.known import (
    PUBLISHED_SIZE,
    cached_bytes,
    decodes,
    name_beyond,
    require_known,
)
from largebatch.planner.model import (
    GRADIENTS,
    Constants,
    Load,
    Machine,
    evaluation_seconds,
    machine,
    step_seconds,
)
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.execution import ConstantGroups, Groups, GroupsByBytes
from largebatch.recipe.polish import Polish
from largebatch.recipe.recipe import Recipe

CLASSES, HEAD_INPUTS = 1000, 2049
"""Of ResNet-50's classifier, with its bias."""

JPEG_BYTES = 110_000
"""Of an ImageNet image."""

IMAGES_PER_CORE = 300.0
"""That torchvision decodes and augments in a second (measured, full-size ImageNet JPEGs)."""

KEPT_BYTES = 43e6
"""For backward, of an image of 224 x 224 in half precision: what autograd saves for ResNet-50, in
fp32 86 MB (measured)."""

FIXED_BYTES = 2e9
"""Libraries, kernels' workspaces and communication buffers of a GPU. An assumption."""

TENSORS, NORM_DEPTH = 161, 49
"""Gradients of ResNet-50, and BatchNorm layers on the longest way through it."""

HELP = {
    "memory": "a smaller execution.device_batch, or GPUs with more memory",
    "launch": "a larger device batch or fewer micro-batches: each costs as much",
    "exchange": "device batches above 100 and several groups, for backward to hide it; SHARP; fp16",
    "statistics": "a batch.bn_span that one device batch holds",
    "input": "execution.decoder=dali, execution.cache, or more CPU cores a GPU",
    "evaluation": "a larger evaluation.every_epochs",
    "start": "a longer run: it is a second of each",
}
"""What would make a part of a run's time other than computing shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one recipe takes on one cluster. Times are in seconds."""

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
    """Of the whole run."""

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
    """What makes the largest part less that is not computing."""

    read_bytes_per_second: float
    """By all workers, while images are decoded each time and are there when they are needed."""

    cores_per_worker: float
    """That decoding on CPUs needs."""

    cores_available: float
    memory_bytes: float | None
    memory_available: float | None
    kilowatt_hours: float | None
    """At most: that of whole nodes, or of the GPUs alone where `node_watts` is not known."""

    energy_of: Literal["nodes", "GPUs"]
    cost: float | None
    extrapolates: tuple[str, ...]


def predict(recipe: Recipe, cluster: Cluster, *, workers: int) -> Prediction:
    """Predict a recipe on so many workers of a cluster.

    Raises ClusterError where the cluster has fewer or knows nothing about the model, PlanError
    where no division over the workers gives the batch.
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
        step={name: getattr(step, name) for name in step.__slots__},
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
    """Return the seconds of a whole run by what they go to."""
    on = machine_for(recipe, cluster, constants)
    parts = dict.fromkeys(("compute", "launch", "exchange", "statistics", "input"), 0.0)
    usual = recipe.images.image_size
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
    """Return how often the validation images are shown: on the way, and as each stage ends.

    A point on the way that is the end of a stage is no second one.
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
    """Return whether there is a stage of statistics, if the stages before it are kept."""
    measured = polish.keep == "better" and polish.swa is not None and polish.affine is None
    return polish.statistics is not None and not measured


def _forward_seconds(recipe: Recipe, plan: Plan, cluster: Cluster, on: Machine) -> float:
    """Return the seconds of evaluations, also of training images, statistics, and decisions."""
    pixels = _pixels(cluster, recipe.images.image_size)
    polish, passes = recipe.polish, [(plan.val_samples, count_evaluations(recipe, plan))]
    if polish is not None and polish.statistics is not None:
        judged = polish.keep == "better" and polish.swa is not None
        times = _measures_last(polish) + judged
        passes.append((polish.statistics.samples, times * _statistics_passes(polish, cluster)))
    if polish is not None and polish.held_out is not None:
        passes.append((polish.held_out, _count_stages(recipe, plan)))
    if "generalization_gap" in recipe.monitor:
        passes.append((recipe.train_samples, _count_stages(recipe, plan)))
    return sum(
        number * evaluation_seconds(on, workers=plan.workers, samples=samples, pixels=pixels)
        for samples, number in passes
    )


def _statistics_passes(polish: Polish, cluster: Cluster) -> int:
    """Return how often a stage of statistics shows its images.

    Sequential: once for each BatchNorm layer on the longest way through the model, of which a
    measured model has at most all of its own, and once more to find that nothing moves.
    """
    if polish.statistics is None or not polish.statistics.sequential:
        return 1
    return 1 + (cluster.measured.norm_layers if cluster.measured else NORM_DEPTH)


def machine_for(recipe: Recipe, cluster: Cluster, constants: Constants) -> Machine:
    """Describe the cluster to a recipe, whose decoder decides how fast images come."""
    on = machine(cluster, constants)
    if cluster.gpu is None or not decodes(recipe):
        return on
    if recipe.execution.decoder == "dali":
        return replace(on, read=cluster.gpu.decoded_images_per_second or math.inf)
    return replace(on, read=IMAGES_PER_CORE * cluster.cpu_cores / cluster.gpus_per_node)


def _load(
    recipe: Recipe, plan: Plan, cluster: Cluster, accumulation: int, *, size: int | None = None
) -> Load:
    if cluster.measured is not None:
        num_bytes = cluster.measured.gradient_bytes
    else:
        num_bytes = gradient_bytes(recipe)
    return Load(
        workers=plan.workers,
        device_batch=plan.device_batch,
        accumulation=accumulation,
        gradient_bytes=num_bytes,
        overlap=not sends_at_once(recipe.execution.groups),
        sync_workers=plan.sync_workers,
        pixels=_pixels(cluster, size or recipe.images.image_size),
    )


def gradient_bytes(recipe: Recipe) -> float:
    """Return the bytes that a worker sends of ResNet-50's gradients in an update."""
    numbers = GRADIENTS + (recipe.data.classes - CLASSES) * HEAD_INPUTS
    return numbers * (4.0 if recipe.reduction.dtype == "fp32" else 2.0)


def sends_at_once(groups: Groups) -> bool:
    """Return whether one group holds all gradients of ResNet-50, which no backward then hides."""
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
    """Return the factor to either end of the interval."""
    if cluster.measured is not None:
        return 1 + cluster.measured.error
    left_out = installed_left_out()
    return math.exp(quantile(left_out) * installed_fit().deviation(total))


def _memory(recipe: Recipe, plan: Plan, cluster: Cluster) -> float | None:
    """Return the bytes of a GPU: weights, gradients and momentum in fp32, and what forward keeps.

    Of the weights there is another copy where an average of them is kept; with execution.cache:
    device all training images lie there too.
    """
    if cluster.gpu is None:
        return None
    averaged = recipe.polish is not None and bool(recipe.polish.ema or recipe.polish.swa)
    kept = plan.device_batch * KEPT_BYTES * _pixels(cluster, recipe.images.image_size)
    cached = cached_bytes(recipe) if recipe.execution.cache == "device" else 0
    return (3 + averaged) * 4 * GRADIENTS + kept + cached + FIXED_BYTES


def _limit(parts: dict[str, float], *, fits: bool) -> dict[str, Any]:
    """Return what limits a run, and what makes its largest part but computing shorter."""
    if not fits:
        return {"limit": "memory", "help": f"against memory: {HELP['memory']}"}
    largest = sorted(parts, key=lambda name: -parts[name])
    wait = next(name for name in largest if name != "compute")
    share = parts[wait] / sum(parts.values())
    return {"limit": largest[0], "help": f"against {wait}, {share:.0%}: {HELP[wait]}"}


def _bill(cluster: Cluster, *, workers: int, seconds: float) -> dict[str, Any]:
    """Return energy, at the most that nodes or GPUs draw, and cost where there is a price."""
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
