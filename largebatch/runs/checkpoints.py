"""Evaluate or polish a saved model: a checkpoint, an export, or weights of another program."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.address import Place, place_of
from largebatch.data.datasets.own import import_own
from largebatch.data.index.index import load_or_read
from largebatch.distributed.agreement import checksum
from largebatch.errors import CheckpointError, LargebatchError
from largebatch.models import build, classifier, zoo
from largebatch.optim.schedule_free import is_averaging, store_average
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.keys import MLPERF
from largebatch.recipe.loading import load_recipe, override_words, parse_recipe
from largebatch.recipe.polish import Polish, Statistics
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.build import open_measuring
from largebatch.runs.folder import check_folder, recorded, remember, remembered
from largebatch.runs.options import Options
from largebatch.runs.weights import WEIGHTS, named_as, read_classes, read_weights, state_for
from largebatch.storage import remove_content
from largebatch.tracking.events import CHECKPOINTS, RECIPE, StageName, Summary
from largebatch.training.checkpoint import (
    Checkpoint,
    constants_of,
    load_checkpoint,
    load_weights,
    newest_checkpoint,
    require_finite,
)
from largebatch.training.evaluation import Metrics
from largebatch.training.session import Session
from largebatch.training.stages import polish_statistics

_BATCH = 256
"""Global batch of the recipe of weights of another program, which is not trained."""


class Evaluated(NamedTuple):
    """Metrics of a saved model."""

    path: Path
    step: int | None
    """Number of updates before it; None for an export and for weights of another program."""

    metrics: Metrics
    training: Metrics | None
    """Metrics on all images trained on, shown like validation images; None if not requested."""

    recipe: Recipe
    """The recipe of the model, with the changes of this evaluation."""


class Saved(NamedTuple):
    """A saved model: of a run, of an export, or weights of another program."""

    path: Path
    recipe: Recipe
    """The recipe that it was trained with; for weights of another program one that shows images as
    the model's library does."""

    weights: Mapping[str, Tensor]
    """Weights and statistics by the names in the file."""

    classes: Sequence[str]
    """Names by label; empty if they are not known."""

    checkpoint: Checkpoint | None = None
    """All that is saved of a run; None for the others."""

    def load_into(self, model: nn.Module) -> None:
        """Load the weights into a new model.

        Raises CheckpointError, which begins with the path, if they do not fit or are not finite.
        """
        try:
            weights = state_for(model, self.weights)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        load_weights(model, {**model.state_dict(), **weights}, source=str(self.path))


def evaluate_checkpoint(
    path: Path,
    options: Options,
    *,
    model: str | None = None,
    training: bool = False,
    each: Callable[[Tensor, Tensor], object] = lambda *_: None,
) -> Evaluated:
    """Measure a saved model on its validation data; `path` and `model` are those of `find_saved`.

    `training` also measures it on its training data. `each` is called with the scores and labels
    of every validation batch of this worker. `data.held_out=null` among the options' overrides
    measures the validation images of a run that was validated on held-out training images.
    """
    # Without held-out images the training images would be all of them.
    changes = () if training else (VALIDATION_IMAGES,)
    saved, options = load_saved(path, options, model=model, changes=changes)
    facts = {"command": "evaluate", "checkpoint": checksum(saved.weights), "--training": training}
    with open_measuring(saved.recipe, options, facts) as session:
        restore(session, saved)
        on_validation = session.evaluator.validation(each)
        on_training = session.evaluator.training() if training else None
        step = saved.checkpoint.progress.updates if saved.checkpoint else None
        return Evaluated(saved.path, step, on_validation, on_training, saved.recipe)


def polish_checkpoint(path: Path, options: Options, *, samples: int | None = None) -> Summary:
    """Polish the statistics of a checkpoint, into a run in `options.out`; return its summary.

    `samples` is the number of clean training images to measure; None: all of them. The summary has
    the accuracies before and after.
    """
    check_folder(options.out, resume=None)
    saved, options = load_saved(path, options)
    checkpoint = saved.checkpoint
    assert checkpoint is not None  # pretrained.py polishes the others
    recipe = with_statistics(checkpoint.recipe, samples)
    facts = {"command": "polish", "checkpoint": checksum(saved.weights)}
    with open_measuring(recipe, options, facts) as session:
        # The averages and the snapshot of the run that is polished are not those of the new one.
        state = {**checkpoint.state, "ema": {}, "snapshot": {}}
        restore(session, saved._replace(checkpoint=replace(checkpoint, stages=[], state=state)))
        session.evaluator.store_average()
        stage = current_stage(checkpoint, session.plan)

        assert session.polish.statistics is not None
        try:
            with recorded(session, options) as recording:
                if session.backend.rank == 0:
                    remember(options.out, options)
                session.judge.end(stage, num_steps=session.state.progress.updates)
                polish_statistics(session.judge, session.polish.statistics)
                recording.complete = True
        except (CheckpointError, OSError):  # a full disk: files would block the next try
            if session.backend.rank == 0:
                remove_content(options.out)
            raise
        assert recording.summary is not None
        return recording.summary


