"""Progress on a terminal: a line every few seconds, and one for every evaluation.

In a notebook the line of training is one bar that moves.
"""

import math
import os
import sys
import time
from collections import deque
from datetime import timedelta
from statistics import fmean
from typing import TextIO

from largebatch.formatting import TOP5, duration, four_decimals, plural, three_digits
from largebatch.recipe.arithmetic.plan import describe_division
from largebatch.tracking.events import (
    Decision,
    EvaluationEvent,
    Event,
    Finish,
    GeneralizationGap,
    Note,
    Start,
    StepEvent,
    WrongCard,
)

LINE_SECONDS = 5.0  # seconds between lines on training
BAR_SECONDS = 0.5  # seconds between moves of the bar in a notebook
TIMED_UPDATES = 100  # whose mean length predicts the time left: that of one update may be far off


class Console:
    """A Tracker that shows samples/s, loss, learning rate, time left, and every evaluation."""

    def __init__(self, stream: TextIO | None = None, *, classes: int | None = None) -> None:
        self._shows_top5 = classes is None or classes > TOP5
        self._stream = stream or sys.stdout  # None if the process has no output
        self._steps = 0
        self._resumed = False
        self._is_notebook = "JPY_PARENT_PID" in os.environ  # local workers inherit it
        self._bar = ""
        self._last_line = -LINE_SECONDS
        self._recent: deque[float] = deque(maxlen=TIMED_UPDATES)

    def record(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Start():
                self._show_start(event)
            case StepEvent():
                self._show_step(event)
            case EvaluationEvent():
                top5 = f"  top-5 {event.top5:7.2%}" if self._shows_top5 else ""
                balanced = ""
                if event.balanced_top1 is not None:
                    balanced = f"mean of classes {event.balanced_top1:7.2%}  "
                self._show(
                    f"{event.stage:>10}  epoch {event.epoch:6.2f}  top-1 {event.top1:7.2%}{top5}  "
                    f"{balanced}val loss {four_decimals(event.loss)}"
                )
            case GeneralizationGap():
                self._show(
                    f"{event.stage:>10}  training images  top-1 {event.top1:7.2%}  "
                    f"loss {four_decimals(event.loss)}  generalization gap "
                    f"{four_decimals(event.gap, sign=True)}"
                )
            case Note() | WrongCard():
                self._show(f"{event.stage:>10}  {event.text}")
            case Decision():
                self._show(
                    f"{event.stage:>10}  {'kept' if event.kept else 'rolled back'}: top-1 "
                    f"{event.before:.2%} -> {event.after:.2%} on {event.samples:,} "
                    "training images held out"
                )
            case Finish():
                summary = event.summary
                words = " in all parts of the run" * self._resumed
                if summary.skipped_steps:
                    words += "; updates skipped because gradients were not finite: "
                    words += f"{summary.skipped_steps}"
                if summary.reason:
                    words += f": {summary.reason}"
                self._show(f"{summary.status} after {duration(summary.seconds)} of training{words}")

    def _show(self, line: str, *, bar: str = "") -> None:
        """Write a line; one with a bar replaces the one before, and stays open."""
        # A bar ends without a line break, so that the next one replaces it; anything else begins a
        # line. Blanks cover the rest of a longer bar.
        text = f"{line}\n"
        if self._is_notebook and bar:
            text = f"\r{bar} {line.strip()}".ljust(len(self._bar))
        elif self._bar:
            text = f"\n{text}"
        self._bar = text if text.startswith("\r") else ""
        try:
            write_to(self._stream, text)
        except BrokenPipeError:  # nobody reads it, as after `| head`; the run continues
            assert self._stream is not None
            # Not the stream alone: Python would write to the pipe again as it exits, and fail.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def _show_start(self, event: Start) -> None:
        plan = event.plan
        step = event.resume_step
        self._steps = plan.updates
        more = f" and {plan.affine_steps:,} more" if plan.affine_steps else ""
        per_epoch = f"{plan.steps_per_epoch:.2f} steps an epoch"
        steps = plural(plan.steps, "step")
        work = f"{steps}{more} of {describe_division(plan)} samples, {per_epoch}"
        for change in plan.batch_changes:
            work += f"; {plural(change.global_batch, 'sample')} from step {change.step}"
        samples = plan.workers * plan.accumulation * plan.device_batch
        trains = step < plan.updates and samples == plan.global_batch
        self._resumed = step > 0 and trains
        if self._resumed:
            work += f"; resumed at step {step}"
        if not trains:  # but polishes, on any number of workers
            work = f"after {step} of {plan.steps} steps of {plan.global_batch} samples"
        self._show(f"{event.recipe}: {work}")

    def _show_step(self, event: StepEvent) -> None:
        done = event.step + 1
        self._recent.append(event.step_seconds)
        every = BAR_SECONDS if self._is_notebook else LINE_SECONDS
        if time.monotonic() - self._last_line < every and done != self._steps:
            return
        self._last_line = time.monotonic()
        # Updates only: evaluations and stages after them come on top.
        seconds = (self._steps - done) * fmean(self._recent)
        left = timedelta(seconds=round(seconds)) if math.isfinite(seconds) else "unknown time"
        loss = "loss (mixed)" if event.mixed else "loss"
        self._show(
            f"{event.stage:>10}  step {done}/{self._steps}  {loss} {four_decimals(event.loss)}  "
            f"lr {event.lr:.4g}  {three_digits(event.images_per_second)} samples/s  {left} left",
            bar="█" * (20 * done // self._steps) + "░" * (20 - 20 * done // self._steps),
        )


def write_to(stream: TextIO | None, text: str) -> None:
    """Write a text to a stream, if there is one; escape what its encoding lacks."""
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
