"""Makes the updates of a stage by the protocol of the recipe, in place of the synchronous ones.

The learners come to rest for an evaluation, a checkpoint or the end of a stage: no mini-batch is
handed out beyond that update, all gradients are pushed, and every worker has the same weights after
the same number of updates.
"""

import copy
import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from largebatch import accelerator
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.errors import DivergedError, RecipeError
from largebatch.lab.protocols.exchange import Exchange, ExchangeRecord
from largebatch.lab.protocols.server import ARRIVALS, MiniBatches, UpdateRule
from largebatch.models import affine_parameters
from largebatch.models.batchnorm import Spans
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.recipe import Recipe
from largebatch.storage import write_whole, writing
from largebatch.tracking.events import StepEvent
from largebatch.training.loop import Criterion, step_seeds
from largebatch.training.session import StageSteps, Training, Updates
from largebatch.training.state import TrainState


def open_updates(section: Protocol, recipe: Recipe, state: TrainState, backend: Backend) -> Updates:
    """Return the function that makes the updates of a stage, and yields whenever learners rest.

    Raises RecipeError if a stage trains fewer tensors than the protocol has servers.
    """
    affine = recipe.polish is not None and recipe.polish.affine is not None
    require_tensors(state.model, servers=section.num_servers, affine=affine)
    first = section.learners if section.dedicated else 0
    servers = range(first, first + section.num_servers)
    exchange = Exchange(backend, learners=section.learners, servers=servers)

    def updates(training: Training, part: StageSteps) -> Generator[None, None, None]:
        segment = _ProtocolSegment(training, part, recipe, exchange)
        if training.backend.rank == 0:
            segment.forget(part.steps.start)
        while training.state.progress.step < part.end and not training.requests.stopped:
            segment.run()
            yield

    return updates


