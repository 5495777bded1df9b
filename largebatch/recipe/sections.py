"""What the sections of a recipe share, and the sections of the data and of Final Polishing."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from largebatch.recipe.choices import Compile, Kernels
from largebatch.recipe.task import Sample

MAX_UPDATES = 2_000_000
"""Of a run: four times those of ResNet-50's 90 epochs in batches of 256. Every rate of a run is
computed when it is planned, which takes some seconds for these."""

MAX_EPOCHS = 1_000_000
"""Of a run; a few images may be trained on for long. The updates that they make are bounded too."""

MAX_SAMPLES = 2**25
"""Of a split: twice ImageNet-21k's. Every worker draws their order, in a gigabyte for these."""

MAX_BATCH = 2**24
"""Samples in one update: more than ImageNet-21k has. Their divisors are tried one by one."""

LARGEST = 3e38
"""Bounds rates and coefficients: fp32 holds no larger ones, and torch refuses them in the run."""

MAX_SIDE = 4096
"""Of what the model sees, in pixels: one such image, in fp32, takes 200 MB on its way."""

Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Samples = Annotated[int, Field(gt=0, le=MAX_SAMPLES)]
Batch = Annotated[int, Field(gt=0, le=MAX_BATCH)]
Updates = Annotated[int, Field(gt=0, le=MAX_UPDATES)]
Aspect = Annotated[float, Field(ge=0.01, le=100)]
Triple = tuple[float, float, float]
PositiveTriple = tuple[Positive, Positive, Positive]

Interpolation = Literal["bilinear", "bicubic"]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced, nothing mutates."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Duration(Section):
    """A stretch of training, in epochs or in steps."""

    epochs: Annotated[float, Field(gt=0, le=MAX_EPOCHS)] | None = None
    steps: Annotated[int, Field(gt=0, le=MAX_UPDATES)] | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]


class Resolution(Section):
    """A part of training on images of a size of their own."""

    until: Duration | None
    """Where it ends, counted from the start of the run; epochs are rounded to whole updates. null
    for the last one, and only there: where training on augmented images ends."""

    image_size: Side
    """Side of the square the model sees, in pixels."""


class HeldOut(Section):
    """Training images that validate instead of the validation images."""

    samples: Samples
    """How many; they are drawn at random, and all others are trained on."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes which ones. It is not the recipe's, so that runs with other seeds are measured on the
    same images."""


class Data(Section):
    """The images, and how they are shown to the model."""

    source: Literal["folder", "digits", "synthetic"]
    """`folder`: images or tar shards under --data. `digits`: scikit-learn's 1,797 handwritten
    digits, embedded. `synthetic`: made up, for trying a recipe without its data."""

    classes: Annotated[int, Field(ge=2, le=100_000)]
    """Number of classes; the folder must have exactly these. ImageNet-21k has 21,841."""

    train_samples: Samples
    """Number of training images; the folder must have exactly these."""

    val_samples: Samples
    """Number of validation images; the folder must have exactly these."""

    held_out: HeldOut | None = None
    """To choose settings without the validation images: these training images validate, no stage is
    trained or measured on them, and the validation images are not looked at. An epoch is the
    remaining ones. null: none."""

    image_size: Side
    """Side of the square the model sees, in pixels."""

    resolution: Annotated[tuple[Resolution, ...], Field(max_length=100)] = ()
    """Other sizes of the augmented images, one after the other from the start of the run; after
    them it is image_size. Random crops show the same parts of the images at every size. Clean
    images (validation, clean and affine updates, statistics) always have image_size, because
    BatchNorm statistics depend on the size and must be those of the evaluation."""

    mean: Triple = (0.485, 0.456, 0.406)
    """Subtracted from red, green and blue on the scale 0 .. 1."""

    std: PositiveTriple = (0.229, 0.224, 0.225)
    """Red, green and blue are divided by these after the mean is subtracted."""

    crop_area: tuple[Fraction, Fraction] | None
    """Random crop while training: smallest and largest part of the image's area
    (Inception crop, arXiv:1409.4842); null shows the whole image."""

    crop_aspect: tuple[Aspect, Aspect] = (3 / 4, 4 / 3)
    """Random crop while training: narrowest and widest shape, width over height."""

    flip: bool
    """Mirror half of the training images left to right."""

    eval_resize: Annotated[int, Field(gt=0, le=2 * MAX_SIDE)] | None
    """Clean images (validation, polishing): the short side is resized to this, then the centre
    of image_size is cut out; null shows the whole image."""

    interpolation: Interpolation = "bilinear"
    """How a part is resized to image_size. `bicubic` is Catmull and Rom's, as in Pillow."""

    @property
    def train_split(self) -> int:
        """Training images less those that are held out to validate."""
        return self.train_samples - (self.held_out.samples if self.held_out else 0)

    @property
    def val_split(self) -> int:
        """Images that an evaluation measures."""
        return self.held_out.samples if self.held_out else self.val_samples

    @property
    def val_labels(self) -> int:
        """Labels that an evaluation counts: one for each image."""
        return self.val_split

    def sample(self, image_size: int | None = None) -> Sample:
        """Return the shapes of an image with this side; None: `image_size`."""
        side = image_size or self.image_size
        return Sample(f"images of {side} x {side}", (3, side, side))

    @model_validator(mode="after")
    def _only_the_last_size_is_open(self) -> Self:
        for place, part in enumerate(self.resolution[:-1]):
            if part.until is None:
                raise ValueError(
                    f"resolution.{place}.until: null is for the last one, {len(self.resolution)} "
                    "are given"
                )
        return self

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


