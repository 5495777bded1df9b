"""Compares the devices of all workers before a run: each computes passes of the others again."""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from largebatch import accelerator
from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend
from largebatch.errors import RecipeError
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_session
from largebatch.runs.options import MachineOptions
from largebatch.tracking.events import Suspect, WrongCard
from largebatch.training.loop import EagerStep, step_seeds
from largebatch.training.replay import offsets, suspect_here
from largebatch.training.session import Session
from largebatch.training.stages import convolutions


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """What a comparison of all devices has found."""

    devices: tuple[Suspect, ...]
    """Host and device of each worker."""

    replays: int
    """Number of passes of others that each worker has computed."""

    distances: int
    """Number of different partners that each worker had, in workers or in groups of them."""

    most_distances: int
    """Number of partners that it can have; 0 if it repeats its own passes."""

    wrong: tuple[WrongCard, ...]
    """Passes that differed, in their order."""

    def count_wrong(self, worker: int) -> tuple[int, int]:
        """Return how often a worker was found wrong, and how often it was one of several."""
        of_worker = Counter(
            event.is_certain
            for event in self.wrong
            if worker in {suspect.worker for suspect in event.suspects}
        )
        return of_worker[True], of_worker[False]


@contextmanager
def checked_devices(
    recipe: Recipe, options: MachineOptions, *, seconds: float
) -> Iterator[DeviceCheck]:
    """Yield what comparing passes of a recipe for `seconds` has found; nothing is trained.

    At least one pass is compared. All workers call this, and are connected until the block ends.
    Raises RecipeError for a recipe with a protocol, which has no replays.
    """
    if recipe.protocol is not None:
        raise RecipeError(
            f"doctor --replay: {recipe.name} has a protocol, which has no replays: give a recipe "
            "without one"
        )
    recipe = recipe.with_execution(replay_every=1, on_wrong_card="continue")
    with tempfile.TemporaryDirectory() as folder:
        run_options = options.options(out=Path(folder)).without_changes()
        with open_session(recipe, run_options, {"command": "doctor"}) as session:
            replays = _replays(session, seconds=seconds)
            replay = session.replay
            assert replay is not None
            backend = session.backend
            groups = backend.world_size // replay.group
            here = gather_values(asdict(suspect_here(backend)), backend, backend.device)
            numbers = range(min(replays, session.plan.train_steps))
            yield DeviceCheck(
                devices=tuple(Suspect(**it) for it in here),
                replays=replays,
                distances=len({offsets(number, groups)[0] for number in numbers} - {0}),
                most_distances=groups - 1,
                wrong=tuple(replay.found),
            )


def _replays(session: Session, *, seconds: float) -> int:
    """Compare first passes of updates, without making these; return their number."""
    backend = session.backend
    plan = session.plan
    replay = session.replay
    assert replay is not None
    state = session.state
    step = EagerStep(
        state.model,
        state.updater.optimizer,
        session.criterion,
        state.updater.reducer,
        session.spans,
        global_batch=plan.global_batch,
        scaler=state.scaler,
    )
    end = time.monotonic() + seconds
    done = 0
    with convolutions(plan, repeat=True):
        while True:
            number = done % plan.train_steps
            step.model.train()
            restore = session.spans.save()
            positions = plan.positions(number, 0, backend.rank)
            with closing(session.pipeline.at([positions], clean=False)) as batches:
                batch = next(batches)
            accelerator.seed(step_seeds(session.seed, backend.rank)(number), backend.device)
            replay.first_pass(step, batch, number, stage="train", clean=False)
            restore()
            done += 1
            if _is_over(end, backend):
                return done


def _is_over(end: float, backend: Backend) -> bool:
    """Return True on all workers if the time of worker 0 is over."""
    over = torch.tensor(int(time.monotonic() >= end), device=backend.device)
    backend.broadcast(over)
    return bool(over.item())
