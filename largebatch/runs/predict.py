"""The classes of any images by a saved run, shown to the model as its evaluation shows them."""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from largebatch.data.augment import clean_boxes
from largebatch.data.datasets.own import import_own
from largebatch.data.decoders.crops import crop_and_resize
from largebatch.data.decoders.prefetch import FillTask, in_parts, open_prefetcher
from largebatch.data.decoders.torchvision import AT_A_TIME, decode_upright
from largebatch.data.index.folder import by_suffix, describe, is_image, visible
from largebatch.data.index.headers import measure_bytes
from largebatch.data.types import Batches, Bytes, Floats, IntArray, Resources, View
from largebatch.distributed.environment import available_cores
from largebatch.errors import DataError, reason_of
from largebatch.models.of_recipe import build_model
from largebatch.models.wrappers import MeanOfViews
from largebatch.optional import require_torchvision
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import join
from largebatch.runs.checkpoints import find_saved
from largebatch.runs.folder import require_named
from largebatch.runs.options import Options
from largebatch.training.evaluation import evaluate


class Predictions(NamedTuple):
    """Probabilities of the classes for every image that could be read."""

    classes: Sequence[str]
    """Names by label."""

    paths: list[Path]
    probabilities: Tensor
    """N x classes, float32, on the CPU."""

    unreadable: dict[Path, str]
    """Reasons by path."""

    ignored: str
    """Line for each folder with the numbers of files that are not read; empty if there are none."""


def predict(
    saved_model: Path,
    images: Iterable[Path],
    *,
    model: str | None = None,
    imports: Sequence[str] = (),
) -> Predictions:
    """Predict the classes of images, and of all images in folders, by a saved model.

    `saved_model` is a run, of which the newest checkpoint is taken, a checkpoint, an export, or a
    file of weights with the name of its `model`. Raises DataError if no image can be read,
    CheckpointError if the model cannot be.
    """
    require_torchvision()  # now: threads cannot import it at the same time
    for module in imports:
        import_own(module)  # before the model's name is looked up
    saved = find_saved(saved_model, model=model)
    if saved.checkpoint is not None:
        require_named(saved.path.parent.parent, imports=imports, images=True)  # of this call
        saved.checkpoint.model(source=saved.path)  # not before the end of a Schedule-Free run
    recipe = saved.recipe
    files, ignored = _list_images(images)
    unreadable: dict[Path, str] = {}
    plan = make_plan(recipe.mathematics)
    plan = plan.measuring(workers=1, device_batch=recipe.execution.device_batch)
    scores: list[Tensor] = []
    with join(Options(backend="serial", imports=tuple(imports)), {"command": "predict"}) as backend:
        network = build_model(recipe, backend.device)
        saved.load_into(network)
        if recipe.evaluation.views > 1:
            network = MeanOfViews(network, views=recipe.evaluation.views)
        resources = Resources(backend.device, available_cores(), plan.device_batch)
        batches = _decode(files, recipe, resources, unreadable)
        # The run's own evaluation, so that the scores are those of its figures; labels are made up.
        if files:
            evaluate(network, batches, backend, each=lambda logits, _: scores.append(logits))
    readable = [row for row, file in enumerate(files) if file not in unreadable]
    if not readable:
        causes = [f"{file}: {unreadable[file]}" for file in files] + [ignored]
        problem = "no image can be read" if files else "these folders hold no images"
        raise DataError("\n  ".join([problem, *filter(None, causes)]))
    return Predictions(
        classes=saved.classes or [str(label) for label in range(recipe.data.classes)],
        paths=[files[row] for row in readable],
        probabilities=torch.cat(scores).float().softmax(1).cpu()[readable],
        # In the order of the files: threads have filled it in theirs.
        unreadable={file: unreadable[file] for file in files if file in unreadable},
        ignored=ignored,
    )


def _list_images(paths: Iterable[Path]) -> tuple[list[Path], str]:
    """Return the files among paths and the images in their folders, each once, in order.

    And a line for each folder with files that are not images.
    """
    images: list[Path] = []
    lines: list[str] = []
    for path in paths:
        if not path.is_dir():
            images.append(path)
            continue
        ignored: list[str] = []
        for folder, below, names in os.walk(path):
            below[:] = sorted(filter(visible, below))  # os.walk goes into what is left of it
            shown = sorted(filter(visible, names))
            images += [Path(folder, name) for name in shown if is_image(name)]
            ignored += [name for name in shown if not is_image(name)]
        lines.append(describe(by_suffix(ignored), where=str(path), folder=path))
    return list(dict.fromkeys(images)), "\n".join(filter(None, lines))


def _decode(
    files: Sequence[Path], recipe: Recipe, resources: Resources, unreadable: dict[Path, str]
) -> Batches:
    """Yield batches as an evaluation of the run does; images that cannot be read are black."""
    data = recipe.data
    cached = recipe.execution.cache in {"memory", "device"}
    view = View(
        image_size=data.image_size,
        mean=data.mean,
        std=data.std,
        interpolation=data.interpolation,
        channels_last=recipe.execution.channels_last(resources.device.type),
    )

    def read(file: Path, out: Bytes | Floats) -> None:
        content = file.read_bytes()
        size = measure_bytes(content)
        image = decode_upright(content, size.orientation)
        (box,) = clean_boxes(
            np.array([size.height]),
            np.array([size.width]),
            image_size=data.image_size,
            resize=data.eval_resize,
        )
        out[:] = crop_and_resize(
            np.array(image) if cached else image,  # as in the run's evaluations
            box.tolist(),
            flip=False,
            size=data.image_size,
            interpolation=data.interpolation,
        )

    def fill(rows: Sequence[int], pixels: Bytes | Floats) -> None:
        for row, out in zip(rows, pixels, strict=True):
            try:
                read(files[row], out)
            except Exception as error:  # Pillow raises many types for a damaged file
                unreadable[files[row]] = getattr(error, "strerror", None) or reason_of(error)
                # A black image in its place: a batch keeps its rows, and this one is left out at
                # the end.
                out[:] = 0

    def divide(rows: range) -> tuple[IntArray, list[FillTask]]:
        parts = in_parts(len(rows), threads=resources.threads, most=AT_A_TIME)
        labels = np.zeros(len(rows), dtype=np.int64)  # evaluation needs some
        return labels, [FillTask(part, partial(fill, rows[part])) for part in parts]

    starts = range(0, len(files), resources.batch_size)
    orders = (range(start, min(start + resources.batch_size, len(files))) for start in starts)
    with open_prefetcher(view, resources) as fill_ahead:
        for _, batch in fill_ahead(orders, divide):
            yield batch
