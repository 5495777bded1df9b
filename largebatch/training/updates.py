"""The updates of a stage, and the work between them: evaluate, compare, save, stop."""

from bisect import bisect_right
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial

from largebatch.recipe.arithmetic.plan import Plan
from largebatch.tracking.events import StageName
from largebatch.training import saving
from largebatch.training.loop import Update, step_seeds, train
from largebatch.training.trainer import Trainer


def make_updates(trainer: Trainer, name: StageName, steps: range, *, until: int) -> None:
    """Make these updates of a stage, up to `until`; evaluate and save between them."""
    step_log, progress = trainer.step_log, trainer.state.progress
    end = min(steps.stop, until + progress.discarded)
    done = steps.start
    with closing(trainer.updates(trainer, name, steps, end)) as updates:
        for _ in updates:
            before, done = done, trainer.state.progress.step
            evaluates = done < steps.stop and _passes(trainer.plan, before, done)
            saves = evaluates or saving.save_is_due(trainer, since=before)  # compares them too
            if saving.comparison_is_due(trainer, since=before) and not saves:
                saving.compare_weights(trainer)
            if evaluates:
                step_log.flush()
                trainer.state.progress.note(trainer.evaluate(name))
            if saves:
                step_log.flush()
                saving.save(trainer)
            if step_log.stopped or done >= end:
                break
    step_log.flush()


def _passes(plan: Plan, before: int, done: int) -> bool:
    """Return True if an evaluation is due after one of the updates in (before, done]."""
    points = plan.evaluate_after  # in rising order, up to 100,000 of them
    return bisect_right(points, before) < bisect_right(points, done)


def synchronous_updates(
    trainer: Trainer, name: StageName, steps: range, _: int
) -> Generator[None, None, None]:
    """Make synchronous updates by the training loop; yield after each."""
    step_log, state = trainer.step_log, trainer.state
    batches = trainer.pipeline.training(steps, clean=name != "train")
    train_piece = partial(
        train,
        state.model,
        state.updater.optimizer,
        batches,
        state.updater.schedule,
        trainer.criterion,
        state.updater.reducer,
        trainer.spans,
        state.scaler,
        seed=step_seeds(trainer.recipe.seed, trainer.backend.rank),
        skip_nonfinite=trainer.recipe.nonfinite.action == "skip" and not state.scaler.is_enabled(),
        measure_norm=step_log.measure_norm,
    )
    updates = train_pieces(trainer.plan, steps, train_piece)
    if trainer.profiler is not None:
        updates = trainer.profiler.follow(updates, stage=name, made=steps.start)
    step_log.resume_clock()
    with closing(batches), closing(updates):
        for update in updates:
            step_log.add(name, update)  # one under way when the one before diverged is not made
            yield
            if not step_log.is_training:  # it was flushed, for something other than updates
                step_log.resume_clock()


def train_pieces(
    plan: Plan, steps: range, train_piece: Callable[..., Generator[Update, None, None]]
) -> Generator[Update, None, None]:
    """Make the updates of each piece of a batch schedule; `train_piece` is `train` less sizes."""
    for part, global_batch, accumulation in plan.within(steps):
        yield from train_piece(steps=part, accumulation=accumulation, global_batch=global_batch)
