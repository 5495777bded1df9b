"""The recipe: one YAML file that describes a training run completely.

A recipe states the mathematics of an experiment. What only makes a machine fast stands apart, in
`execution`; how many workers there are and where the data lies is given on the command line, and
none of it can change the result. Every section is frozen and strict; an unknown key is an error.
What decides the result has no default, except where the literature agrees on one.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from largebatch.recipe.choices import Convention, OffTarget, Precision
from largebatch.recipe.schedule import Schedule
from largebatch.recipe.sections import (
    MAX_BATCH,
    MAX_EPOCHS,
    Batch,
    Data,
    Duration,
    Execution,
    Momentum,
    NonNegative,
    Polish,
    Positive,
    Section,
    Updates,
)

FACTORY_KEYS = {
    **dict.fromkeys(
        [
            *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict"),
            *("pretrained_filter_fn", "pretrained_model_args", "pretrained_backbone"),
            *("weights", "weights_backbone", "checkpoint_path", "cache_dir", "progress"),
        ],
        "nothing is fetched; weights to begin with are model.weights: FILE",
    ),
    **dict.fromkeys(["name", "model_name", "variant", "model_cls"], "it is model.name"),
    "num_classes": "it is data.classes",
    **dict.fromkeys(["dtype", "device"], "the recipe's precision and the machine decide on it"),
    **dict.fromkeys(
        [
            *("features_only", "feature_cfg", "feature_cls", "out_indices", "kwargs_filter"),
            *("model_cfg", "scriptable", "exportable", "no_jit", "quantize"),
        ],
        "leave it out",
    ),
}
"""What timm's and torchvision's factories take for themselves, and what to do instead; every other
argument goes to the constructor of the network."""

_WORD = re.compile(r"[\w.,+=-]*")
"""A choice such as `relu` or a block such as `ir_r1_k3_s2_e6_c24`; no path and no address."""


class Model(Section):
    """The network."""

    name: str
    """`lenet5`, `cifar_resnet8` (or 20, 32, 44, 56, 110), the name of any timm model, or
    `torchvision/` and that of one of torchvision's."""

    arguments: dict[str, JsonValue] = Field(default={})
    """Passed to the network's constructor in timm or torchvision as they are: numbers, true or
    false, words, and lists of them. What makes the libraries fetch or load weights is refused."""

    weights: Annotated[str, Field(min_length=1)] | None = None
    """File of weights that training begins with, .safetensors or .pth; null draws them from the
    seed. The path is relative to the current directory. Only worker 0 reads the file, and only when
    a run begins: what is resumed or evaluated has its weights in a checkpoint."""

    head_std: Positive | None = None
    """Draw the classifier's weights from N(0, head_std) with zero bias, also where all else comes
    from `weights`; null keeps the model's own. MLPerf's ResNet-50 uses 0.01."""

    @field_validator("arguments")
    @classmethod
    def _arguments_shape_the_network(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Refuse what could fetch, read or write: a recipe may come from anywhere."""
        refused = [f"{key}: {FACTORY_KEYS[key]}" for key in arguments if key in FACTORY_KEYS]
        refused += [
            f"{key}: a word may hold letters, digits and _ . , + = -, got {word!r}"
            for key, value in arguments.items()
            for word in _words(value)
            if not _WORD.fullmatch(word)
        ]
        if refused:
            raise ValueError("; ".join(refused))
        return arguments


def _words(value: JsonValue) -> list[str]:
    """Return the words of an argument, at any depth."""
    if isinstance(value, dict):
        return [word for pair in value.items() for each in pair for word in _words(each)]
    if isinstance(value, list):
        return [word for each in value for word in _words(each)]
    return [value] if isinstance(value, str) else []


class LARS(Section):
    """Layer-wise adaptive rate scaling (arXiv:1708.03888)."""

    kind: Literal["lars"]

    convention: Convention
    """Where rate and trust ratio enter. `reference`: both inside the momentum (MLPerf's TF2 code;
    optax too, but only without weight decay). `scaled-momentum`: ratio inside, rate outside (timm).
    `outside`: both outside (Intel); it can blow up where old momentum meets a tiny gradient, which
    the ratio divides by. `fujitsu`: both inside, weight decay scaled by the peak rate (MLPerf v0.6,
    open division)."""

    momentum: Momentum = 0.9

    weight_decay: NonNegative = 1e-4
    """Applied to the tensors that are adapted; biases and normalisation layers get neither."""

    eta: Positive = 1e-3
    """Trust coefficient: |step| / |weight| at rate 1, before momentum and decay."""

    eps: NonNegative = 0.0
    """Added to the denominator of the trust ratio. MLPerf's TF2 code turns 0 into 1e-7."""


class SGD(Section):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    kind: Literal["sgd"]

    momentum: Momentum = 0.9

    weight_decay: NonNegative = 1e-4
    """Applied to weights; biases and normalisation layers get none."""

    nesterov: bool = False


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
                raise ValueError(f"{name} ({batch}) must be a multiple of bn_span ({self.bn_span})")
        return self


class Reduction(Section):
    """What gradients are sent as when they are summed over the workers."""

    dtype: Precision = "fp32"
    """Gradients are sent in this type. They are divided by the global batch before they are rounded
    and summed, so that no sum overflows; those of normalisation layers stay in fp32, in one last
    group. fp16 needs precision: fp16, whose loss scale keeps small gradients from vanishing."""


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

    data: Data
    model: Model
    batch: BatchSizes
    optimizer: Annotated[LARS | SGD, Field(discriminator="kind")]
    schedule: Schedule
    loss: Loss = Loss()
    precision: Precision = "fp32"
    """Arithmetic of the forward and backward pass; weights and updates are always fp32. fp16 scales
    the loss and skips updates whose gradients overflow."""

    reduction: Reduction = Reduction()
    execution: Execution = Execution()
    polish: Polish | None = None
    evaluation: Evaluation = Evaluation()
    nonfinite: NonFinite = NonFinite()
    tracking: tuple[Literal["wandb"], ...] = ()
    """Who follows the run, besides the console and log.jsonl. `wandb`: Weights & Biases."""

    @property
    def mathematics(self) -> Self:
        """The recipe without execution and trackers: what all parts of a run have in common."""
        return self.model_copy(update={"execution": Execution(), "tracking": ()})

    def with_execution(self, **changes: object) -> Self:
        """Return the recipe with other settings of `execution`, such as device_batch=64.

        Raises pydantic.ValidationError, a ValueError, for what that section does not allow.
        """
        changed = self.model_dump() | {"execution": {**self.execution.model_dump(), **changes}}
        return self.model_validate(changed)

    @property
    def train_samples(self) -> int:
        """Training images that are trained on: all but those held out."""
        held_out = self.polish.held_out if self.polish else None
        return self.data.train_samples - (held_out or 0)

    @model_validator(mode="after")
    def _polishing_fits_the_data(self) -> Self:
        if self.polish is None:
            return self
        if self.train_samples < 1:
            raise ValueError(
                f"polish.held_out ({self.polish.held_out}) must be fewer than data.train_samples "
                f"({self.data.train_samples})"
            )
        if self.batch.bn_span is None:
            raise ValueError("polish is for models with BatchNorm: give batch.bn_span too")
        statistics = self.polish.statistics
        if statistics is not None and statistics.samples > self.train_samples:
            left = " less polish.held_out" if self.polish.held_out else ""
            raise ValueError(
                f"polish.statistics.samples ({statistics.samples}) must not exceed "
                f"data.train_samples{left} ({self.train_samples})"
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
    def _smoothing_leaves_the_label_ahead(self) -> Self:
        if self.loss.label_smoothing > 1 - 1 / self.data.classes:
            raise ValueError(
                f"loss.label_smoothing ({self.loss.label_smoothing:g}) makes the labelled one of "
                f"{self.data.classes} classes the least likely"
            )
        return self


def anywhere(recipe: Recipe) -> Recipe:
    """Return the recipe as any machine can compute it, whatever the one had that trained."""
    return recipe.with_execution(kernels="torch").model_copy(update={"reduction": Reduction()})
