"""Evaluate or polish a checkpoint after its run, or compare ways to polish it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from largebatch.distributed.agreement import checksum
from largebatch.errors import CheckpointError, DivergedError, LargebatchError
from largebatch.optim.schedule_free import is_averaging, store_average
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.polish import Affine, Polish, Statistics
from largebatch.recipe.recipe import Recipe, anywhere
from largebatch.recipe.writing import dump_recipe
from largebatch.runs.build import open_measuring, open_session
from largebatch.runs.folder import check_folder
from largebatch.runs.options import Options
from largebatch.runs.record import record
from largebatch.runs.state import build_affine
from largebatch.tracking.environment import source_commit, versions
from largebatch.tracking.events import CHECKPOINTS, StageName, Summary
from largebatch.training.averages import store_ema
from largebatch.training.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint
from largebatch.training.evaluation import Metrics
from largebatch.training.judging import describe_unsettled
from largebatch.training.saving import require_fit
from largebatch.training.session import Session
from largebatch.training.stages import polish_statistics
from largebatch.training.updates import Part

Mode = Literal["none", "statistics", "affine", "clean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one way of polishing; accuracies are parts of 1."""

    mode: Mode
    top1: float
    top5: float
    loss: float
    seconds: float
    """Seconds of the polishing, without the evaluation."""

    updates: int
    """Number of updates made; a skipped one changes nothing."""

    lr: float | None
    """Learning rate of the first update; None without one."""

    note: str | None
    """Remark on statistics that did not settle, or on skipped updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows, each measured when it is iterated over, and what they are measured with."""

    rows: Iterator[Row]
    commit: str | None
    """The commit, as in summary.json; None on workers other than the first."""

    versions: dict[str, str]
    data: dict[str, dict[str, object]]
    """Number of images, and a digest of their list, by split."""


def _small_lr(recipe: Recipe) -> float:
    """Return the default learning rate for the updates of a comparison.

    A hundredth of the first rate of ResNets at batches of 256 (arXiv:1512.03385, section 3.4), as
    near the end of their schedule: the weights of a trained model barely move. Scaled with the
    batch (arXiv:1706.02677, section 2.1), because an epoch has fewer updates in proportion.
    """
    return 0.001 * recipe.batch.last / 256


def with_updates(recipe: Recipe, *, epochs: float, lr: float | None) -> Recipe:
    """Return the recipe with the updates of a comparison beside its statistics pass.

    `lr` None: a small one.
    """
    assert recipe.polish is not None
    changes = {
        **dict.fromkeys(("clean", "ema", "swa")),
        "affine": Affine(epochs=epochs, lr=lr or _small_lr(recipe)),
    }
    polish = recipe.polish.model_copy(update=changes)  # held-out images stay held out
    return recipe.model_copy(update={"polish": polish})


def compare(session: Session) -> Comparison:
    """Polish copies of the session's model in every way; `with_updates` made its recipe."""
    training = session.training
    return Comparison(
        rows=_rows(session),
        commit=source_commit() if training.backend.rank == 0 else None,
        versions=versions(),
        data=training.pipeline.splits,
    )


def _rows(session: Session) -> Iterator[Row]:
    """Measure the model as it is and after each way of polishing a copy.

    In `clean`, all weights move as in `affine`: by momentum SGD on clean images at a small rate.
    """
    polish, state, evaluator = session.polish, session.state, session.evaluator
    assert polish.affine is not None
    assert polish.statistics is not None
    weights = {name: value.clone() for name, value in state.model.state_dict().items()}
    scale = state.scaler.state_dict()
    for mode in get_args(Mode):
        state.model.load_state_dict(weights)
        state.scaler.load_state_dict(scale)
        lr = polish.affine.lr if mode in {"affine", "clean"} else None
        begun, note, updates = time.perf_counter(), None, 0
        if mode == "statistics":
            section = polish.statistics
            drift = evaluator.statistics(section.samples, sequential=section.sequential)
            note = describe_unsettled(drift)
        elif lr is not None:
            planned, updates = session.training.plan.affine_steps, _update(session, mode)
            if updates < planned:
                note = f"{planned - updates} of {planned} updates skipped: gradients not finite"
        seconds = time.perf_counter() - begun
        found = evaluator.validation()
        yield Row(
            mode=mode,
            top1=found.top1,
            top5=found.top5,
            loss=found.loss,
            seconds=seconds,
            updates=updates,
            lr=lr,
            note=note,
        )


def _update(session: Session, mode: Literal["affine", "clean"]) -> int:
    training, state = session.training, session.state
    plan, skipped, recipe = training.plan, state.progress.skipped, session.saver.recipe
    every = mode == "clean"
    state.use(build_affine(recipe, plan, state.model, training.backend, all_weights=every))
    steps = range(plan.steps, plan.updates)
    try:
        session.make_updates(Part(mode, steps, plan.updates, clean=True))
    except DivergedError as error:
        raise DivergedError(f"{mode}: {str(error).partition(';')[0]}; lower --lr") from None
    if training.requests.stopped:
        raise LargebatchError(f"stopped in {mode}: there is no result for it")
    return plan.affine_steps - (state.progress.skipped - skipped)


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
    path, checkpoint = _load(path, options)
    checked = checksum(checkpoint.state["model"])
    facts = {"command": "evaluate", "checkpoint": checked, "--training": training}
    with open_measuring(checkpoint.recipe, options, facts) as session:
        session.saver.restore(checkpoint, source=str(path))
        found = session.evaluator.validation(each)
        on_training = session.evaluator.training() if training else None
        return Evaluated(path, checkpoint.progress.updates, found, on_training)


