"""What each way of polishing would do to a model, measured on copies of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from largebatch.build import build_extra
from largebatch.errors import DivergedError, LargebatchError
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.sections import Affine
from largebatch.tracking.environment import source_commit, versions
from largebatch.training.stages import make_updates, measure, measure_statistics, say_unsettled
from largebatch.training.state import Session

Mode = Literal["none", "statistics", "affine", "clean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The model after one way of polishing; accuracies are parts of 1."""

    mode: Mode
    top1: float
    top5: float
    loss: float
    seconds: float
    """What the polishing took, evaluation left out."""

    updates: int
    """Those that were made; one that was skipped in fp16 changes nothing."""

    lr: float | None
    """Of the first update; null where there is none."""

    note: str | None
    """What else there is to say: that statistics never came to rest, or updates were skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows that are measured as they are asked for, and what they were measured with."""

    rows: Iterator[Row]
    commit: str | None
    """As in summary.json, and None on workers other than the first."""

    versions: dict[str, str]
    data: dict[str, dict[str, object]]
    """By split: how many pictures, and the digest that two lists of the same pictures share."""


def small_rate(recipe: Recipe) -> float:
    """Return the rate for the updates of a comparison, where none was asked for.

    A hundredth of that with which ResNets begin at batches of 256 (arXiv:1512.03385, section 3.4),
    where their staircase is nearly over: the weights of a trained model barely move. Scaled with
    the batch (arXiv:1706.02677, section 2.1), because there are as many fewer updates in an epoch.
    """
    return 0.001 * recipe.batch.global_batch / 256


def with_updates(recipe: Recipe, *, epochs: float, lr: float) -> Recipe:
    """Return the recipe with the updates of a comparison beside its statistics pass."""
    assert recipe.polish is not None
    changes = {"clean": None, "ema": None, "affine": Affine(epochs=epochs, lr=lr)}
    polish = recipe.polish.model_copy(update=changes)  # what was held out stays so
    return recipe.model_copy(update={"polish": polish})


def compare(session: Session) -> Comparison:
    """Polish copies of the session's model in every way; `with_updates` made its recipe."""
    return Comparison(
        rows=_rows(session),
        commit=source_commit() if session.backend.rank == 0 else None,
        versions=versions(),
        data=session.pipeline.splits,
    )


def _rows(session: Session) -> Iterator[Row]:
    """Measure the model as it is and after each way of polishing a copy.

    In `clean`, all weights move as those of `affine` do: by plain momentum SGD on clean pictures
    at a small rate.
    """
    polish = session.recipe.polish
    assert polish is not None
    assert polish.affine is not None
    assert polish.statistics is not None
    start = {name: value.clone() for name, value in session.model.state_dict().items()}
    scale = session.scaler.state_dict()
    for mode in get_args(Mode):
        session.model.load_state_dict(start)
        session.scaler.load_state_dict(scale)
        lr = polish.affine.lr if mode in {"affine", "clean"} else None
        begun, note, made = time.perf_counter(), None, 0
        if mode == "statistics":
            section = polish.statistics
            drift = measure_statistics(session, section.samples, sequential=section.sequential)
            note = say_unsettled(drift)
        elif lr is not None:
            made = _update(session, mode, lr=lr)
            note = _say_skipped(session.plan.affine_steps, made)
        seconds = time.perf_counter() - begun
        found = measure(session, mode)
        yield Row(
            mode=mode,
            top1=found.top1,
            top5=found.top5,
            loss=found.loss,
            seconds=seconds,
            updates=made,
            lr=lr,
            note=note,
        )


def _say_skipped(num: int, made: int) -> str | None:
    """Say how many updates fp16 lost; None if it lost none."""
    return f"{num - made} of {num} updates skipped: fp16 overflow" if made < num else None


def _update(session: Session, mode: Mode, *, lr: float) -> int:
    """Make the updates on clean pictures, beginning at `lr`, of few weights or of all.

    Returns how many were not skipped.
    """
    plan, skipped = session.plan, session.log.skipped
    session.use(
        build_extra(
            session.recipe,
            plan,
            session.model,
            session.backend,
            affine_only=mode == "affine",
            lr=lr,
        )
    )
    try:
        make_updates(session, mode, range(plan.steps, plan.updates), until=plan.updates)
    except DivergedError as error:
        raise DivergedError(f"{mode}: {str(error).partition(';')[0]}; lower --lr") from None
    if session.log.stopped:
        raise LargebatchError(f"stopped in {mode}: there is no result for it")
    return plan.affine_steps - (session.log.skipped - skipped)
