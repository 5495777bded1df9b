"""What can be done with a checkpoint after its run: evaluate it, polish it, compare polishings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from largebatch import checkpoint
from largebatch.build import portable
from largebatch.checkpoint import Checkpoint
from largebatch.compare import Row, compare, small_rate, with_updates
from largebatch.errors import CheckpointError
from largebatch.evaluate import Metrics
from largebatch.finishing import Polish, Statistics
from largebatch.folder import check_folder
from largebatch.recipe import Recipe, Reduction
from largebatch.runner import Options, carry_out, open_session
from largebatch.session import Session, end_stage, measure
from largebatch.stages import polish_statistics
from largebatch.summary import Summary


def evaluate_checkpoint(path: Path, options: Options) -> Metrics:
    """Measure a checkpoint, or the newest one of a run folder, on its validation data."""
    state = _load(path)
    with open_session(state.recipe, options, measuring=True) as (session, _):
        session.restore(state)
        return measure(session, _stage(session))


def polish_checkpoint(path: Path, options: Options, *, samples: int | None = None) -> Summary:
    """Do the statistics pass on a checkpoint and leave the polished run in `options.out`.

    `samples` is the number of clean training pictures to measure; None: all of them. The summary
    holds the accuracy of the checkpoint as it was and as it became.
    """
    check_folder(options.out, resume=False)
    state = _load(path)
    recipe = with_statistics(state.recipe, samples)
    with open_session(recipe, options, measuring=True) as (session, trackers):
        session.restore(replace(state, stages=[], average={}, before={}))

        def work() -> bool:
            end_stage(session, _stage(session), num_steps=session.step)
            polish_statistics(session)
            return True

        return carry_out(session, trackers, options.out, work)


def compare_checkpoint(
    path: Path, options: Options, *, samples: int | None, epochs: float, lr: float | None
) -> Iterator[Row]:
    """Measure what each way of polishing would do to a checkpoint; it is only read.

    `lr` None: a small one. The machine that trained it may have had what this one lacks.
    """
    state = _load(path)
    recipe = portable(state.recipe).model_copy(update={"reduction": Reduction()})
    rate = lr or small_rate(recipe)
    recipe = with_updates(with_statistics(recipe, samples), epochs=epochs, lr=rate)
    with open_session(recipe, options) as (session, _):
        session.model.load_state_dict(state.model)
        yield from compare(session)


def _load(path: Path) -> Checkpoint:
    """Read a checkpoint file, or the newest checkpoint of a run folder."""
    if not path.is_dir():
        return checkpoint.load(path)
    content = checkpoint.newest(path / "checkpoints")
    if content is None:
        raise CheckpointError(f"{path}: this folder holds no readable checkpoints/step-*.pt")
    return checkpoint.loads(content, source=str(path))


def _stage(session: Session) -> str:
    """Return the name of the stage that made the weights."""
    plan = session.plan
    if session.step > plan.steps:
        return "affine"
    return "clean" if session.step > plan.train_steps else "train"


def with_statistics(recipe: Recipe, samples: int | None) -> Recipe:
    """Return the recipe with a statistics pass over so many samples."""
    span, there = recipe.batch.bn_span, recipe.train_samples
    if span is None:
        raise CheckpointError(f"{recipe.model.name} has no BatchNorm statistics to polish")
    number = samples or there
    if number > there:
        raise CheckpointError(f"cannot measure {number} of {there} training pictures")
    asked = recipe.polish.statistics if recipe.polish else None
    sequential = asked is not None and asked.sequential
    if number % span == 1 and not sequential:
        raise CheckpointError(
            f"{number} pictures leave a single one for the last BatchNorm span of {span}; measure "
            "one more or one less with --samples"
        )
    statistics = Statistics(samples=number, sequential=sequential)
    polish = (recipe.polish or Polish(statistics=statistics)).model_copy(
        update={"statistics": statistics}
    )
    return recipe.model_copy(update={"polish": polish})
