"""Progress on a terminal: a live bar, or plain lines without a terminal."""

import math
import os
import sys
import time
from collections import deque
from datetime import timedelta
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from largebatch.formatting import three_digits
from largebatch.tracking.events import (
    Decision,
    Evaluation,
    Event,
    Finish,
    GeneralizationGap,
    Note,
    Start,
    Step,
    Summary,
)

LINE_SECONDS = 5.0
"""Seconds between lines on training, without a terminal."""

TIMED_UPDATES = 100
"""Updates whose mean length predicts the time left: that of one update may be far off."""


class _Screen(RichConsole):
    def on_broken_pipe(self) -> None:
        """Stop showing output if nobody reads it, as after `| head`; the run continues."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


class Console:
    """A Tracker that shows samples/s, loss, learning rate, time left, and every evaluation.

    `started` is the start of the command, in seconds since 1970.
    """

    def __init__(self, stream: TextIO | None = None, *, started: float | None = None) -> None:
        self._started = started
        self._console = _Screen(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._bar_task: Any = None
        self._steps = 0
        self._resumed = False
        self._last_line = -LINE_SECONDS
        self._recent: deque[float] = deque(maxlen=TIMED_UPDATES)

    def record(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Start():
                self._start(event)
            case Step():
                self._show_step(event)
            case Evaluation():
                self._console.print(
                    f"{event.stage:>10}  epoch {event.epoch:6.2f}  "
                    f"top-1 {event.top1:7.2%}  top-5 {event.top5:7.2%}  val loss {event.loss:.4f}"
                )
            case GeneralizationGap():
                self._console.print(
                    f"{event.stage:>10}  training images  top-1 {event.top1:7.2%}  "
                    f"loss {event.loss:.4f}  generalization gap {event.gap:+.4f}"
                )
            case Note():
                self._console.print(f"{event.stage:>10}  {event.text}", markup=False)
            case Decision():
                self._console.print(
                    f"{event.stage:>10}  {'kept' if event.kept else 'rolled back'}: top-1 "
                    f"{event.before:.2%} -> {event.after:.2%} on {event.samples:,} "
                    f"training images held out"
                )
            case Finish():
                self._finish(event.summary)

    def _start(self, event: Start) -> None:
        plan, step = event.plan, event.resume_step
        affine, unusable = plan.affine_steps, event.unusable_images
        self._steps = plan.updates
        steps = f"{plan.steps} " + (f"and {affine} more " if affine else "") + "steps"
        division = f"{plan.workers} workers x {plan.accumulation} x {plan.device_batch}"
        work = (
            f"{steps} of {plan.global_batch} samples = {division}, "
            f"{plan.steps_per_epoch:.2f} steps an epoch"
        ) + "".join(
            f"; {change.global_batch} samples from step {change.step}"
            for change in plan.batch_changes
        )
        samples = plan.workers * plan.accumulation * plan.device_batch
        trains = step < plan.updates and samples == plan.global_batch
        self._resumed = step > 0 and trains
        if not trains:  # but polishes, on any number of workers
            work = f"after {step} of {steps} of {plan.global_batch} samples"
        self._console.print(
            f"[bold]{event.recipe}[/]: {work}"
            + (f"; {unusable} unusable images left out" if unusable else "")
            + (f"; resumed at step {step}" if self._resumed else "")
        )
        if self._console.is_terminal:
            self._stop_bar()  # of a start before a return to a checkpoint
            self._bar = Progress(
                TextColumn("{task.description:>10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar_task = self._bar.add_task(
                "train", total=self._steps, completed=step, numbers=""
            )
            self._bar.start()

    def _finish(self, summary: Summary) -> None:
        self._stop_bar()
        skipped = summary.skipped_steps
        end = "paused at --max-steps" if summary.status == "paused" else summary.status
        self._console.print(
            f"{end} after {summary.seconds:.1f} s"
            + " in all parts of the run" * self._resumed
            + self._of_command()
            + (f"; updates skipped because gradients were not finite: {skipped}" if skipped else "")
            + "".join(f"; {remark}" for remark in summary.remarks)
        )

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _of_command(self) -> str:
        if self._started is None:
            return ""
        return f" (this command: {time.time() - self._started:.1f} s, with its start)"

    def _show_step(self, event: Step) -> None:
        done = event.step + 1
        self._recent.append(event.step_seconds)
        numbers = (
            f"loss {event.loss:.4f}  lr {event.lr:.4g}  "
            f"{three_digits(event.images_per_second)} samples/s"
        )
        if self._bar is not None:
            self._bar.update(
                self._bar_task, completed=done, description=event.stage, numbers=numbers
            )
        elif time.monotonic() - self._last_line >= LINE_SECONDS or done == self._steps:
            self._last_line = time.monotonic()
            seconds = (self._steps - done) * fmean(self._recent)
            left = timedelta(seconds=round(seconds)) if math.isfinite(seconds) else "unknown time"
            self._console.print(
                f"{event.stage:>10}  step {done}/{self._steps}  {numbers}  {left} left"
            )
