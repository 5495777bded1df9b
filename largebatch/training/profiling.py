"""A profile of a few updates: the time of each operation on the host and on the device."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import profile

from largebatch.tracking.events import Event, Operation, Profile, StageName
from largebatch.training.loop import Update

_MOST_OPERATIONS = 15
"""Number of operations in a profile; the trace has all."""


@dataclass(slots=True)
class Profiler:
    """Profiles the updates `first` to `last`, counted from 1; both are included."""

    first: int
    last: int
    trace: Path
    """File for PyTorch's trace, which chrome://tracing and ui.perfetto.dev show."""

    emit: Callable[[Event], None]
    resume_clock: Callable[[], None]
    """Called after the profiler's own work, which is no part of an update."""

    done: bool = False

    def follow(
        self, updates: Generator[Update, None, None], *, stage: StageName, made: int
    ) -> Generator[Update, None, None]:
        """Yield the updates after the first `made`, and profile the chosen ones.

        Work between two of them, such as an evaluation, is part of the profile.
        """
        running: _Running | None = None
        with closing(updates):
            try:
                while True:
                    if running is None and self._includes(made + 1):
                        running = _Running(stage, made)
                        self.resume_clock()
                    update = next(updates, None)
                    if update is None:
                        return
                    made += 1
                    if running is not None:
                        running.made = made
                        if made >= self.last:
                            update.loss.clone().item()  # sync: behind all that the device has to do
                            running.stop()  # before an evaluation
                    yield update
                    if running is not None and made >= self.last:
                        self._write(running)
                        running = None
            finally:
                if running is not None:  # the stage ended, or the run was stopped
                    self._write(running)

    def _includes(self, number: int) -> bool:
        return not self.done and self.first <= number <= self.last

    def _write(self, running: "_Running") -> None:
        self.done = True
        running.stop()
        if running.made == running.before:
            return
        running.profile.export_chrome_trace(str(self.trace))
        operations = sorted(_operations(running.profile), key=_time, reverse=True)
        self.emit(
            Profile(
                stage=running.stage,
                step=running.made,
                first=running.before + 1,
                seconds=running.seconds,
                host_seconds=sum(each.host_seconds for each in operations),
                device_seconds=sum(each.device_seconds for each in operations),
                operations=tuple(operations[:_MOST_OPERATIONS]),
            )
        )
        self.resume_clock()


class _Running:
    """A profile that started after `before` updates; `made` updates have been made."""

    def __init__(self, stage: StageName, before: int) -> None:
        self.stage, self.before, self.made = stage, before, before
        self.profile = profile(acc_events=True)
        self.profile.start()
        self._begun = time.perf_counter()
        self.seconds = 0.0

    def stop(self) -> None:
        """Stop the profile, unless it has stopped."""
        if not self.seconds:
            self.seconds = time.perf_counter() - self._begun
            self.profile.stop()


def _operations(found: Any) -> Iterable[Operation]:  # noqa: ANN401 -- torch's, untyped
    """Yield the time of every operation without the operations that it called."""
    for each in found.key_averages():
        if each.device_type.name == "CPU":  # others are kernels, which their callers have
            yield Operation(
                name=each.key,
                calls=each.count,
                host_seconds=each.self_cpu_time_total / 1e6,
                device_seconds=each.self_device_time_total / 1e6,
            )


def _time(operation: Operation) -> float:
    return max(operation.host_seconds, operation.device_seconds)
