"""What a recipe may say: one YAML file that describes a training run completely.

A recipe states the mathematics of an experiment and never the machine: how many workers there are,
how much one holds and where the data lies are said on the command line and cannot change the
result. Every section is frozen and strict; an unknown key is an error. What decides the result has
no default, except where the literature agrees on one.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Fraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Triple = tuple[float, float, float]
PositiveTriple = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced, nothing mutates."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Data(Section):
    """The pictures, and how they are shown to the model."""

    source: Literal["folder", "digits", "synthetic"]
    """`folder`: train/<class>/* and val/<class>/* under --data. `digits`: scikit-learn's 1,797
    handwritten digits, embedded. `synthetic`: made up, for trying a recipe without its data."""

    classes: Annotated[int, Field(ge=2)]
    """Number of classes; the folder must have exactly these."""

    train_samples: PositiveInt
    """Number of training pictures; the folder must have exactly these."""

    val_samples: PositiveInt
    """Number of validation pictures; the folder must have exactly these."""

    image_size: PositiveInt
    """Side of the square the model sees, in pixels."""

    mean: Triple = (0.485, 0.456, 0.406)
    """Subtracted from red, green and blue on the scale 0 .. 1."""

    std: PositiveTriple = (0.229, 0.224, 0.225)
    """Red, green and blue are divided by these after the mean is subtracted."""

    crop_area: tuple[Fraction, Fraction] | None
    """Random crop while training: smallest and largest part of the picture's area
    (Inception crop, arXiv:1409.4842); null shows the whole picture."""

    crop_aspect: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    """Random crop while training: narrowest and widest shape, width over height."""

    flip: bool
    """Mirror half of the training pictures left to right."""

    eval_resize: PositiveInt | None
    """Clean pictures (validation, polishing): the short side is resized to this, then the centre
    of image_size is cut out; null shows the whole picture."""

    decoder: Literal["dali", "torchvision"] = "dali"
    """What decodes and resizes the pictures; --decoder overrides it."""

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        for key in ("crop_area", "crop_aspect"):
            bounds = getattr(self, key)
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{key}: the first bound must not exceed the second, got {bounds}")
        if self.eval_resize is not None and self.eval_resize < self.image_size:
            raise ValueError(
                f"eval_resize ({self.eval_resize}) must be at least image_size ({self.image_size})"
            )
        return self


class Model(Section):
    """The network."""

    name: str
    """`lenet5`, or the name of any timm model."""

    arguments: dict[str, JsonValue] = {}
    """Passed to timm.create_model as they are."""

    head_std: PositiveFloat | None = None
    """Draw the classifier's weights from N(0, head_std) with zero bias; null keeps the model's
    own. MLPerf's ResNet-50 uses 0.01."""


class LARS(Section):
    """Layer-wise adaptive rate scaling (arXiv:1708.03888)."""

    kind: Literal["lars"]

    convention: Literal["reference", "scaled-momentum", "outside", "fujitsu"]
    """Where rate and trust ratio enter. `reference`: both inside the momentum (MLPerf's TF2 code).
    `scaled-momentum`: ratio inside, rate outside (timm). `outside`: both outside (Intel).
    `fujitsu`: both inside, weight decay scaled by the peak rate (MLPerf v0.6, open division)."""

    momentum: Momentum = 0.9

    weight_decay: NonNegativeFloat = 1e-4
    """Applied to the tensors that are adapted; biases and normalisation layers get neither."""

    eta: PositiveFloat = 1e-3
    """Trust coefficient: |step| / |weight| at rate 1, before momentum and decay."""

    eps: NonNegativeFloat = 0.0
    """Added to the denominator of the trust ratio."""


class SGD(Section):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    kind: Literal["sgd"]

    momentum: Momentum = 0.9

    weight_decay: NonNegativeFloat = 1e-4
    """Applied to weights; biases and normalisation layers get none."""

    nesterov: bool = False


class Span(Section):
    """A stretch of training, in epochs or in steps."""

    epochs: PositiveFloat | None = None
    steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


class Constant(Section):
    """Stay at the peak."""

    kind: Literal["constant"]


class Fall(Section):
    """Base of the decays that end at a rate."""

    end_lr: NonNegativeFloat = 0.0

    over: Span | None = None
    """How long the fall takes, from the end of the warm-up; null: until the run ends."""


class Polynomial(Fall):
    """Fall to end_lr along (1 - t)**power."""

    kind: Literal["polynomial"]
    power: PositiveFloat = 2.0


class Cosine(Fall):
    """Fall to end_lr along half a cosine."""

    kind: Literal["cosine"]


class Steps(Section):
    """Multiply the rate by gamma at given points."""

    kind: Literal["steps"]

    at: Annotated[tuple[Span, ...], Field(min_length=1)]
    """The points, counted from the start of the run, warm-up included."""

    gamma: Fraction = 0.1


class Schedule(Section):
    """The learning rate: a linear warm-up to the peak, then a decay."""

    peak_lr: PositiveFloat

    warmup: Span | None
    """How long the linear rise to the peak takes; null: none."""

    start_lr: NonNegativeFloat = 0.0
    """The rate at which the warm-up starts."""

    decay: Annotated[Constant | Polynomial | Cosine | Steps, Field(discriminator="kind")]

    first_step: Literal[0, 1] = 0
    """The number of the first update; MLPerf's reference counts from 1."""

    @model_validator(mode="after")
    def _start_lr_is_used(self) -> Self:
        if self.warmup is None and self.start_lr:
            raise ValueError("start_lr is the start of the warm-up: give warmup too")
        return self


class Loss(Section):
    """Cross-entropy over the classes."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability mass taken from the labelled class (arXiv:1512.00567, section 7)."""

    off_target: Literal["all", "others"] = "all"
    """Who shares that mass. `all`: every class, the labelled one too (PyTorch, TensorFlow).
    `others`: only the other classes (MXNet)."""


class BatchSizes(Section):
    """How many samples act together."""

    global_batch: PositiveInt
    """Samples in one optimizer update, over all workers and accumulation."""

    bn_span: Annotated[int, Field(ge=2)] | None
    """Samples that share BatchNorm statistics; null for a model without BatchNorm."""

    @model_validator(mode="after")
    def _spans_fill_the_batch(self) -> Self:
        if self.bn_span is not None and self.global_batch % self.bn_span:
            raise ValueError(
                f"global_batch ({self.global_batch}) must be a multiple of bn_span ({self.bn_span})"
            )
        return self


class Polish(Section):
    """Final Polishing (Kasagi et al., HPDC 2020): let BatchNorm see clean training data."""

    clean: Span | None = None
    """The last part of the run trains on clean pictures, at the schedule's rate; null: none."""

    statistics_samples: PositiveInt | None = None
    """How many clean training pictures the final forward-only pass measures; null: no pass."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if self.clean is None and self.statistics_samples is None:
            raise ValueError(
                "give clean, statistics_samples or both; without polishing, leave polish out"
            )
        return self


class Evaluation(Section):
    """When validation accuracy is measured, besides at the end of every stage."""

    every_epochs: PositiveFloat | None = None
    """Passes over the training data between measurements; null: only at the end of a stage."""

    offset_epochs: NonNegativeFloat = 0.0
    """Shifts the measurements; MLPerf allows every 4 epochs at an offset of 0 to 3."""

    @model_validator(mode="after")
    def _offset_is_used(self) -> Self:
        if self.every_epochs is None and self.offset_epochs:
            raise ValueError("offset_epochs shifts every_epochs: give that too")
        return self


class Recipe(Section):
    """One training run, complete: the file is the experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names run folders and W&B runs."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Fixes the weights at the start, the order of the samples, crops, flips and dropout."""

    duration: Span
    """How long to train, clean epochs included."""

    data: Data
    model: Model
    batch: BatchSizes
    optimizer: Annotated[LARS | SGD, Field(discriminator="kind")]
    schedule: Schedule
    loss: Loss = Loss()
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward pass; weights and updates are always fp32."""

    polish: Polish | None = None
    evaluation: Evaluation = Evaluation()
    tracking: tuple[Literal["wandb"], ...] = ()
    """Besides the console and log.jsonl, which every run has."""

    @model_validator(mode="after")
    def _statistics_fit_the_data(self) -> Self:
        samples = 0 if self.polish is None else self.polish.statistics_samples or 0
        if samples > self.data.train_samples:
            raise ValueError(
                f"polish.statistics_samples ({samples}) must not exceed data.train_samples "
                f"({self.data.train_samples})"
            )
        if self.polish is not None and self.batch.bn_span is None:
            raise ValueError("polish is for models with BatchNorm: give batch.bn_span too")
        if self.batch.bn_span is not None and samples % self.batch.bn_span == 1:
            raise ValueError(
                f"polish.statistics_samples ({samples}) leaves a single picture for the last "
                f"BatchNorm span of {self.batch.bn_span}; give one more or one less"
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
