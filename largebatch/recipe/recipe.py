"""The recipe: one YAML file that describes a training run completely.

A recipe states the mathematics of an experiment. What only makes a machine fast stands apart, in
`execution`; how many workers there are and where the data lies is given on the command line, and
none of it can change the result. Every section is frozen and strict; an unknown key is an error.
What decides the result has no default, except where the literature agrees on one.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from largebatch.errors import RecipeError
from largebatch.recipe.choices import Monitor, OffTarget, Precision, TrackerName
from largebatch.recipe.model import Model
from largebatch.recipe.optimizers import LAMB, LARS, SGD, ScheduleFree, Shampoo
from largebatch.recipe.protocols import Protocol, require_fit
from largebatch.recipe.reduction import Reduction
from largebatch.recipe.schedule import Schedule
from largebatch.recipe.sections import (
    MAX_BATCH,
    MAX_EPOCHS,
    Batch,
    Data,
    Duration,
    Execution,
    Polish,
    Positive,
    Section,
    Updates,
)
from largebatch.recipe.task import IMAGES, Task
from largebatch.recipe.text import TEXT, Text, misfits

TASKS: dict[str, Task] = {"text": TEXT}
"""The tasks by `data.source`; all other sources have IMAGES."""


class Loss(Section):
    """Cross-entropy over the classes."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability mass taken from the labelled class (arXiv:1512.00567, section 7)."""

    off_target: OffTarget = "all"
    """Who shares that mass. `all`: every class, the labelled one too (PyTorch, TensorFlow).
    `others`: only the other classes (MXNet)."""


class BatchChange(Section):
    """From here on, updates take another number of samples (arXiv:1811.05233)."""

    after: Duration
    """Where, counted from the start of the run. Epochs are rounded to whole updates of the batch
    before, so that no sample is left out or shown twice."""

    global_batch: Batch
    """Samples in one optimizer update."""

    lr_factor: Positive
    """The learning rate is that of `schedule` times this: 1 leaves it as it is, global_batch over
    batch.global_batch scales it linearly (arXiv:1706.02677, section 2.1). Momentum is carried
    on."""


