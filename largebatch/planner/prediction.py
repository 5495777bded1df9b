"""A recipe on a cluster: its steps, the time of each part, what limits, and what that takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from largebatch.errors import PlanError
from largebatch.planner.calibration import COVERAGE, installed_fit, installed_left_out, quantile
from largebatch.planner.cluster import Cluster, ClusterError, Measured, require_workers
from largebatch.planner.model import (
    GRADIENTS,
    Constants,
    Load,
    Machine,
    evaluation_seconds,
    machine,
    step_seconds,
)
from largebatch.planner.published import published_runs
from largebatch.recipe.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Polish

PUBLISHED_MODEL, PUBLISHED_SIZE = "resnet50", 224
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

COSTLESS_ARGUMENTS = {"zero_init_last"}
"""Of ResNet-50, that change no shape."""

HELP = {
    "memory": "a smaller execution.device_batch, or GPUs with more memory",
    "launch": "a larger device batch or fewer micro-batches: each costs as much",
    "exchange": "device batches above 100, whose backward hides it; SHARP; gradients in fp16",
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
    _require_known(recipe, cluster)
    plan = make_plan(recipe, workers=workers)
    found = installed_fit()

    def total(constants: Constants) -> float:
        return sum(_parts(recipe, plan, cluster, constants).values())

    parts = _parts(recipe, plan, cluster, found.constants)
    seconds, spread = sum(parts.values()), _spread(cluster, total)
    samples = plan.position(plan.steps) + plan.affine_steps * plan.pieces[-1].global_batch
    on = _machine(recipe, cluster, found.constants)
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
        read_bytes_per_second=wanted * JPEG_BYTES if _decodes(recipe) else 0.0,
        cores_per_worker=wanted / workers / IMAGES_PER_CORE if _decodes(recipe) else 0.0,
        cores_available=cluster.cpu_cores / cluster.gpus_per_node,
        memory_bytes=memory,
        memory_available=available,
        **_bill(cluster, workers=workers, seconds=seconds),
        extrapolates=_beyond(recipe, plan, cluster),
    )


def _parts(recipe: Recipe, plan: Plan, cluster: Cluster, constants: Constants) -> dict[str, float]:
    """Return the seconds of a whole run by what they go to."""
    on = _machine(recipe, cluster, constants)
    parts = dict.fromkeys(("compute", "launch", "exchange", "statistics", "input"), 0.0)
    usual = recipe.data.image_size
    sized = plan.sized(range(plan.train_steps), otherwise=usual)
    sized.append((range(plan.train_steps, plan.updates), usual))
    for part, size in sized:
        for steps, _, accumulation in plan.within(part):
            step = step_seconds(on, _load(recipe, plan, cluster, accumulation, size=size))
            for name in parts:
                parts[name] += len(steps) * getattr(step, name)
    parts["evaluation"] = _forward_seconds(recipe, plan, on, pixels=_pixels(cluster, usual))
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


def _forward_seconds(recipe: Recipe, plan: Plan, on: Machine, *, pixels: float) -> float:
    """Return the seconds of evaluations, statistics, and decisions on images held out."""
    polish, passes = recipe.polish, [(plan.val_samples, count_evaluations(recipe, plan))]
    if polish is not None and polish.statistics is not None:
        judged = polish.keep == "better" and polish.swa is not None
        passes.append((polish.statistics.samples, _measures_last(polish) + judged))
    if polish is not None and polish.held_out is not None:
        passes.append((polish.held_out, _count_stages(recipe, plan)))
    return sum(
        number * evaluation_seconds(on, workers=plan.workers, samples=samples, pixels=pixels)
        for samples, number in passes
    )


def _machine(recipe: Recipe, cluster: Cluster, constants: Constants) -> Machine:
    """Describe the cluster to a recipe, whose decoder decides how fast images come."""
    on = machine(cluster, constants)
    if not _decodes(recipe) or cluster.measured or recipe.execution.decoder == "dali":
        return on
    return replace(on, read=IMAGES_PER_CORE * cluster.cpu_cores / cluster.gpus_per_node)


def _decodes(recipe: Recipe) -> bool:
    """Return whether image files are read and decoded throughout the run."""
    return recipe.data.source == "folder" and recipe.execution.cache is None


def _load(
    recipe: Recipe, plan: Plan, cluster: Cluster, accumulation: int, *, size: int | None = None
) -> Load:
    if cluster.measured is not None:
        num_bytes = cluster.measured.gradient_bytes
    else:
        numbers = GRADIENTS + (recipe.data.classes - CLASSES) * HEAD_INPUTS
        num_bytes = numbers * (4.0 if recipe.reduction.dtype == "fp32" else 2.0)
    return Load(
        workers=plan.workers,
        device_batch=plan.device_batch,
        accumulation=accumulation,
        gradient_bytes=num_bytes,
        sync_workers=plan.sync_workers,
        pixels=_pixels(cluster, size or recipe.data.image_size),
    )


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

    Of the weights there is another copy where an average of them is kept.
    """
    if cluster.gpu is None:
        return None
    averaged = recipe.polish is not None and bool(recipe.polish.ema or recipe.polish.swa)
    kept = plan.device_batch * KEPT_BYTES * _pixels(cluster, recipe.data.image_size)
    return (3 + averaged) * 4 * GRADIENTS + kept + FIXED_BYTES


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


