"""What trackers plot: the numbers of a run's events by name, each given once over all its parts.

A resumed run makes some updates again, and one that is rolled back too. A tracker that keeps one
run for all parts would then have steps twice, or going back, which W&B drops with a warning; so
what was given before is not given again. What that was, the log of the run knows, or the tracker.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from largebatch.tracking.events import (
    CHECKPOINTS,
    METRICS,
    OVERVIEW,
    REPORT,
    SYSTEM,
    Decision,
    Drift,
    Evaluation,
    Event,
    GeneralizationGap,
    Start,
    Step,
    Summary,
    System,
)

MOST_WORKERS = 16
"""Of more workers trackers get the least, the mean and the most, instead of each."""

Plotted = Step | Evaluation | GeneralizationGap | Decision | Drift | System
"""What has numbers for them."""

_LOGGED = {"start", "step", "evaluation", "generalization_gap", "decision", "drift", "system"}
"""Their kinds in a log, and the one that begins a part of the run."""

_OF_A_STEP = (
    "loss lr images_per_second epoch data_seconds reduction_seconds noise_scale gradient_norm"
)


class Scalars:
    """The numbers of events, in order.

    Of a run that the tracker followed before, `log` is its log, or `given` what `last` was then.
    """

    def __init__(self, log: Path | None = None, *, given: Mapping[str, int] | None = None) -> None:
        self.last = dict(given or {})
        """The last step that was given, of every kind and stage."""

        self._layers: tuple[str, ...] = ()
        self.count = 0
        """How often something was given, plus one for every part of the run; it only rises."""

        for event, stage, step in _logged(log) if log is not None else ():
            self._is_new(event, stage, step)

    def take(self, event: Event) -> dict[str, float]:
        """Return the numbers of an event by name; none of one without, or of one given before."""
        if isinstance(event, Start):
            self._layers = event.layers or self._layers
            self._is_new("start", "", 0)
        if not isinstance(event, Plotted):
            return {}
        new = self._is_new(event.event, event.stage, event.step)
        return _numbers(event, self._layers) if new else {}

    def _is_new(self, event: str, stage: str, step: int) -> bool:
        if event != "start" and step <= self.last.get(f"{event}/{stage}", -1):
            return False
        self.last[f"{event}/{stage}"] = step
        self.count += 1
        return True


def _logged(log: Path) -> Iterator[tuple[str, str, int]]:
    """Yield kind, stage and step of what a log holds for trackers."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        for line in file:
            with suppress(ValueError):  # the end of what a killed run was writing
                found = json.loads(line)
                if found["event"] in _LOGGED:
                    yield found["event"], found.get("stage", ""), found.get("step", 0)


def _numbers(event: Plotted, layers: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of an event; those that were not measured are left out, but for a loss."""
    match event:
        case Step():
            values = _values("train", event, _OF_A_STEP.split())
            ratios = zip(layers, event.trust_ratios, strict=False)  # none where LARS made no update
            values |= {f"trust_ratio/{name.removesuffix('.weight')}": r for name, r in ratios}
        case Evaluation():
            values = _values("val", event, METRICS)
        case GeneralizationGap():
            values = {"generalization/gap": event.gap, "generalization/train_loss": event.loss}
            values["generalization/train_top1"] = event.top1
        case Decision():
            values = {"held_out/top1": event.after, "held_out/kept": float(event.kept)}
        case Drift():
            values = {
                f"drift/{layer.name}/{key}": getattr(layer, key)
                for layer in event.layers
                for key in ("mean_shift", "log_variance_ratio")
            }
        case System():
            columns = {name: _by_worker(getattr(event, name)) for name in SYSTEM}
            values = {f"system/{n}/{key}": v for n, each in columns.items() for key, v in each}
    return {k: v for k, v in values.items() if math.isfinite(v) or k.endswith("/loss")}


def _values(group: str, event: Step | Evaluation, keys: Iterable[str]) -> dict[str, float]:
    """Return the fields with these names, without those that are None."""
    values = {f"{group}/{key}": getattr(event, key) for key in keys}
    return {name: value for name, value in values.items() if value is not None}


def _by_worker(column: tuple[float, ...]) -> list[tuple[str, float]]:
    """Return what a number is called for each worker, or over all of them."""
    if len(column) <= MOST_WORKERS:
        return [(f"worker{rank}", value) for rank, value in enumerate(column)]
    return [("least", min(column)), ("mean", fmean(column)), ("most", max(column))]


def artifacts(folder: Path, summary: Summary, *, checkpoint: bool) -> dict[str, Path]:
    """Return the files of a run folder that trackers keep, by what they are.

    That is the report and, of a run that has finished and with `checkpoint`, its last checkpoint.
    """
    found = {"report": folder / REPORT, "overview": folder / OVERVIEW}
    saved = sorted((folder / CHECKPOINTS).glob("*.safetensors"))
    if checkpoint and saved and summary.status == "finished":
        found["checkpoint"] = saved[-1]
    return {name: path for name, path in found.items() if path.exists()}
