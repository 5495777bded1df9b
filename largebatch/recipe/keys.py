"""The keys of a recipe: every section that stands in one place, and all of them together.

What one section allows is checked where it is declared. What must hold between sections is in
`validation`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)

from largebatch.errors import clip
from largebatch.recipe.choices import Monitor, OffTarget, Precision, TrackerName
from largebatch.recipe.data import Data
from largebatch.recipe.execution import Execution
from largebatch.recipe.model import Model
from largebatch.recipe.optimizers import Optimizer
from largebatch.recipe.polish import Polish
from largebatch.recipe.protocols import Protocol
from largebatch.recipe.schedule import Schedule
from largebatch.recipe.section import (
    LARGEST,
    MAX_BATCH,
    MAX_EPOCHS,
    Batch,
    Duration,
    Epochs,
    Positive,
    Section,
    Seed,
    Updates,
)


class _Classification(Section):
    """A loss of one label for each image. Mixed images have two; each counts by its share."""

    kind: str

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability mass taken from the labelled class (arXiv:1512.00567, section 7)."""

    class_weights: Literal["balanced"] | tuple[Positive, ...] | None = None
    """Factor of the loss of an image, by its class. `balanced`: inversely proportional to the
    number of training images of the class. A list has a weight for each class, in the order of the
    class numbers. Both are scaled to a mean of 1 over the training images, without held-out ones,
    and the sum is divided by the global batch, so that the learning rate keeps its meaning. An
    evaluation is not weighted; it also reports the mean of the accuracies of the classes. null: 1
    for every image."""

    @field_validator("class_weights", mode="before")
    @classmethod
    def _weights_are_positive(cls, value: object) -> object:
        # Else pydantic reports one problem for each form that it could have.
        if value is None or value == "balanced":
            return value
        weights = value if isinstance(value, (list, tuple)) else []
        if len(weights) >= 2 and all(_is_weight(weight) for weight in weights):
            return tuple(weights)
        raise ValueError(
            "input should be 'balanced' or a list with a number above 0 for each class, got "
            f"{clip(str(value), 60)}"
        )


class CrossEntropy(_Classification):
    """Cross-entropy of the softmax over the classes."""

    kind: Literal["cross_entropy"] = "cross_entropy"

    off_target: OffTarget = "all"
    """Which classes share that mass. `all`: every class, the labelled one too (PyTorch,
    TensorFlow). `others`: only the other classes (MXNet)."""


