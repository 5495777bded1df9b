"""What an update waited for, by clocks that only move where these tests let them."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from short_runs import DIGITS, plan_of_a_log
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from largebatch import load_recipe
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.errors import DivergedError
from largebatch.models.batchnorm import Spans
from largebatch.runs.state import build_step_log
from largebatch.tracking.events import Note, StepEvent, System
from largebatch.training import loop
from largebatch.training.loop import EagerStep, Stopwatch, Update, train
from largebatch.training.session import log_update
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
        step = EagerStep(
            model,
            SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(reduction="sum"),
            reducer,
            Spans(model, CPU),
            global_batch=accumulation,
        )
        steps = range(2)
        yield from train(
            step, batches(), lambda _: 0.1, steps=steps, accumulation=accumulation, seed=int
        )


def a_log(
    backend: Serial, emit: Callable[[StepEvent | System | Note], None] = lambda _: None
) -> tuple[StepLog, TrainState]:
    """Return a log and the state it counts in."""
    scaler, updater = GradScaler("cpu", enabled=False), cast("Any", None)
    state = TrainState(model=nn.Linear(1, 1), updater=updater, scaler=scaler, average=None)
    log = build_step_log(load_recipe(DIGITS), plan_of_a_log(), backend, state, emit=emit)
    return log, state


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_update_has_its_waits_for_images_and_for_gradients(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = updates_that_wait(Clock(monkeypatch), accumulation=accumulation)
    found = [(update.data.seconds(), update.reduction.seconds()) for update in updates]
    assert found == [(3.0 * accumulation, 7.0), (5.0 * accumulation, 7.0)]


def test_the_record_of_a_step_holds_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[StepEvent | System | Note] = []
    log, state = a_log(CPU, emit=events.append)
    for update in updates_that_wait(Clock(monkeypatch), accumulation=1):
        log_update("train", update, state, log)
    assert [
        (event.data_seconds, event.reduction_seconds)
        for event in events
        if isinstance(event, StepEvent)
    ] == [(3.0, 7.0), (5.0, 7.0)]


def test_the_long_wait_at_the_start_ends_with_the_first_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records: list[int] = []
    backend = Serial(torch.device("cpu"))
    log, state = a_log(backend)
    monkeypatch.setattr(backend, "started", lambda: records.append(state.progress.step))
    assert not records
    for update in updates_that_wait(Clock(monkeypatch), accumulation=1):
        log_update("train", update, state, log)
    assert records == [1, 2]


def test_a_log_that_stops_a_run_says_that_no_updates_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, state = a_log(CPU)
    first, _ = updates_that_wait(Clock(monkeypatch), accumulation=1)
    log.resume_clock()
    assert log.is_training
    with pytest.raises(DivergedError):
        log_update("train", first._replace(finite=torch.tensor(False)), state, log)
    assert not log.is_training


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