def restore(session: Session, saved: Saved) -> None:
    """Load a saved model to measure it; raise CheckpointError if it does not fit or is not finite.

    The optimizer of a run comes with it, because Schedule-Free has its average there.
    """
    model = session.state.model
    source = str(saved.path)
    if saved.checkpoint is not None:
        require_finite(saved.weights, constants_of(model), source=source)
        session.saver.restore(saved.checkpoint, source=source)
        return
    optimizer = session.state.updater.optimizer
    if is_averaging(optimizer.param_groups):
        store_average(optimizer)  # the weights to load are the average
    saved.load_into(model)


VALIDATION_IMAGES = "data.held_out=null"
"""The change of a recipe that has the validation images measured in place of held-out ones."""


def load_saved(
    path: Path,
    options: Options,
    *,
    model: str | None = None,
    ema: bool = False,
    changes: tuple[str, ...] = (),
) -> tuple[Saved, Options]:
    """Find a saved model as `find_saved` does, to be measured with these options.

    For a run and its export, only the recipe's execution and evaluation can be changed, and what is
    among `changes`. Options get the images of a run if they name none. Raises CheckpointError
    unless they name the code that the run needs.
    """
    for module in options.imports:
        import_own(module)  # before the model's name is looked up
    overrides = override_words(options.overrides)
    if model is not None:
        saved = find_saved(path, model=model, data=options.data, overrides=overrides, ema=ema)
        return saved, options
    saved = find_saved(path)
    if saved.checkpoint is not None:
        named = {"data": options.data, "dataset": options.dataset, "imports": options.imports}
        of_run = remembered(
            saved.path.parent.parent, {name: value for name, value in named.items() if value}
        )
        if options.dataset is None:
            options = replace(options, data=of_run.data)
    # Other keys would describe another model or other images than those of the training.
    for override in overrides:
        if not override.startswith(("execution", "evaluation")) and override not in changes:
            raise LargebatchError(
                f"--set {override}: of a checkpoint only execution and evaluation can be changed; "
                f"and {VALIDATION_IMAGES} for `evaluate`, without --training"
            )
    if overrides:
        recipe = parse_recipe(dump_yaml(saved.recipe), overrides, source=str(saved.path))
        saved = saved._replace(recipe=recipe)
        if saved.checkpoint is not None:
            saved = saved._replace(checkpoint=replace(saved.checkpoint, recipe=recipe))
    return saved, options


def find_saved(
    path: Path,
    *,
    model: str | None = None,
    data: Place | str | None = None,
    overrides: Sequence[str] = (),
    ema: bool = False,
) -> Saved:
    """Read a checkpoint, the newest one of a run folder, an export, or weights of another program.

    Weights of another program need the name of their `model`, of timm or torchvision, and `data`,
    the folder of images to be measured on; without it the classes are counted in the weights.
    `overrides` change the recipe that follows from these, and `ema` takes the moving average in the
    file. Raises CheckpointError, RecipeError or DataError.
    """
    if model is not None:
        zoo.require_known(model)
        weights = read_weights(path, ema=ema)
        if data is None:
            number = _count_classes(model, weights, path)
            names = []
            samples = (_BATCH, 1)  # no image is measured
        else:
            train, val = (load_or_read(place_of(data), split) for split in ("train", "val"))
            number = len(train.classes)
            names = list(train.classes)
            samples = (len(train), len(val))
        recipe = _recipe_for(model, classes=number, samples=samples, overrides=overrides)
        return Saved(path, recipe, weights, names)
    exported = find_export(path)
    if exported is not None:
        recipe = load_recipe(exported.parent / RECIPE)
        weights = read_weights(exported)  # first: it refuses a damaged file
        classes = read_classes(exported, number=recipe.data.classes)
        return Saved(exported, recipe, weights, classes)
    try:
        path, checkpoint = find_checkpoint(path)
    except CheckpointError as error:
        hint = "; for weights of another program pass --model NAME" if path.is_file() else ""
        is_run = any((path / CHECKPOINTS).glob("step-*"))
        hint = ", or an export" if path.is_dir() and not is_run else hint
        raise CheckpointError(f"{error}{hint}") from None
    weights = checkpoint.state["model"]
    classes = checkpoint.origin.classes
    if len(classes) != checkpoint.recipe.data.classes:
        classes = []
    return Saved(path, checkpoint.recipe, weights, classes, checkpoint)