class SWA(Section):
    """The mean of the weights at a regular interval (arXiv:1803.05407).

    The rates are the schedule's: high or constant ones move the weights far enough for it to pay.
    """

    over: Duration
    """The last part of the schedule, clean epochs included."""

    every: Duration
    """The interval; the last weights of the schedule are the last ones in the mean. In epochs only
    where batch.schedule changes nothing on the way."""


class SWAP(Duration):
    """Replicas of the model, each trained alone, and their mean (arXiv:2001.02312, phase 3).

    They go on from the same weights on augmented images, each in an order of its own, by SGD with
    the optimizer's momentum and weight decay and no trust ratio. The length is that of each.
    """

    replicas: Annotated[int, Field(ge=2, le=4096)]
    """How many; workers train them side by side, and one after the other where they are fewer."""

    batch: Batch
    """Samples in one update of a replica: a small batch."""

    lr: Positive
    """The rate of the first update; it falls to zero along half a cosine."""


class Affine(Duration):
    """More updates after the schedule, of BatchNorm's scales and shifts and of the classifier."""

    lr: Positive
    """The rate of the first of them; it falls to zero along half a cosine."""


class Statistics(Section):
    """The forward-only pass that measures BatchNorm's means and variances exactly."""

    samples: Samples
    """How many clean training images are measured."""

    sequential: bool = False
    """Each layer is measured with the layers before it polished and normalising as in evaluation,
    in as many passes as that takes; false: in one pass, each normalising by its batch."""