class _ProtocolSegment:
    def __init__(
        self, training: Training, part: StageSteps, recipe: Recipe, exchange: Exchange
    ) -> None:
        self._training = training
        self._part = part
        self._exchange = exchange
        section = recipe.protocol
        assert section is not None
        self._every = recipe.execution.checkpoints.every_steps
        self._path = training.log.folder / ARRIVALS
        self._size = section.mini_batch(recipe.batch.global_batch)
        self._rule = UpdateRule.of(section, mini_batch=self._size)
        self._optimizer = training.state.updater.optimizer
        groups = self._optimizer.param_groups
        self._gradients = Gradients(
            model=training.state.model,
            weights=[weight for group in groups for weight in group["params"]],
            batch=self._batch,
            criterion=training.criterion,
            reducer=training.state.updater.reducer,
            spans=training.spans,
            learners=section.learners,
            seed=training.seed,
        )

    def run(self) -> None:
        """Make the updates to the next rest, or fewer if a worker is asked to stop or to save."""
        training = self._training
        rule = self._rule
        start = training.state.progress.step
        # Learners rest only where the core needs one state: a rest costs the wait for the slowest.
        points = [point for point in training.plan.evaluate_after if point > start]
        if self._every is not None:
            points.append((start // self._every + 1) * self._every)
        updates = range(start, min([self._part.end, *points]))
        with self._undone_on_failure():
            record = self._exchange.run(
                self._gradients.weights,
                self._optimizer,
                training.state.updater.schedule,
                rule,
                MiniBatches(rule, updates),
                clock=updates.start,
                gradient=self._gradients.of,
                asks=lambda: any(training.requests.own()),
            )
            # Before anything is written: the statistics are part of the state at this rest.
            average_statistics(
                training.state.model, training.backend, learners=self._exchange.learners
            )
            if training.backend.rank == 0:
                self._write(record)
            training.requests.share()
            diverged = self._add(record)
        if diverged is not None:
            raise diverged

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Return to the last rest if the updates, or their record, fail.

        Between two rests there is no consistent state: a learner's weights and momentum have
        different clocks, gradients that were pushed but not applied are lost with the servers, and
        the step of a checkpoint is that of the record.
        """
        state = self._training.state
        # Copies of everything that the block changes, because a part of it cannot be undone.
        progress = copy.deepcopy(state.progress)
        before = copy.deepcopy(state.model.state_dict())
        optimizer = copy.deepcopy(self._optimizer.state_dict())
        try:
            yield
        except BaseException:
            state.model.load_state_dict(before)
            state.progress = progress
            self._optimizer.load_state_dict(optimizer)
            raise

    def _add(self, record: ExchangeRecord) -> DivergedError | None:
        """Add each update to the log and the state, as the core does."""
        state = self._training.state
        plan = self._training.plan
        takes = self._rule.gradients
        losses = iter([arrival.loss for arrival in record.arrivals[0]])
        try:
            for update, lr, seconds in record.updates:
                step = StepEvent(
                    stage=self._part.stage,
                    step=update,
                    epoch=plan.epoch(update + 1),
                    loss=sum(islice(losses, takes)) / takes,
                    lr=lr,
                    step_seconds=seconds,
                    images_per_second=plan.global_batch / seconds,
                )
                state.count(update, images=plan.batch_at(update), seconds=seconds)
                self._training.step_log.add_record(step)
        except DivergedError as error:
            return error
        return None

    def _batch(self, number: int) -> Batch:
        positions = range(number * self._size, (number + 1) * self._size)
        clean = self._part.clean
        with closing(self._training.pipeline.at([positions], clean=clean)) as batches:
            return next(batches)

    def forget(self, begun: int) -> None:
        """Remove the records of updates that are made again from the file; worker 0 only."""
        if not self._path.exists():
            return
        lines = self._path.read_text().splitlines(keepends=True)
        first = begun * self._rule.gradients
        whole = [line for line in lines if line.endswith("\n")]  # a killed process left the last
        left = [line for line in whole if json.loads(line)["mini_batch"] < first]
        if len(left) < len(lines):
            write_whole(self._path, "".join(left).encode())

    def _write(self, record: ExchangeRecord) -> None:
        """Add the gradients to the run folder, by server, in the order in which they arrived.

        Raises CheckpointError if the file cannot be written.
        """
        lines = []
        for server, arrivals in enumerate(record.arrivals):
            for arrival in arrivals:
                loss = arrival.loss if math.isfinite(arrival.loss) else None  # as in the log
                lines.append(json.dumps({"server": server, **arrival._asdict(), "loss": loss}))
        with writing(self._path, hint="make room"), self._path.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def require_tensors(model: nn.Module, *, servers: int, affine: bool) -> None:
    """Raise RecipeError if a stage trains fewer tensors than there are servers."""
    trained = affine_parameters(model) if affine else set(model.parameters())
    if servers > len(trained):
        raise RecipeError(
            f"protocol.servers: {servers} servers hold whole tensors, and a stage of this recipe "
            f"trains {len(trained)}: give at most that many, as in {{centralised: {len(trained)}}}"
        )


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of a model by the number of their mini-batch.

    `reducer` and `spans` belong to this worker alone: nothing is summed, and each learner
    normalises its own mini-batch and has its own running statistics.
    """

    model: nn.Module
    weights: Sequence[nn.Parameter]
    batch: Callable[[int], Batch]
    criterion: Criterion
    reducer: Reducer
    spans: Spans
    learners: int
    seed: int
    """Seed of dropout and the like, which depend only on it and the number of the mini-batch."""

    def of(self, mini_batch: int) -> tuple[list[Tensor], float]:
        """Return the mean gradient over a mini-batch at the current weights, and its loss."""
        self.model.train()
        # So dropout is that of the same mini-batch in any order of arrival, and with hardsync that
        # of the worker with this part of the batch.
        update, learner = divmod(mini_batch, self.learners)
        accelerator.seed(step_seeds(self.seed, learner)(update), self.reducer.device)
        images, labels = self.batch(mini_batch)
        self.reducer.zero()
        loss = self.criterion(self.model(images), labels) / len(labels)
        # The moments are complete after forward.
        self.spans.reduce()
        self.reducer.arm()
        loss.backward()
        self.reducer.wait()
        self.spans.update()
        gradients = []
        for weight in self.weights:
            assert weight.grad is not None  # else the reducer has raised
            # A server keeps gradients until an update takes them, and the next one of this learner
            # is written to the same memory of the reducer.
            gradients.append(weight.grad.clone())
        return gradients, loss.item()  # sync: the gradient is about to leave the device


def average_statistics(model: nn.Module, backend: Backend, *, learners: int) -> None:
    """Set the running statistics of every worker to their mean over the learners.

    The learners are the first workers. Running means move linearly, so after hardsync the result
    equals that of synchronous training, which moves towards the mean over the spans of all workers.
    """
    buffers = list(model.buffers())
    if not buffers:
        return
    counts = backend.rank < learners
    # One message for all buffers. Double, because counts of batches exceed what float32 has
    # exactly.
    flat = torch.cat([buffer.flatten().double() for buffer in buffers]) * counts / learners
    flat = flat.to(backend.device)
    backend.all_reduce(flat).wait()
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, parts, strict=True):
        exact = mean if buffer.is_floating_point() else mean.round()
        buffer.copy_(exact.view_as(buffer))