def polish_checkpoint(
    path: Path, options: Options, *, samples: int | None = None, ema: bool = False
) -> Summary:
    """Polish the statistics of a checkpoint, into a run in `options.out`; return its summary.

    `samples` is the number of clean training images to measure; None: all of them. `ema` polishes
    the EMA of an unfinished run. The summary has the accuracies before and after.
    """
    check_folder(options.out, resume=False)
    _, checkpoint = _load(path, options, ema=ema)
    state = checkpoint.state
    recipe = with_statistics(checkpoint.recipe, samples)
    facts = {"command": "polish", "checkpoint": checksum(state["model"]), "--ema": ema}
    with open_measuring(recipe, options, facts) as session:
        begun = {**state, "stages": [], "ema": {}, "snapshot": {}}
        session.saver.restore(replace(checkpoint, stages=[], state=begun))
        session.evaluator.store_average()
        stage = current_stage(checkpoint, session.training.plan)
        if ema:
            with require_fit(str(path)):
                store_ema(state["ema"], session.state.model)
            stage = "ema"

        def polish() -> bool:
            assert session.polish.statistics is not None
            session.judge.end(stage, num_steps=session.state.progress.updates)
            polish_statistics(session.judge, session.polish.statistics)
            return True

        return record(session, options.out, polish)


@contextmanager
def compare_checkpoint(
    path: Path,
    options: Options,
    *,
    samples: int | None,
    epochs: float,
    lr: float | None,
    ema: bool = False,
) -> Iterator[Comparison]:
    """Measure what each way of polishing does to a copy of a checkpoint.

    `lr` None: a small one. Settings of the training machine are ignored.
    """
    _, checkpoint = _load(path, options, ema=ema)
    state = checkpoint.state
    recipe = with_statistics(anywhere(checkpoint.recipe), samples)
    recipe = with_updates(recipe, epochs=epochs, lr=lr)
    facts = {"command": "polish --compare", "checkpoint": checksum(state["model"]), "--ema": ema}
    with open_session(recipe, options, facts) as session:
        own = session.state
        with require_fit(str(path)):
            own.model.load_state_dict(state["model"])
            own.scaler.load_state_dict(state["scaler"])
            if is_averaging(state["optimizer"]["param_groups"]):
                own.load_optimizer(**state["optimizer"])
                session.evaluator.store_average()
            elif is_averaging(own.updater.optimizer.param_groups):  # the model has the average
                store_average(own.updater.optimizer)
            if ema:
                store_ema(state["ema"], own.model)
        yield compare(session)


def _load(path: Path, options: Options, *, ema: bool = False) -> tuple[Path, Checkpoint]:
    """Read a checkpoint file, or the newest checkpoint of a run folder; set its execution.

    Raises CheckpointError if it has no EMA and `ema` requests it.
    """
    path, checkpoint = find_checkpoint(path)
    polish = checkpoint.recipe.polish
    if ema and not (checkpoint.state["ema"] and polish is not None and polish.ema):
        raise CheckpointError(
            f"{path}: holds no EMA: a checkpoint has one if its recipe has polish.ema, until the "
            "schedule ends and the EMA becomes the model; leave --ema out"
        )
    recipe = _with_execution(checkpoint.recipe, options.overrides, path=path)
    return path, replace(checkpoint, recipe=recipe)


def find_checkpoint(path: Path) -> tuple[Path, Checkpoint]:
    """Read the newest readable checkpoint of a run folder, or `path` if it is a file."""
    if not path.is_dir():
        return path, load_checkpoint(path)
    found = newest_checkpoint(path / CHECKPOINTS)
    if found is None:
        raise CheckpointError(f"{path}: this folder holds no {CHECKPOINTS}/step-*.safetensors")
    return found.path, found.checkpoint


def _with_execution(recipe: Recipe, overrides: Sequence[str], *, path: Path) -> Recipe:
    for override in overrides:
        if not override.startswith(("execution", "evaluation")):
            raise LargebatchError(
                f"--set {override}: a checkpoint has its own recipe; only execution and evaluation "
                "can be changed"
            )
    return parse_recipe(dump_recipe(recipe), overrides, source=str(path)) if overrides else recipe


def current_stage(checkpoint: Checkpoint, plan: Plan) -> StageName:
    """Return the stage that made the weights: the current one, else the last one that was kept.

    `statistics`, which moves no weight, is the last stage of every run that has it.
    """
    under_way: StageName = plan.stage_after(checkpoint.progress.step)
    ended = {stage.name for stage in checkpoint.stages}
    kept = [stage.name for stage in checkpoint.stages if stage.kept]
    moved = [name for name in kept if name != "statistics"]
    return moved[-1] if moved and ended & {under_way, "statistics"} else under_way


def with_statistics(recipe: Recipe, samples: int | None) -> Recipe:
    """Return the recipe with a statistics pass, and without MLPerf's log, which is about training.

    `samples` is the number of clean training images to measure; None: all of them.
    """
    there = recipe.train_samples
    if recipe.batch.bn_span is None:
        raise CheckpointError(f"{recipe.model.name} has no BatchNorm statistics to polish")
    number = samples or there
    if number > there:
        raise CheckpointError(f"cannot measure {number} of {there} training images")
    asked = recipe.polish.statistics if recipe.polish else None
    sequential = asked is not None and asked.sequential
    statistics = Statistics(samples=number, sequential=sequential)
    polish = recipe.polish or Polish(statistics=statistics)
    polish = polish.model_copy(update={"statistics": statistics})
    tracking = tuple(name for name in recipe.tracking if name != "mlperf")
    return recipe.model_copy(update={"polish": polish, "tracking": tracking})