class Polish(Section):
    """Final Polishing (Kasagi et al., HPDC 2020): let BatchNorm see clean training data.

    The stages come in this order, and each ends with an evaluation.
    """

    clean: Duration | None = None
    """The last part of the schedule trains on clean images, at the schedule's rate, and all
    weights move; null: none of it."""

    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """After every update, EMA *= ema, EMA += (1 - ema) model: weights and running
    statistics alike. When the schedule has ended the EMA becomes the model, and the stages
    below work on it. 1 / (1 - ema) is how many updates it reaches back; null: no EMA."""

    swa: SWA | None = None
    """When the schedule has ended, this mean of weights and running statistics becomes the model;
    in place of ema, and with statistics after it. null: none."""

    swap: SWAP | None = None
    """When the schedule has ended, the mean of replicas that were trained on alone becomes the
    model, with statistics after it. null: none."""

    affine: Affine | None = None
    """More updates on clean images after the schedule, in which only BatchNorm's scales and
    shifts and the classifier move, by SGD: with the optimizer's momentum, its weight decay on the
    classifier's weight, and no trust ratio. Running statistics follow as in training. null: no
    such stage."""

    statistics: Statistics | None = None
    """The last stage, in which no weight moves; null: none."""

    keep: Literal["always", "better"] = "always"
    """`better`: roll a stage back unless more of the held-out images are classified right after it
    than before it, and one whose loss stops being a number. `always`: keep what every stage did;
    such a loss then ends the run."""

    held_out: Samples | None = None
    """For keep: better, how many training images, chosen by the seed, no stage is trained or
    measured on. Validation images never decide."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        stages = (self.clean, self.ema, self.swa, self.swap, self.affine, self.statistics)
        if not any(stages):
            raise ValueError(
                "give at least one of clean, ema, swa, swap, affine and statistics; without "
                "polishing, leave polish out"
            )
        return self

    @model_validator(mode="after")
    def _averages_are_measured(self) -> Self:
        if self.ema is not None and self.swa is not None:
            raise ValueError("ema and swa would each become the model: give one of the two")
        for name, average in (("swa", self.swa), ("swap", self.swap)):
            if average is not None and self.statistics is None:
                raise ValueError(
                    f"{name} needs statistics: the running statistics of an average belong to "
                    "other weights"
                )
        return self

    @model_validator(mode="after")
    def _held_out_images_decide(self) -> Self:
        if self.keep == "better" and self.held_out is None:
            raise ValueError(
                "keep: better compares on training images that are not trained on: give held_out"
            )
        if self.keep == "always" and self.held_out is not None:
            raise ValueError("held_out images would not be used: give keep: better too")
        return self


class Groups(Section):
    """Base of the ways to put gradients into groups; each group is sent as one tensor."""


class CubicGroups(Groups):
    """3 (k+1)^3 - 3 k^3 tensors: 3, 21, 57, 111 ... (Fujitsu's MLPerf v0.6 entry)."""

    kind: Literal["cubic"]


class QuadraticGroups(Groups):
    """3 (k+1)^2 - 3 k^2 tensors: 3, 9, 15, 21 ..."""

    kind: Literal["quadratic"]


class ConstantGroups(Groups):
    """The same number of tensors in each."""

    kind: Literal["constant"]

    tensors: Annotated[int, Field(gt=0, le=1_000_000)]
    """How many."""


class GroupsByBytes(Groups):
    """As many tensors as fill a number of bytes, at least one."""

    kind: Literal["bytes"]

    megabytes: Positive
    """A group is complete when it has at least this many million bytes of fp32 gradients, whatever
    they are sent as."""


class Checkpoints(Section):
    """When a run saves, besides after every evaluation and stage, and what it keeps."""

    every_steps: Updates | None = None
    every_minutes: Positive | None = 10.0
    """Optimizer updates, and time, after which another checkpoint is due; null: none for that."""

    keep_last: Updates = 2
    """The newest ones that stay on the disk; the one of the best evaluation stays besides."""

    keep_every: Updates | None = None
    """Those after a multiple of so many updates stay too."""

    on_error: Literal["stop", "continue"] = "stop"
    """Where one cannot be written, as on a full disk. `continue`: a note in the log, and on."""

    upload: bool = False
    """W&B and MLflow, where `tracking` has them, get the last one when the run has finished: the
    size of the weights times two to four, with the state of the optimizer."""


class Execution(Section):
    """The machine: what changes the numbers of a run by rounding at most. A resumed run may change
    it.

    With the protocols softsync and asynchronous `checkpoints` does change something: gradients are
    less late after each.
    """

    device_batch: Batch | None = None
    """Samples a worker holds at a time (--device-batch). null: the largest up to 256 that divides
    its share of the global batch."""

    decoder: Literal["dali", "torchvision"] | None = None
    """Decodes and resizes the images (--decoder). `dali`: NVIDIA DALI, on the GPU where there is
    one; pixels differ from torchvision's by 1/255 at most. null: torchvision."""

    reads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Images that a worker reads at a time, at most. Storage that takes long to answer needs many.
    null: a quarter of the device batch, 8 at the least and 64 at the most."""

    cache: Literal["memory", "device"] | None = None
    """Decode once and keep the pixels of small sets. `memory`: in one file that all workers of a
    machine map, in the user's cache, where a file is removed after 30 days without use. `device`:
    besides on the GPU of every worker; on a CPU that is `memory`. null: decode each time."""

    memory_format: Literal["contiguous", "channels_last"] | None = None
    """Order of images, weights and maps in memory, torch's name for it; which is faster on a CPU
    depends on the model. null: channels_last on GPUs, contiguous on CPUs."""

    groups: Annotated[
        CubicGroups | QuadraticGroups | ConstantGroups | GroupsByBytes, Field(discriminator="kind")
    ] = CubicGroups(kind="cubic")
    """Which gradients are sent together, counted from the last layer."""

    checkpoints: Checkpoints = Checkpoints()

    compare_every: Updates | None = 100
    """Updates between comparisons of the workers' weights, which must be the same bits; null: they
    are never compared."""

    kernels: Kernels = "torch"
    """Compute the LARS update. `apex`: NVIDIA apex's multi-tensor kernels, on CUDA only."""

    compile: Compile = False
    """Train with fused kernels, by torch.compile; results differ by rounding. `reduce-overhead`
    adds CUDA graphs, which save launches and take memory. `max-autotune` adds a search for the
    fastest kernels, which takes minutes. The first update of each image size takes seconds to
    minutes longer. Evaluation and polishing run uncompiled."""

    def channels_last(self, device: str) -> bool:
        """Return True if `memory_format` is channels_last on this type of device."""
        if self.memory_format is None:
            return device != "cpu"
        return self.memory_format == "channels_last"

    @model_validator(mode="after")
    def _decoder_is_used(self) -> Self:
        if self.cache is not None:
            for key, value in (("decoder", self.decoder), ("reads", self.reads)):
                if value is not None:
                    raise ValueError(
                        f"{key}: {value} would not be used: cache: {self.cache} decodes all "
                        "images once; give one of the two"
                    )
        return self