def find_export(path: Path) -> Path | None:
    """Return the file of weights if `path` is it or the folder of an export; else None."""
    weights = path if path.name == WEIGHTS else path / WEIGHTS
    return weights if weights.is_file() and (weights.parent / RECIPE).is_file() else None


def find_checkpoint(path: Path) -> tuple[Path, Checkpoint]:
    """Read the newest readable checkpoint of a run folder, or `path` if it is a file."""
    if not path.is_dir():
        return path, load_checkpoint(path)
    newest = newest_checkpoint(path / CHECKPOINTS)
    if newest is None:
        raise CheckpointError(
            f"{path}: this folder holds no {CHECKPOINTS}/step-*.safetensors; give a checkpoint or "
            "the folder of a run (--out of `largebatch train`)"
        )
    return newest.path, newest.checkpoint


def _count_classes(model: str, weights: Mapping[str, Tensor], path: Path) -> int:
    """Return the number of classes of a model's weights, from the shape of its classifier."""
    # A classifier of any size has the name that is looked for.
    network = _without_memory(model, classes=2)
    head = classifier(network)
    names = [name for name, weight in network.named_parameters() if weight is head.weight]
    for key, value in named_as(network, weights).items():
        if key in names and value.ndim:
            return len(value)
    raise CheckpointError(f"{path}: the weights do not fit: {names[0]} is missing, for {model}")


def _without_memory(name: str, *, classes: int) -> nn.Module:
    with torch.device("meta"):
        return build(name, num_classes=classes)


def _recipe_for(
    name: str, *, classes: int, samples: tuple[int, int], overrides: Sequence[str]
) -> Recipe:
    """Return a recipe that shows images to a model as its library does.

    `samples` are the numbers of training and validation images.
    """
    layers = _without_memory(name, classes=classes).modules()
    has_batchnorm = any(isinstance(layer, _BatchNorm) for layer in layers)
    # A recipe has all of its sections, so there are an optimizer and a schedule, which nothing
    # uses.
    tree = {
        "name": name.replace("/", "-"),
        "seed": 0,
        "duration": {"steps": 1},
        "data": {
            "source": "folder",
            "classes": classes,
            "train_samples": samples[0],
            "val_samples": samples[1],
            **zoo.preparation(name),
            "crop_area": None,
            "flip": False,
        },
        "model": {"name": name},
        "batch": {"global_batch": _BATCH, "bn_span": 64 if has_batchnorm else None},
        "optimizer": {"kind": "sgd"},
        "schedule": {"peak_lr": 1.0, "warmup": None, "decay": {"kind": "constant"}},
    }
    return parse_recipe(json.dumps(tree), overrides, source=f"the recipe of {name}")


def current_stage(checkpoint: Checkpoint, plan: Plan) -> StageName:
    """Return the stage that made the weights: the current one, else the last that was kept."""
    step = checkpoint.progress.step
    under_way: StageName = "clean" if step > plan.train_steps else "train"
    under_way = "affine" if step > plan.steps else under_way
    ended = {stage.name for stage in checkpoint.stages}
    # A pass over the statistics moves no weights, so the stage before it made them.
    kept = [stage.name for stage in checkpoint.stages if stage.kept]
    moved = [name for name in kept if name != "statistics"]
    return moved[-1] if moved and ended & {under_way, "statistics"} else under_way


def with_statistics(recipe: Recipe, samples: int | None) -> Recipe:
    """Return the recipe with a pass over `samples` images (None: all), without MLPerf's log."""
    most = recipe.train_samples
    if recipe.batch.bn_span is None:
        raise CheckpointError(f"{recipe.model.name} has no BatchNorm statistics to polish")
    number = samples or most
    if number > most:
        raise CheckpointError(f"cannot measure {number} of {most} training images")
    statistics = Statistics(samples=number)
    polish = recipe.polish or Polish(statistics=statistics)
    polish = polish.model_copy(update={"statistics": statistics})
    trackers = tuple(name for name in recipe.tracking.trackers if name != MLPERF)
    job_type = recipe.tracking.job_type or ("polish" if trackers else None)
    tracking = recipe.tracking.model_copy(update={"trackers": trackers, "job_type": job_type})
    return recipe.model_copy(update={"polish": polish, "tracking": tracking})
