"""SWAP: train replicas of the model separately and average their weights.

Stochastic weight averaging in parallel (arXiv:2001.02312, algorithm 1, phase 3). A trained replica
is a function of the recipe and of its number, which gives it its own seed, and so its own order of
samples, crops and dropout. Replicas are distributed to the workers in rounds, and the mean does not
depend on the number of workers.
"""

import math
from collections.abc import Generator
from contextlib import closing

import torch
from torch.amp import GradScaler

from largebatch.data.order import replica_seed
from largebatch.distributed.serial import Serial
from largebatch.errors import DivergedError
from largebatch.models.batchnorm import Spans
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.polish import SWAP
from largebatch.training.averages import ReplicaMean
from largebatch.training.loop import Update, step_seeds, train
from largebatch.training.saving import save
from largebatch.training.trainer import Trainer

EXCHANGE_EVERY = 10
"""Number of updates between two exchanges of requests to stop, the only communication."""


def train_replicas(trainer: Trainer, section: SWAP) -> ReplicaMean | None:
    """Train the replicas that remain and return the mean of all; None if a worker is asked to stop.

    The model is unchanged afterwards. After every round it is saved with the sum over the replicas
    so far; a round that is stopped starts again.
    """
    state, backend = trainer.state, trainer.backend
    mean = state.replicas = state.replicas or ReplicaMean(state.model)
    begun = {name: value.clone() for name, value in state.model.state_dict().items()}
    state.updater.reducer.close()  # no update of the schedule follows
    try:
        while mean.num < section.replicas and not trainer.step_log.stopped:
            left = section.replicas - mean.num
            _train_round(trainer, mean.num + backend.rank, takes_part=backend.rank < left)
            if not trainer.step_log.stopped:
                mean.add(backend, num=min(left, backend.world_size))
                state.model.load_state_dict(begun)
                save(trainer)
    finally:
        state.model.load_state_dict(begun)
        trainer.spans.attach()
    return mean if mean.num == section.replicas else None


def _train_round(trainer: Trainer, replica: int, *, takes_part: bool) -> None:
    """Train one replica while the other workers train theirs, or wait for them.

    Raises DivergedError on every worker if one of them diverged.
    """
    assert trainer.plan.replica is not None
    steps = range(trainer.plan.replica.steps)
    skipped = torch.zeros((), device=trainer.backend.device)
    with closing(_updates(trainer, replica)) as updates:
        for first in steps[::EXCHANGE_EVERY]:
            bad = torch.zeros((), device=trainer.backend.device)
            few = steps[first : first + EXCHANGE_EVERY]
            for _ in few if takes_part else ():
                update = next(updates)
                lost = ~(update.loss.isfinite() & update.finite)
                if update.skipped is not None:
                    skipped = (skipped + 1) * update.skipped
                    too_many = skipped > trainer.recipe.nonfinite.most
                    lost = torch.where(update.skipped, too_many, lost)
                bad += lost
            if trainer.step_log.share(bad):
                raise DivergedError(
                    f"the training loss or a gradient of a replica stopped being a number in its "
                    f"updates {few.start} to {few.stop - 1}; lower polish.swap.lr"
                )
            if trainer.step_log.stopped:
                return


def _replica_scaler(trainer: Trainer, plan: Plan) -> GradScaler:
    """Return the loss scaler of a replica, which starts from the run's last scale.

    The loss is a mean over fewer samples, so the same scale would overflow and be halved several
    times. Powers of two do not change any bit of the gradients.
    """
    state = trainer.state
    scaler = GradScaler(trainer.backend.device.type, enabled=state.scaler.is_enabled())
    if scaler.is_enabled():
        saved = state.scaler.state_dict()
        share = plan.global_batch / trainer.recipe.batch.last
        scaler.load_state_dict({**saved, "scale": saved["scale"] * 2.0 ** round(math.log2(share))})
    return scaler


def _updates(trainer: Trainer, replica: int) -> Generator[Update, None, None]:
    """Make the updates of one replica, starting from the current model."""
    recipe, state, device = trainer.recipe, trainer.state, trainer.backend.device
    plan, seed = trainer.plan.replica, replica_seed(recipe.seed, replica)
    assert plan is not None
    steps = range(plan.steps)
    scaler = _replica_scaler(trainer, plan)
    updater = trainer.build_replica()
    batches = trainer.pipeline.replica(plan, seed=seed).training(steps, clean=False)
    with closing(updater.reducer), closing(batches):
        yield from train(
            state.model,
            updater.optimizer,
            batches,
            updater.schedule,
            trainer.criterion,
            updater.reducer,
            Spans(state.model, Serial(device)),
            scaler,
            steps=steps,
            accumulation=plan.accumulation,
            global_batch=plan.global_batch,
            seed=step_seeds(seed, 0),
            skip_nonfinite=recipe.nonfinite.action == "skip" and not scaler.is_enabled(),
        )
