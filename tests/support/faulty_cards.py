"""Workers, some of whose cards compute wrong numbers, and a small problem for them.

A faulty card flips a bit in the result of an operation, below everything that could see it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from threads import Thread, on_threads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.models.batchnorm import Spans, with_span
from largebatch.recipe.execution import OnWrongCard
from largebatch.tracking.events import WrongCard
from largebatch.training.loop import EagerStep, train
from largebatch.training.replay import Replay

BIT = 1 << 20
"""The bit that is flipped: in float32 a change of 1/8."""

SAMPLES = 4
"""Samples of a micro-batch."""


def flip(tensor: Tensor, *, bit: int = BIT) -> None:
    """Flip a bit of the first element in its memory, which autograd and other modes do not see."""
    tensor.detach().numpy().reshape(-1).view("int32")[:1] ^= bit


class FaultyCard(TorchDispatchMode):
    """Flips a bit in a result of one operation of one layer, in the passes of `is_wrong`."""

    def __init__(
        self,
        operation: str,
        weight: Tensor,
        *,
        result: int = 0,
        is_wrong: Callable[[int], bool] = lambda _: True,
        bit: Callable[[], int] = lambda: BIT,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._operation = operation
        self._address = weight.data_ptr()
        self._result = result
        self._is_wrong = is_wrong
        self._bit = bit
        self.passes = 0
        """Number of times that the operation was computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 -- torch's
        results = func(*args, **(kwargs or {}))
        if func.name() != f"aten::{self._operation}":
            return results
        read = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        if self._address in {it.data_ptr() for it in read}:
            if self._is_wrong(self.passes):
                result = results if isinstance(results, Tensor) else results[self._result]
                flip(result, bit=self._bit())
            self.passes += 1
        return results


def network() -> nn.Sequential:
    """Return the network of all workers, with BatchNorm."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def samples(positions: range) -> Batch:
    """Return the samples at these positions: random numbers, a function of the position."""
    generator = torch.Generator()
    generator.manual_seed(positions.start)
    images = torch.randn(len(positions), 3, 8, 8, generator=generator)
    return Batch(images, torch.tensor([position % 5 for position in positions]))


@dataclass(kw_only=True)
class FakePipeline:
    """The samples of a worker; `damage` is done to all that it reads."""

    plan: Any
    damage: Callable[[Batch], None] = lambda _: None
    reads: int = 0

    def at(self, batches: list[range], *, clean: bool) -> Iterator[Batch]:
        """Yield a batch for each range of positions."""
        for positions in batches:
            self.reads += 1
            batch = samples(positions)
            self.damage(batch)
            yield batch


@dataclass(kw_only=True)
class FakeLog:
    """Keeps what would be logged."""

    events: list[WrongCard] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def emit(self, event: WrongCard) -> None:
        """Keep an event."""
        self.events.append(event)

    def note_once(self, _: str, text: str) -> None:
        """Keep a remark."""
        self.notes.append(text)


@dataclass(kw_only=True)
class Trained:
    """What is left of a worker's training."""

    weights: Tensor
    """Weights and running statistics, flat."""

    log: FakeLog
    passes: int
    """Forward passes of the model."""


@dataclass(kw_only=True)
class Worker:
    """A worker before its training, on which a test damages something."""

    model: nn.Sequential
    pipeline: FakePipeline
    cards: list[FaultyCard] = field(default_factory=list)


def trained(
    *,
    workers: int,
    updates: int,
    every: int | None = 1,
    accumulation: int = 1,
    sync: int = 1,
    action: OnWrongCard = "continue",
    damage: Callable[[int, Worker], None] = lambda *_: None,
) -> list[Trained]:
    """Train on threads, each a worker; `damage` may break the one of a rank."""

    def work(backend: Thread) -> Trained:
        def positions(step: int, micro: int, rank: int) -> range:
            start = SAMPLES * ((step * accumulation + micro) * workers + rank)
            return range(start, start + SAMPLES)

        plan = SimpleNamespace(sync_workers=sync, positions=positions)
        worker = Worker(model=models[backend.rank], pipeline=FakePipeline(plan=plan))
        damage(backend.rank, worker)
        model = worker.model
        batches = worker.pipeline.at(
            [
                positions(step, micro, backend.rank)
                for step in range(updates)
                for micro in range(accumulation)
            ],
            clean=False,
        )
        log = FakeLog()
        reducer = Reducer(model.named_parameters(), backend, divisor=1.0)
        step: Any = EagerStep(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            nn.CrossEntropyLoss(reduction="sum"),
            reducer,
            Spans(model, backend, sync_workers=sync),  # type: ignore[arg-type]  # in place of one
            global_batch=workers * accumulation * SAMPLES,
        )
        if every is not None:
            replay = Replay(
                every=every,
                action=action,
                pipeline=worker.pipeline,  # type: ignore[arg-type]  # in place of one
                backend=backend,  # type: ignore[arg-type]  # as above
                seed=0,
                precision=torch.float32,
                log=log,  # type: ignore[arg-type]  # as above
            )
            step = replay.checked(step, stage="train", steps=range(updates), clean=False)
        with ExitStack() as cards:
            for card in worker.cards:
                cards.enter_context(card)
            for _ in train(
                step,
                batches,
                lambda _: 0.1,
                steps=range(updates),
                accumulation=accumulation,
                seed=lambda number: number,
            ):
                pass
        state = [tensor.double().reshape(-1) for tensor in model.state_dict().values()]
        return Trained(weights=torch.cat(state), log=log, passes=worker.pipeline.reads)

    models = [with_span(network(), SAMPLES * sync) for _ in range(workers)]
    return on_threads(work, workers=workers)
