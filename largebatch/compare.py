"""What each way of polishing would do to a model, measured on copies of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from largebatch.build import build_extra
from largebatch.errors import DivergedError, LargebatchError
from largebatch.finishing import Affine
from largebatch.recipe import Recipe
from largebatch.session import Session, measure
from largebatch.stages import make_updates, measure_statistics

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
    lr: float | None
    """Of the first update; null where there is none."""


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


def compare(session: Session) -> Iterator[Row]:
    """Polish copies of the session's model in every way; `with_updates` made its recipe.

    In `clean`, all weights move as those of `affine` do: by plain momentum SGD on clean pictures
    at a small rate.
    """
    polish = session.recipe.polish
    assert polish is not None
    assert polish.affine is not None
    assert polish.statistics is not None
    start = {name: value.clone() for name, value in session.model.state_dict().items()}
    for mode in get_args(Mode):
        session.model.load_state_dict(start)
        lr = polish.affine.lr if mode in {"affine", "clean"} else None
        begun = time.perf_counter()
        if mode == "statistics":
            section = polish.statistics
            measure_statistics(session, section.samples, sequential=section.sequential)
        elif lr is not None:
            _update(session, mode, lr=lr)
        seconds = time.perf_counter() - begun
        found = measure(session, mode)
        yield Row(
            mode=mode,
            top1=found.top1,
            top5=found.top5,
            loss=found.loss,
            seconds=seconds,
            updates=session.plan.affine_steps if lr else 0,
            lr=lr,
        )


def _update(session: Session, mode: Mode, *, lr: float) -> None:
    """Make the updates on clean pictures, beginning at `lr`, of few weights or of all."""
    plan = session.plan
    session.use(
        build_extra(
            *(session.recipe, plan, session.model, session.backend),
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
