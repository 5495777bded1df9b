"""The task of a run: its nouns and its metrics, for the console, the log, the report, comparisons.

Every task predicts one of K classes for each label; a sample has one label or several. The loss is
the cross-entropy for all tasks, `evaluate` counts the same numbers, and a `Metric` is a function of
them. The task of images and their classes is here. To add another, write one more `Task` beside the
section of its data, enter it in `TASKS` (keys.py), and open its samples in `runs/build.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Scores(Protocol):
    """The numbers that every evaluation has, in memory and in the log."""

    @property
    def top1(self) -> float:
        """Share of the labels that have the highest score, 0 .. 1."""

    @property
    def top5(self) -> float:
        """Share of the labels that are among the five highest scores, 0 .. 1."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""


class Sample(NamedTuple):
    """The shapes of one sample, as a model sees it."""

    name: str
    """The samples in words, such as "images of 224 x 224"."""

    shape: tuple[int, ...]
    labels: tuple[int, ...] = ()
    """Shape of the labels; empty: one label."""

    limit: int | None = None
    """The inputs are whole numbers below this; None: they are real numbers."""

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return math.prod(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that an evaluation gives, and its words."""

    key: str
    """Name in the log, the trackers (after `val/`), of the chart and its file."""

    name: str
    """Name in a line of text."""

    title: str
    """Name above its value."""

    column: str
    """Header in a table of stages."""

    value: Callable[[Scores], float]
    unit: str = ""
    """Unit of the shown value; where it is "%", `value` is a part of 1."""

    lower_is_better: bool = False
    note: str = "{when}"
    """Text under its value, with {when} and {labels}, such as "93 validation words"."""

    caption: str = ""
    """Caption of its chart, with {labels}, such as "93 words"."""

    is_recorded: bool = False
    """True if Evaluation, StageResult and Summary have a field named `key` for it, which trackers
    follow. The others are computed where they are shown."""

    def shown(self, found: Scores) -> float:
        """Return the value in its unit."""
        return self.value(found) * (100 if self.unit == "%" else 1)

    def text(self, found: Scores) -> str:
        """Return the value as it is written, without its unit."""
        return f"{self.shown(found):.2f}"

    def is_better(self, value: float, other: float) -> bool:
        """Return True if `value` is better than `other`."""
        return value < other if self.lower_is_better else value > other


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The nouns, plurals, and metrics of what a run learns."""

    data: str
    """Noun of a split, as in "training images"."""

    samples: str
    """Noun of what is ordered, batched and counted in a second."""

    labelled: str
    """Noun of what has a label of its own; evaluations count these."""

    classes: str
    """Noun of what is chosen from."""

    metrics: tuple[Metric, ...]
    """The first one judges runs."""

    fit: float
    """Share of the loss of guessing below which the training loss of a good run ends."""

    loss_note: str
    """Remark on the training loss and the validation loss in one chart."""

    input_settings: str = ""
    """Settings to change if updates wait for samples."""

    @property
    def metric(self) -> Metric:
        """The metric that judges runs."""
        return self.metrics[0]

    @property
    def by_accuracy(self) -> bool:
        """True if top-1 judges runs: changes are then counted in samples and have a noise."""
        return self.metric is TOP1

    def line(self, found: Scores) -> str:
        """Return an evaluation as a line of the console."""
        own = f"{self.metric.name} {self.metric.text(found)}{self.metric.unit}  "
        accuracies = f"top-1 {found.top1:7.2%}  top-5 {found.top5:7.2%}"
        return accuracies if self.by_accuracy else own + accuracies

    def recorded(self, found: Scores) -> dict[str, Any]:
        """Return what the log and the summary have beside top1, top5 and loss, by key."""
        return {each.key: each.value(found) for each in self.metrics if each.is_recorded}


TOP1 = Metric(
    key="top1",
    name="top-1",
    title="Top-1 accuracy",
    column="Top-1",
    value=lambda found: found.top1,
    unit="%",
)
TOP5 = Metric(
    key="top5",
    name="top-5",
    title="Top-5 accuracy",
    column="Top-5",
    value=lambda found: found.top5,
    unit="%",
)

IMAGES = Task(
    data="images",
    samples="images",
    labelled="images",
    classes="classes",
    metrics=(TOP1, TOP5),
    fit=0.5,  # above what label smoothing alone leaves; random crops leave more
    loss_note="The two losses need not meet: only training images are augmented, and only the "
    "training loss may be label-smoothed.",
    input_settings="execution.cache and execution.decoder",
)
