"""Evaluate or polish a checkpoint after its run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from largebatch.distributed.agreement import checksum
from largebatch.errors import CheckpointError, LargebatchError
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.loading import override_words, parse_recipe
from largebatch.recipe.polish import Polish, Statistics
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.build import open_measuring
from largebatch.runs.folder import check_folder, record, remember, remembered
from largebatch.runs.options import Options
from largebatch.tracking.events import CHECKPOINTS, StageName, Summary
from largebatch.training.checkpoint import (
    Checkpoint,
    constants_of,
    load_checkpoint,
    newest_checkpoint,
    require_finite,
)
from largebatch.training.evaluation import Metrics
from largebatch.training.session import Session
from largebatch.training.stages import polish_statistics


class Evaluated(NamedTuple):
    """Metrics of a checkpoint."""

    path: Path
    step: int
    """Number of updates before it."""

    metrics: Metrics
    training: Metrics | None
    """Metrics on all images trained on, shown like validation images; None if not requested."""


def evaluate_checkpoint(
    path: Path,
    options: Options,
    *,
    training: bool = False,
    each: Callable[[Tensor, Tensor], object] = lambda *_: None,
) -> Evaluated:
    """Measure a checkpoint, or the newest one of a run folder, on its validation data.

    `training` also measures it on its training data. `each` is called with the scores and labels
    of every validation batch of this worker.
    """
    path, checkpoint, options = _load(path, options)
    checked = checksum(checkpoint.state["model"])
    facts = {"command": "evaluate", "checkpoint": checked, "--training": training}
    with open_measuring(checkpoint.recipe, options, facts) as session:
        _restore(session, checkpoint, source=str(path))
        found = session.evaluator.validation(each)
        on_training = session.evaluator.training() if training else None
        return Evaluated(path, checkpoint.progress.updates, found, on_training)


def polish_checkpoint(path: Path, options: Options, *, samples: int | None = None) -> Summary:
    """Polish the statistics of a checkpoint, into a run in `options.out`; return its summary.

    `samples` is the number of clean training images to measure; None: all of them. The summary has
    the accuracies before and after.
    """
    check_folder(options.out, resume=None)
    path, checkpoint, options = _load(path, options)
    recipe = with_statistics(checkpoint.recipe, samples)
    facts = {"command": "polish", "checkpoint": checksum(checkpoint.state["model"])}
    with open_measuring(recipe, options, facts) as session:
        begun = {**checkpoint.state, "ema": {}, "snapshot": {}}
        _restore(session, replace(checkpoint, stages=[], state=begun), source=str(path))
        session.evaluator.store_average()
        stage = current_stage(checkpoint, session.plan)

        def polish() -> bool:
            assert session.polish.statistics is not None
            if session.backend.rank == 0:
                remember(options.out, options)
            session.judge.end(stage, num_steps=session.state.progress.updates)
            polish_statistics(session.judge, session.polish.statistics)
            return True

        return record(session, options.out, polish)


def _restore(session: Session, checkpoint: Checkpoint, *, source: str) -> None:
    """Load a checkpoint to measure it; raise CheckpointError if its weights are not finite."""
    constants = constants_of(session.state.model)
    require_finite(checkpoint.state["model"], constants, source=source)
    session.saver.restore(checkpoint, source=source)


def _load(path: Path, options: Options) -> tuple[Path, Checkpoint, Options]:
    """Read a checkpoint file, or the newest checkpoint of a run folder; set its execution.

    The options get the images of its run if they name none.
    """
    path, checkpoint = find_checkpoint(path)
    folder = path.parent.parent
    named = {"data": options.data, "dataset": options.dataset, "imports": options.imports}
    own = remembered(folder, {name: value for name, value in named.items() if value})
    if options.dataset is None:
        options = replace(options, data=own.data)
    overrides = override_words(options.overrides)
    for override in overrides:
        if not override.startswith(("execution", "evaluation")):
            raise LargebatchError(
                f"--set {override}: of a checkpoint only execution and evaluation can be changed"
            )
    if overrides:
        text = dump_yaml(checkpoint.recipe)
        changed = parse_recipe(text, overrides, source=str(path))
        checkpoint = replace(checkpoint, recipe=changed)
    return path, checkpoint, options


def find_checkpoint(path: Path) -> tuple[Path, Checkpoint]:
    """Read the newest readable checkpoint of a run folder, or `path` if it is a file."""
    if not path.is_dir():
        return path, load_checkpoint(path)
    found = newest_checkpoint(path / CHECKPOINTS)
    if found is None:
        raise CheckpointError(
            f"{path}: this folder holds no {CHECKPOINTS}/step-*.safetensors; give the folder of a "
            "run (--out of `largebatch train`), or a checkpoint"
        )
    return found.path, found.checkpoint


def current_stage(checkpoint: Checkpoint, plan: Plan) -> StageName:
    """Return the stage that made the weights: the current one, else the last that was kept."""
    step = checkpoint.progress.step
    under_way: StageName = "clean" if step > plan.train_steps else "train"
    under_way = "affine" if step > plan.steps else under_way
    ended = {stage.name for stage in checkpoint.stages}
    kept = [stage.name for stage in checkpoint.stages if stage.kept]
    moved = [name for name in kept if name != "statistics"]
    return moved[-1] if moved and ended & {under_way, "statistics"} else under_way


def with_statistics(recipe: Recipe, samples: int | None) -> Recipe:
    """Return the recipe with a pass over `samples` images (None: all), without MLPerf's log."""
    there = recipe.train_samples
    if recipe.batch.bn_span is None:
        raise CheckpointError(f"{recipe.model.name} has no BatchNorm statistics to polish")
    number = samples or there
    if number > there:
        raise CheckpointError(f"cannot measure {number} of {there} training images")
    statistics = Statistics(samples=number)
    polish = recipe.polish or Polish(statistics=statistics)
    polish = polish.model_copy(update={"statistics": statistics})
    trackers = tuple(name for name in recipe.tracking.trackers if name != "mlperf")
    job_type = recipe.tracking.job_type or ("polish" if trackers else None)
    tracking = recipe.tracking.model_copy(update={"trackers": trackers, "job_type": job_type})
    return recipe.model_copy(update={"polish": polish, "tracking": tracking})
