"""Progress for a person: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 5.0
"""Where there is no terminal, a line about training appears at most this often."""


class Console:
    """A Tracker that shows samples/s, loss, rate and time left, and every evaluation."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._steps = 0
        self._last_line = -LINE_SECONDS

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Say what is about to run."""
        plan: Any = config["plan"]
        affine = plan.get("affine_steps", 0)
        self._steps = plan["steps"] + affine
        self._console.print(
            f"[bold]{config['name']}[/]: {plan['steps']} "
            + (f"and {affine} more " if affine else "")
            + f"steps of {plan['global_batch']} samples = "
            f"{plan['workers']} workers x {plan['accumulation']} x {plan['device_batch']}, "
            f"{plan['steps_per_epoch']:.2f} steps an epoch"
            + (f"; {config['left_out']} bad pictures left out" if "left_out" in config else "")
            + (f"; resumed at step {resume_step}" if resume_step else "")
        )
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:>10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(
                "train", total=self._steps, completed=resume_step, numbers=""
            )
            self._bar.start()

    def record(self, record: Mapping[str, object]) -> None:
        """Show one record."""
        fields: Any = record
        if record["event"] == "step":
            self._show_step(fields)
        elif record["event"] == "evaluation":
            self._console.print(
                f"{fields['stage']:>10}  epoch {fields['epoch']:6.2f}  "
                f"top-1 {fields['top1']:7.2%}  top-5 {fields['top5']:7.2%}  "
                f"val loss {fields['loss']:.4f}"
            )
        elif record["event"] == "note":
            self._console.print(f"{fields['stage']:>10}  {fields['text']}", markup=False)
        elif record["event"] == "decision":
            self._console.print(
                f"{fields['stage']:>10}  {'kept' if fields['kept'] else 'discarded'}: top-1 "
                f"{fields['before']:.2%} -> {fields['after']:.2%} on {fields['samples']:,} "
                "training pictures held out"
            )

    def finish(self, summary: Mapping[str, object]) -> None:
        """Stop the bar and say how the run ended."""
        if self._bar is not None:
            self._bar.stop()
        seconds: Any = summary["seconds"]
        skipped = summary["skipped_steps"]
        self._console.print(
            f"{summary['status']} after {seconds:.1f} s"
            + (f"; updates skipped because fp16 overflowed: {skipped}" if skipped else "")
        )

    def _show_step(self, fields: Mapping[str, Any]) -> None:
        done = fields["step"] + 1
        numbers = (
            f"loss {fields['loss']:.4f}  rate {fields['lr']:.4g}  "
            f"{_three_digits(fields['images_per_second'])} samples/s"
        )
        if self._bar is not None:
            self._bar.update(
                self._task, completed=done, description=fields["stage"], numbers=numbers
            )
        elif time.monotonic() - self._last_line >= LINE_SECONDS or done == self._steps:
            self._last_line = time.monotonic()
            left = timedelta(seconds=round((self._steps - done) * fields["step_seconds"]))
            self._console.print(
                f"{fields['stage']:>10}  step {done}/{self._steps}  {numbers}  {left} left"
            )


def _three_digits(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
