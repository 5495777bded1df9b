"""The limits of a prediction: unknown settings are refused, extrapolations are named.

The times of a data sheet rely on published runs of one model in half precision, and those of a
measured machine on the recipe that was measured. Settings that change a step by an unknown amount
are refused; where the model extrapolates beyond the published runs, the prediction names it.
"""

from collections.abc import Sequence
from operator import attrgetter

from pydantic import JsonValue

from largebatch.errors import PlanError
from largebatch.lab.planner.cluster import Cluster, ClusterError, Gpu, Measured
from largebatch.lab.planner.published import IMAGES, Published, published_runs
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.model import RESNET50
from largebatch.recipe.recipe import Recipe

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
"""Keys of a recipe, besides its model, that decide the time of reading, of a pass or an update."""

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
        f"what an update of {kind} takes longer than one of LARS or SGD is not known": (
            kind not in {"lars", "sgd"}
        ),
        "what adasum sends besides a sum is not counted": recipe.reduction.kind == "adasum",
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