class BinaryCrossEntropy(_Classification):
    """Binary cross-entropy of the sigmoid of each class (arXiv:2110.00476), as timm's.

    With K classes and label smoothing a the target is 1 - a + a/K for the label and a/K for every
    other class.
    """

    kind: Literal["bce"]

    target_threshold: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Targets above this become 1, all others 0, after mixing and smoothing; "ResNet strikes back"
    has 0.2. null: targets stay as they are."""

    classes: Literal["mean", "sum"] = "mean"
    """The loss of an image over its classes. `mean`: the mean of the K losses, timm's default, so a
    batch has the mean over N x K. `sum`: their sum, timm's sum_classes (its --bce-sum); K times as
    large, which learning rate, clip_norm and weight decay must allow for."""


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= LARGEST


def _kind_of(value: object) -> object:
    """Return the kind of a loss; recipes from before there were two have none."""
    if isinstance(value, dict):
        return value.get("kind", "cross_entropy")
    return getattr(value, "kind", "cross_entropy")


Loss = Annotated[
    Annotated[CrossEntropy, Tag("cross_entropy")] | Annotated[BinaryCrossEntropy, Tag("bce")],
    Discriminator(_kind_of),
]
"""The loss of a training image."""


class BatchChange(Section):
    """A change of the global batch during the run (arXiv:1811.05233)."""

    after: Duration
    """Place of the change, counted from the start of the run. Epochs are rounded to whole updates
    of the batch before, so that no sample is left out or shown twice."""

    global_batch: Batch
    """Samples in one optimizer update."""

    lr_factor: Positive
    """Factor of the learning rate of `schedule`: 1 keeps it, global_batch over batch.global_batch
    scales it linearly (arXiv:1706.02677, section 2.1). Momentum is kept."""


class BatchSizes(Section):
    """How many samples share an update, and BatchNorm statistics."""

    global_batch: Batch
    """Samples in one optimizer update, over all workers and accumulation."""

    bn_span: Annotated[int, Field(ge=2, le=MAX_BATCH)] | None
    """Samples that share BatchNorm statistics; null for a model without BatchNorm."""

    schedule: Annotated[tuple[BatchChange, ...], Field(max_length=100)] = ()
    """Changes of the global batch during the run, one after the other. Epochs are passes over the
    data whatever the batch. `schedule` follows the samples seen: there a step is as many samples as
    batch.global_batch, the batch at the start."""

    @property
    def by_key(self) -> dict[str, int]:
        """Every global batch by its key, in order."""
        later = {
            f"batch.schedule.{number}.global_batch": change.global_batch
            for number, change in enumerate(self.schedule)
        }
        return {"batch.global_batch": self.global_batch, **later}

    @model_validator(mode="after")
    def _spans_fill_the_batch(self) -> Self:
        for key, batch in self.by_key.items():
            if self.bn_span is not None and batch % self.bn_span:
                name = key.removeprefix("batch.")
                raise ValueError(
                    f"{name} ({batch}) must be a multiple of bn_span ({self.bn_span}), such as "
                    f"{max(1, round(batch / self.bn_span)) * self.bn_span}"
                )
        return self


class Reduction(Section):
    """The type that gradients are sent in."""

    dtype: Precision = "fp32"
    """Gradients are sent in this type. They are divided by the global batch before they are rounded
    and summed, so that no sum overflows; those of normalisation layers stay in fp32, in one last
    group. fp16 needs precision: fp16, whose loss scale keeps small gradients from vanishing."""


class NonFinite(Section):
    """Reaction to a loss or a gradient that is infinite or NaN, on any worker."""

    action: Literal["stop", "skip"] = "stop"
    """`stop`: the run ends with its last checkpoint. `skip`: the update is skipped; a GPU then
    waits in every update."""

    most: Updates = 10
    """Number of updates in a row that may be skipped before the run stops."""


class Evaluation(Section):
    """When validation accuracy is measured, besides at the end of every stage."""

    every_epochs: Epochs | None = None
    """Passes over the training data between measurements; null: only at the end of a stage."""

    offset_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0.0
    """Shifts the measurements; MLPerf allows every 4 epochs at an offset of 0 to 3."""

    views: Literal[1, 2, 6] = 1
    """Views of each image whose logits are averaged (test-time augmentation). 2: the image and its
    mirror image. 6: these also moved by a pixel up and left, and down and right, as in airbench
    (arXiv:2404.00498, section 3.5)."""

    @model_validator(mode="after")
    def _offset_is_used(self) -> Self:
        if self.every_epochs is None and self.offset_epochs:
            raise ValueError("offset_epochs shifts every_epochs: give that too")
        return self


Label = Annotated[str, Field(min_length=1, max_length=64)]
"""A name in a tracker; W&B allows tags of 64 characters."""


def _words(value: object) -> object:
    words = [value] if isinstance(value, str) else value
    return tuple(words) if isinstance(words, list) else words


OneOrMore = BeforeValidator(_words)


MLPERF = "mlperf"
"""The tracker that writes MLPerf's log."""