def _beyond(recipe: Recipe, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Name in what the run lies beyond the published ones."""
    if cluster.gpu is None:
        return ()
    own = [run for run in published_runs() if run.generation == cluster.gpu.generation]
    if not own:
        return (f"no published run on {cluster.gpu.generation} GPUs: its data sheet alone",)
    most, batches = max(run.workers for run in own), [run.device_batch for run in own]
    names = {run.cluster.gpu.name for run in own if run.cluster.gpu}
    sizes = {recipe.data.image_size, *(piece.image_size for piece in plan.sizes)}
    beyond = {
        f"published runs on {cluster.gpu.generation} GPUs have at most {most:,}": (
            plan.workers > most
        ),
        f"device batches are at least {min(batches)} there": plan.device_batch < min(batches),
        f"device batches are at most {max(batches)} there": plan.device_batch > max(batches),
        "published runs have one micro-batch": plan.accumulation > 1 or bool(plan.batch_changes),
        "published runs compute in fp16": recipe.precision != "fp16",
        f"published runs have images of {PUBLISHED_SIZE} x {PUBLISHED_SIZE}": (
            sizes != {PUBLISHED_SIZE}
        ),
        f"no published run is on {cluster.gpu.name}": cluster.gpu.name not in names,
    }
    return tuple(text for text, holds in beyond.items() if holds)


def _require_known(recipe: Recipe, cluster: Cluster) -> None:
    """Raise ClusterError where nothing is known of the recipe's model on this cluster."""
    if recipe.polish is not None and recipe.polish.swap is not None:
        raise PlanError("polish.swap: the planner has no model of replicas; --set polish.swap=null")
    found = cluster.measured
    if found is None:
        if recipe.model.name != PUBLISHED_MODEL:
            raise ClusterError(
                f"model.name: {recipe.model.name}: {cluster.name} is calibrated with published "
                f"runs of {PUBLISHED_MODEL}; measure others with `largebatch plan --calibrate`"
            )
        changed = sorted(recipe.model.arguments.keys() - COSTLESS_ARGUMENTS)
        if changed:
            raise ClusterError(
                f"model.arguments: {', '.join(changed)}: {cluster.name} is calibrated with "
                f"published runs of {PUBLISHED_MODEL} as it is; measure others with `largebatch "
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


def _compared(recipe: Recipe, found: Measured) -> dict[str, tuple[object, object]]:
    """Return what decides a measured machine's times: the recipe's, and that of the measurement."""
    return {
        "model.name": (recipe.model.name, found.model),
        "model.arguments": (recipe.model.arguments, found.arguments),
        "data.classes": (recipe.data.classes, found.classes),
        "data.image_size": (recipe.data.image_size, found.image_size),
        "precision": (recipe.precision, found.precision),
        "reduction.dtype": (recipe.reduction.dtype, found.reduction),
        "execution.groups": (recipe.execution.groups.model_dump(mode="json"), found.groups),
    }