class BatchSizes(Section):
    """How many samples act together."""

    global_batch: Batch
    """Samples in one optimizer update, over all workers and accumulation."""

    bn_span: Annotated[int, Field(ge=2, le=MAX_BATCH)] | None
    """Samples that share BatchNorm statistics; null for a model without BatchNorm."""

    schedule: Annotated[tuple[BatchChange, ...], Field(max_length=100)] = ()
    """Changes of the global batch during the run, one after the other. Epochs are passes over the
    data whatever the batch. `schedule` follows the samples seen: there a step is as many samples as
    batch.global_batch, at which the run begins."""

    @property
    def last(self) -> int:
        """The global batch with which the run ends."""
        return self.schedule[-1].global_batch if self.schedule else self.global_batch

    @property
    def by_key(self) -> dict[str, int]:
        """Every global batch by its key, in order."""
        later = {
            f"batch.schedule.{place}.global_batch": change.global_batch
            for place, change in enumerate(self.schedule)
        }
        return {"batch.global_batch": self.global_batch, **later}

    @model_validator(mode="after")
    def _spans_fill_the_batch(self) -> Self:
        for key, batch in self.by_key.items():
            if self.bn_span is not None and batch % self.bn_span:
                name = key.removeprefix("batch.")
                raise ValueError(
                    f"{name} ({batch}) must be a multiple of bn_span ({self.bn_span}); "
                    f"{self._what_fits(batch, self.bn_span)}"
                )
        return self

    def _what_fits(self, batch: int, span: int) -> str:
        """Return words on a span that is little below this one, or else on the nearest batch."""
        for smaller in range(span - 1, max(1, (span - 1) // 2), -1):
            if not any(each % smaller for each in self.by_key.values()):
                return f"bn_span: {smaller} divides it"
        return f"the nearest one is {max(1, round(batch / span)) * span}"


class NonFinite(Section):
    """What follows a loss or a gradient that is infinite or no number, on any worker."""

    action: Literal["stop", "skip", "roll_back"] = "stop"
    """`stop`: the run ends with its last checkpoint. `skip`: the update is not made, which costs a
    GPU a wait for every update. `roll_back`: the updates since the last checkpoint are computed
    again, in case a machine failed; the run stops if that ends in the same step."""

    most: Updates = 10
    """Updates in a row that may be skipped, or times that a run may roll back, before it stops."""


class Evaluation(Section):
    """When validation accuracy is measured, besides at the end of every stage."""

    every_epochs: Annotated[float, Field(gt=0, le=MAX_EPOCHS)] | None = None
    """Passes over the training data between measurements; null: only at the end of a stage."""

    offset_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0.0
    """Shifts the measurements; MLPerf allows every 4 epochs at an offset of 0 to 3."""

    @model_validator(mode="after")
    def _offset_is_used(self) -> Self:
        if self.every_epochs is None and self.offset_epochs:
            raise ValueError("offset_epochs shifts every_epochs: give that too")
        return self


class Recipe(Section):
    """One training run, complete: the file is the experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names run folders, with the time, and W&B runs; file systems allow 255 characters."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Fixes the weights at the start, the order of the samples, crops, flips and dropout."""

    duration: Duration
    """How long to train, clean epochs included."""

    data: Annotated[Data | Text, Field(discriminator="source")]
    model: Model
    batch: BatchSizes
    optimizer: Annotated[LARS | SGD | Shampoo | ScheduleFree | LAMB, Field(discriminator="kind")]
    schedule: Schedule
    loss: Loss = Loss()
    precision: Precision = "fp32"
    """Arithmetic of the forward and backward pass; weights and updates are always fp32. fp16 scales
    the loss and skips updates whose gradients overflow."""

    reduction: Reduction = Reduction()
    protocol: Protocol | None = None
    """Who waits for whom, over parameter servers; null: every worker for all, in every update."""

    execution: Execution = Execution()
    polish: Polish | None = None
    evaluation: Evaluation = Evaluation()
    nonfinite: NonFinite = NonFinite()
    tracking: tuple[TrackerName, ...] = ()
    """What follows the run, besides the console and log.jsonl. `wandb`: Weights & Biases.
    `tensorboard`: event files in the run folder. `mlflow`: MLFLOW_TRACKING_URI. They get the report
    at the end, and the last checkpoint with execution.checkpoints.upload. `mlperf`: mlperf.log, as
    MLPerf's rules ask for it, for `largebatch referee`."""

    monitor: tuple[Monitor, ...] = ()
    """What is measured besides, for the report and the trackers. `noise_scale`: the gradient noise
    scale tr(Sigma)/|G|^2 in samples (arXiv:1812.06162), from gradients before and after their sum;
    it needs a device batch of whole BatchNorm spans that is smaller than the global batch.
    `gradient_norm`: the length of the gradient that every update is made from. `trust_ratios`: what
    LARS multiplied the step of each layer by. `system`: processor, memory, disk, network and GPU of
    every worker, 200 times in a run. `generalization_gap`: at the end of every stage the loss on
    all images trained on, shown as validation images are, and the validation loss minus it; one
    forward pass over them."""

    @field_validator("monitor", "tracking", mode="before")
    @classmethod
    def _one_word_is_a_list(cls, value: object) -> object:
        words = [value] if isinstance(value, str) else value
        return tuple(words) if isinstance(words, list) else words

    @property
    def mathematics(self) -> Self:
        """The recipe without execution, trackers and monitors: what all parts of a run share."""
        return self.model_copy(update={"execution": Execution(), "tracking": (), "monitor": ()})

    def with_execution(self, **changes: object) -> Self:
        """Return the recipe with other settings of `execution`, such as device_batch=64.

        Raises pydantic.ValidationError, a ValueError, for what that section does not allow.
        """
        changed = self.model_dump() | {"execution": {**self.execution.model_dump(), **changes}}
        return self.model_validate(changed)

    @property
    def images(self) -> Data:
        """The section of the images; RecipeError where the data is something else."""
        if not isinstance(self.data, Data):
            source, samples = self.data.source, self.data.sample().name
            raise RecipeError(f"data.source: {source}: {self.name} has {samples}, no images")
        return self.data

    @property
    def task(self) -> Task:
        """The words and metrics of the data."""
        return TASKS.get(self.data.source, IMAGES)

    @property
    def train_samples(self) -> int:
        """Training images that are trained on: all but those held out."""
        held_out = self.polish.held_out if self.polish else None
        return self.data.train_split - (held_out or 0)

    @model_validator(mode="after")
    def _settings_go_with_the_data(self) -> Self:
        if found := list(misfits(self)):
            raise ValueError("; ".join(found))
        return self

    @model_validator(mode="after")
    def _some_images_are_trained_on(self) -> Self:
        if self.data.train_split < 1:
            raise ValueError(
                f"data.held_out.samples ({self.data.val_split}) must be fewer than "
                f"data.train_samples ({self.data.train_samples})"
            )
        return self

    @model_validator(mode="after")
    def _the_protocol_fits(self) -> Self:
        if self.protocol is not None:
            require_fit(self)
        return self

    @model_validator(mode="after")
    def _plateaus_can_be_seen(self) -> Self:
        if self.schedule.plateau is not None and self.evaluation.every_epochs is None:
            raise ValueError(
                "schedule.plateau reads the evaluations on the way: give evaluation.every_epochs"
            )
        return self

    @model_validator(mode="after")
    def _polishing_fits_the_data(self) -> Self:
        if self.polish is None:
            return self
        if self.train_samples < 1:
            raise ValueError(
                f"polish.held_out ({self.polish.held_out}) must be fewer than data.train_samples"
                f"{' less data.held_out' if self.data.held_out else ''} ({self.data.train_split})"
            )
        if self.batch.bn_span is None:
            raise ValueError("polish is for models with BatchNorm: give batch.bn_span too")
        swap = self.polish.swap
        if swap is not None and swap.batch % self.batch.bn_span:
            raise ValueError(
                f"polish.swap.batch ({swap.batch}) must be a multiple of batch.bn_span "
                f"({self.batch.bn_span}), the samples that share BatchNorm statistics"
            )
        statistics = self.polish.statistics
        if statistics is not None and statistics.samples > self.train_samples:
            left = " less data.held_out" if self.data.held_out else ""
            left += " less polish.held_out" if self.polish.held_out else ""
            raise ValueError(
                f"polish.statistics.samples ({statistics.samples}) must not exceed "
                f"data.train_samples{left} ({self.train_samples})"
            )
        return self

    @model_validator(mode="after")
    def _the_average_is_free_of_other_ones(self) -> Self:
        if not isinstance(self.optimizer, ScheduleFree):
            return self
        if self.schedule.decay.kind not in {"constant", "fix"}:
            raise ValueError(
                "optimizer.kind: schedule-free averages its weights instead of lowering the rate; "
                f"schedule.decay must be {{kind: constant}}, got {self.schedule.decay.kind}"
            )
        if self.schedule.plateau is not None:
            raise ValueError(
                "optimizer.kind: schedule-free averages its weights instead of lowering the rate: "
                "leave schedule.plateau out"
            )
        for key in ("ema", "swa"):
            if self.polish is not None and getattr(self.polish, key) is not None:
                raise ValueError(
                    f"polish.{key} would average the weights that optimizer.kind: schedule-free "
                    "averages already; leave it out"
                )
        if self.polish is not None and self.polish.clean and self.polish.keep == "better":
            raise ValueError(
                "polish.clean cannot be rolled back with optimizer.kind: schedule-free, whose "
                "average holds every update of the schedule; leave out clean or keep: better"
            )
        return self

    @model_validator(mode="after")
    def _the_average_has_statistics(self) -> Self:
        if not isinstance(self.optimizer, ScheduleFree):
            return self
        samples = self.optimizer.statistics_samples
        if (samples is None) != (self.batch.bn_span is None):
            raise ValueError(
                "optimizer.statistics_samples is for models with BatchNorm: give it and "
                "batch.bn_span, or neither"
            )
        if samples is not None and samples > self.train_samples:
            raise ValueError(
                f"optimizer.statistics_samples ({samples}) must not exceed the training images "
                f"({self.train_samples})"
            )
        return self

    @model_validator(mode="after")
    def _synthetic_images_are_not_cached(self) -> Self:
        if self.data.source == "synthetic" and self.execution.cache is not None:
            raise ValueError(
                f"execution.cache: {self.execution.cache} would not be used: data.source: "
                "synthetic has no files"
            )
        return self

    @model_validator(mode="after")
    def _small_gradients_are_sent(self) -> Self:
        if self.reduction.dtype == "fp16" and self.precision != "fp16":
            raise ValueError(
                "reduction.dtype: fp16 needs precision: fp16, whose loss scale keeps small "
                "gradients from vanishing; or send in bf16"
            )
        return self

    @model_validator(mode="after")
    def _parts_hold_whole_spans(self) -> Self:
        parts, size = self.reduction.parts or 1, self.batch.global_batch
        whole = (self.batch.bn_span or 1) * parts
        if parts > 1 and size % whole:
            raise ValueError(
                f"reduction.parts ({parts}) does not divide batch.global_batch ({size}) into parts "
                f"of whole BatchNorm spans; it must divide {size // (self.batch.bn_span or 1)}"
            )
        return self

    @model_validator(mode="after")
    def _parts_stay_the_same(self) -> Self:
        if self.reduction.kind == "adasum" and self.batch.schedule:
            raise ValueError(
                "reduction.kind: adasum divides every batch into as many parts of the same size: "
                "leave batch.schedule out"
            )
        return self

    @model_validator(mode="after")
    def _noise_is_that_of_a_sum(self) -> Self:
        if "noise_scale" in self.monitor and self.reduction.kind == "adasum":
            raise ValueError(
                "monitor: noise_scale compares gradients before and after their sum, and "
                "reduction.kind: adasum has none; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _trust_ratios_are_those_of_lars(self) -> Self:
        if "trust_ratios" in self.monitor and self.optimizer.kind != "lars":
            raise ValueError(
                f"monitor: trust_ratios is for optimizer.kind: lars, and this one is "
                f"{self.optimizer.kind}; leave it out (gradient_norm works with every optimizer)"
            )
        return self

    @model_validator(mode="after")
    def _smoothing_leaves_the_label_ahead(self) -> Self:
        if self.loss.label_smoothing > 1 - 1 / self.data.classes:
            raise ValueError(
                f"loss.label_smoothing ({self.loss.label_smoothing:g}) makes the labelled one of "
                f"{self.data.classes} classes the least likely"
            )
        return self


def anywhere(recipe: Recipe) -> Recipe:
    """Return the recipe as any machine can compute it, whatever the one had that trained."""
    return recipe.with_execution(kernels="torch").model_copy(
        update={"reduction": Reduction(), "protocol": None}
    )


def require_backend(
    recipe: Recipe, name: str, *, use: str = "--workers N, torchrun or srun, and --backend torch"
) -> None:
    """Raise RecipeError, with what to `use`, where the backend of this name cannot train it."""
    if name != "horovod":
        return
    if recipe.protocol is not None and recipe.protocol.workers > 1:
        raise RecipeError(
            f"protocol: Horovod cannot send to one worker alone; use {use}, or leave protocol out"
        )
    if recipe.reduction.dtype == "bf16":
        raise RecipeError(
            f"reduction.dtype: bf16: Horovod has no such type; use {use}, or another dtype"
        )
