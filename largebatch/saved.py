"""What can be done with a checkpoint after its run: evaluate it, polish it, compare polishings."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from largebatch.compare import Comparison, compare, small_rate, with_updates
from largebatch.distributed.agreement import checksum
from largebatch.errors import CheckpointError
from largebatch.folder import check_folder
from largebatch.recipe.plan import Plan
from largebatch.recipe.recipe import Recipe, plainest
from largebatch.recipe.sections import Polish, Statistics
from largebatch.runner import Options, carry_out, open_session
from largebatch.tracking.events import Summary
from largebatch.training import ema
from largebatch.training.evaluation import Metrics
from largebatch.training.stages import end_stage, measure, polish_statistics
from largebatch.training.state import (
    Checkpoint,
    load_checkpoint,
    newest_checkpoint,
    parse_checkpoint,
)


def evaluate_checkpoint(path: Path, options: Options) -> Metrics:
    """Measure a checkpoint, or the newest one of a run folder, on its validation data."""
    state = _load(path)
    facts = {"command": "evaluate", "checkpoint": checksum(state.model)}
    with open_session(state.recipe, options, facts, measuring=True) as (session, _):
        session.restore(state)
        return measure(session, _stage(state, session.plan))


def polish_checkpoint(
    path: Path, options: Options, *, samples: int | None = None, averaged: bool = False
) -> Summary:
    """Do the statistics pass on a checkpoint and leave the polished run in `options.out`.

    `samples` is the number of clean training pictures to measure; None: all of them. `averaged`
    takes the moving average of a run that has not ended. The summary holds the accuracy of the
    checkpoint as it was and as it became.
    """
    check_folder(options.out, resume=False)
    state = _load(path, averaged=averaged)
    recipe = with_statistics(state.recipe, samples)
    facts = {"command": "polish", "checkpoint": checksum(state.model), "--ema": averaged}
    with open_session(recipe, options, facts, measuring=True) as (session, trackers):
        session.restore(replace(state, stages=[], average={}, before={}))
        stage = _stage(state, session.plan)
        if averaged:
            ema.put(state.average, session.model)
            stage = "ema"

        def work() -> bool:
            end_stage(session, stage, num_steps=session.made)
            polish_statistics(session)
            return True

        return carry_out(session, trackers, options.out, work)


@contextmanager
def compare_checkpoint(
    path: Path,
    options: Options,
    *,
    samples: int | None,
    epochs: float,
    lr: float | None,
    averaged: bool = False,
) -> Iterator[Comparison]:
    """Measure what each way of polishing would do to a checkpoint; it is only read.

    `lr` None: a small one. The machine that trained it may have had what this one lacks.
    """
    state = _load(path, averaged=averaged)
    recipe = plainest(state.recipe)
    rate = lr or small_rate(recipe)
    recipe = with_updates(with_statistics(recipe, samples), epochs=epochs, lr=rate)
    facts = {"command": "polish --compare", "checkpoint": checksum(state.model), "--ema": averaged}
    with open_session(recipe, options, facts) as (session, _):
        session.model.load_state_dict(state.model)
        session.scaler.load_state_dict(state.scaler)
        if averaged:
            ema.put(state.average, session.model)
        yield compare(session)


def _load(path: Path, *, averaged: bool = False) -> Checkpoint:
    """Read a checkpoint file, or the newest checkpoint of a run folder.

    Raises CheckpointError where the moving average is asked for and there is none.
    """
    if path.is_dir():
        content = newest_checkpoint(path / "checkpoints")
        if content is None:
            raise CheckpointError(f"{path}: this folder holds no readable checkpoints/step-*.pt")
        state = parse_checkpoint(content, source=str(path))
    else:
        state = load_checkpoint(path)
    if averaged and not state.average:
        raise CheckpointError(
            f"{path}: holds no moving average: a checkpoint has one beside the weights if its "
            "recipe has polish.ema, until the schedule ends and it becomes the model; leave --ema "
            "out"
        )
    return state


def _stage(state: Checkpoint, plan: Plan) -> str:
    """Return the name of the stage that made the weights: the one under way, else the last kept.

    `statistics`, which moves no weight, ends every run that has it.
    """
    under_way = "affine" if state.step > plan.steps else "clean"
    under_way = under_way if state.step > plan.train_steps else "train"
    ended = {stage["name"] for stage in state.stages}
    kept = [stage["name"] for stage in state.stages if stage["kept"]]
    made = [name for name in kept if name != "statistics"]
    return made[-1] if made and ended & {under_way, "statistics"} else under_way


def with_statistics(recipe: Recipe, samples: int | None) -> Recipe:
    """Return the recipe with a statistics pass over so many samples."""
    there = recipe.train_samples
    if recipe.batch.bn_span is None:
        raise CheckpointError(f"{recipe.model.name} has no BatchNorm statistics to polish")
    number = samples or there
    if number > there:
        raise CheckpointError(f"cannot measure {number} of {there} training pictures")
    asked = recipe.polish.statistics if recipe.polish else None
    sequential = asked is not None and asked.sequential
    statistics = Statistics(samples=number, sequential=sequential)
    polish = (recipe.polish or Polish(statistics=statistics)).model_copy(
        update={"statistics": statistics}
    )
    return recipe.model_copy(update={"polish": polish})