class Tracking(Section):
    """Trackers of the run; W&B's variables, such as WANDB_PROJECT or WANDB_NAME, come first."""

    trackers: Annotated[tuple[TrackerName, ...], OneOrMore] = ()
    """Trackers besides the console and log.jsonl. `wandb`: Weights & Biases. `tensorboard`: event
    files in the run folder. `mlflow`: MLFLOW_TRACKING_URI. They get the report at the end.
    `mlperf`: mlperf.log, as MLPerf's rules require it, for `largebatch report mlperf`."""

    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name of the run in W&B and MLflow; null: that of its folder."""

    group: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Group of the run in W&B, and a tag in MLflow; null: that of all runs that differ only in
    their seed, and in a study its name."""

    job_type: Label | None = None
    """Kind of run within its group, in W&B and as a tag in MLflow; null: train or polish."""

    tags: Annotated[tuple[Label, ...], OneOrMore] = ()
    """Tags in W&B and MLflow."""

    entity: Label | None = None
    """Team or user of W&B; null: the account's default."""

    notes: str | None = None
    """A text about the run, for W&B and MLflow."""

    @property
    def logs_mlperf(self) -> bool:
        """True if the run writes MLPerf's log, whose clock starts before the first image is read.

        Images must then not be indexed or decoded ahead of time.
        """
        return MLPERF in self.trackers

    @property
    def remark(self) -> str:
        """A sentence on the first key that none of the trackers reads; empty if there is none."""
        for key in ("name", "group", "job_type", "tags", "entity", "notes"):
            readers = ["wandb"] if key == "entity" else ["wandb", "mlflow"]
            if getattr(self, key) and set(readers).isdisjoint(self.trackers):
                needs = " or ".join(readers)
                return f"tracking.{key}: not read; it needs {needs} in tracking.trackers"
        return ""

    @model_validator(mode="before")
    @classmethod
    def _a_list_is_of_trackers(cls, value: object) -> object:
        return {"trackers": value} if isinstance(value, (str, list, tuple)) else value

    @model_serializer(mode="wrap")
    def _as_short_as_possible(self, dump: SerializerFunctionWrapHandler) -> Any:  # noqa: ANN401 -- pydantic's
        full = dump(self)
        return full if self != Tracking(trackers=self.trackers) else full["trackers"]


class Keys(Section):
    """All keys of a recipe."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names run folders, with the time, and W&B runs; file systems allow 255 characters."""

    seed: Seed
    """Seed of the initial weights, the order of the samples, their augmentation, and dropout."""

    duration: Duration
    """Length of the training, clean epochs included."""

    data: Data
    model: Model
    batch: BatchSizes
    optimizer: Optimizer
    schedule: Schedule
    loss: Loss = CrossEntropy()
    precision: Precision = "fp32"
    """Arithmetic of the forward and backward pass; weights and updates are always fp32. fp16 scales
    the loss and skips updates whose gradients overflow."""

    reduction: Reduction = Reduction()
    protocol: Protocol | None = None
    """Which workers wait for which, over parameter servers; null: every worker waits for all, in
    every update."""

    execution: Execution = Execution()
    polish: Polish | None = None
    evaluation: Evaluation = Evaluation()
    nonfinite: NonFinite = NonFinite()
    tracking: Tracking = Tracking()
    monitor: Annotated[tuple[Monitor, ...], OneOrMore] = ()
    """Further measurements for the report and the trackers. `noise_scale`: the gradient noise
    scale tr(Sigma)/|G|^2 in samples (arXiv:1812.06162), from gradients before and after their sum;
    it needs a device batch of whole BatchNorm spans that is smaller than the global batch.
    `gradient_norm`: the norm of the gradient of every update. `trust_ratios`: the factors of LARS,
    by layer. `system`: processor, memory, GPU and bytes read from disks of every worker, 200 times
    in a run. `generalization_gap`: at the end of every stage the loss on all images trained on,
    shown as validation images are, and the validation loss minus it; one forward pass over them."""

    @property
    def train_samples(self) -> int:
        """Number of training samples, without held-out ones."""
        held_out = self.polish.held_out if self.polish else None
        return self.data.train_split - (held_out or 0)
