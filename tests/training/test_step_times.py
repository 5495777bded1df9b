"""What an update waited for, by clocks that only move where these tests let them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from short_runs import DIGITS
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from largebatch import load_recipe
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.models.batchnorm import Spans
from largebatch.tracking.events import Note, Step, System
from largebatch.training import loop
from largebatch.training.loop import Stopwatch, Update, train
from largebatch.training.state import TrainState
from largebatch.training.step_log import StepLog

CPU = Serial(torch.device("cpu"))


class Clock:
    """A time that passes only when it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e6
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.now))


def updates_that_wait(clock: Clock, *, accumulation: int) -> Iterator[Update]:
    """Two updates: a batch takes 3 s and 5 s, a forward pass 100 s, the sums 7 s."""
    model = nn.Linear(2, 3)

    def batches() -> Iterator[Batch]:
        for step in range(2):
            for _ in range(accumulation):
                clock.now += 3 + 2 * step
                yield Batch(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))

    class Slow(Reducer):
        def wait(self) -> None:
            clock.now += 7
            super().wait()

    def passed(*_: object) -> None:
        clock.now += 100

    model.register_forward_hook(passed)
    with Slow(model.named_parameters(), CPU) as reducer:
        yield from train(
            model, SGD(model.parameters(), lr=0.1), batches(), lambda _: 0.1,
            nn.CrossEntropyLoss(reduction="sum"), reducer, Spans(model, CPU),
            GradScaler("cpu", enabled=False), steps=range(2), accumulation=accumulation,
            global_batch=accumulation, seed=lambda step: step,
        )  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_update_knows_what_it_waited_for_images_and_for_gradients(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = updates_that_wait(Clock(monkeypatch), accumulation=accumulation)
    found = [(update.data.seconds(), update.reduction.seconds()) for update in updates]
    assert found == [(3.0 * accumulation, 7.0), (5.0 * accumulation, 7.0)]


def test_the_record_of_a_step_holds_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Step | System | Note] = []
    scaler, updater = GradScaler("cpu", enabled=False), cast("Any", None)
    state = TrainState(model=nn.Linear(1, 1), updater=updater, scaler=scaler, average=None)
    plan: Any = SimpleNamespace(batch_at=lambda _: 8, epoch=lambda step: step / 10, updates=99)
    recipe = load_recipe(DIGITS)
    log = StepLog(recipe, plan, CPU, state, emit=events.append, wants_stop=lambda: False)
    for update in updates_that_wait(Clock(monkeypatch), accumulation=1):
        log.add("train", update)
    assert [
        (event.data_seconds, event.reduction_seconds) for event in events if isinstance(event, Step)
    ] == [(3.0, 7.0), (5.0, 7.0)]


class Stream:
    """A GPU whose events get their time when it comes by, in milliseconds; none may be awaited."""

    def __init__(self) -> None:
        self.left: list[Stream.Event] = []

    class Event:
        def __init__(self, stream: "Stream") -> None:
            self.stream, self.at = stream, -1.0

        def record(self) -> None:
            self.stream.left.append(self)

        def elapsed_time(self, end: "Stream.Event") -> float:
            assert min(self.at, end.at) >= 0, "the GPU has not come by"
            return end.at - self.at

    def pass_by(self, *times: float) -> None:
        for event, at in zip(self.left, times, strict=True):
            event.at = at


def test_a_gpu_is_timed_by_events_in_its_stream_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stood still from 20 to 50 ms; in the second block the host waited for an idle moment."""
    stream = Stream()

    def event(_: torch.device, *, enable_timing: bool) -> Stream.Event:
        assert enable_timing
        return Stream.Event(stream)

    monkeypatch.setattr(torch, "Event", event)
    stopwatch = Stopwatch(torch.device("cuda"))
    for _ in range(2):
        with stopwatch:
            pass
    stream.pass_by(20.0, 50.0, 90.0, 90.0)
    assert stopwatch.seconds() == 0.030
