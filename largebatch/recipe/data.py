"""The section `data`: the images."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from largebatch.recipe.augment import Augment
from largebatch.recipe.section import Duration, Fraction, Positive, Samples, Section, Seed

MAX_SIDE = 4096
"""Side of the largest image in pixels; in fp32 one takes 200 MB."""

MAX_ERASED = 16
"""Boxes that are erased in an image; the numbers of all of them are drawn for every image."""

REPEATED = 64
"""Images that follow together several times with `repeats`; the last ones of an epoch are more."""

MAX_CHUNK = 2**20
"""Largest chunk in images, and largest window in chunks."""

MAX_REPEATS = 10
"""Largest `repeats`: 66 images have this many orders in which no two are neighbours twice."""

Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Aspect = Annotated[float, Field(ge=0.01, le=100)]
Probability = Annotated[float, Field(ge=0, le=1)]
Concentration = Annotated[float, Field(ge=0, le=100)]
Interpolation = Literal["bilinear", "bicubic"]
Triple = tuple[float, float, float]


class Resolution(Section):
    """A part of training on images of another size."""

    until: Duration | None
    """End of the part, counted from the start of the run; epochs are rounded to whole updates. null
    for the last one, and only there: the end of training on augmented images."""

    image_size: Side
    """Side of the square the model sees, in pixels."""


class Erase(Section):
    """Random erasing of training images (Zhong et al. 2020, arXiv:1708.04896), as in timm."""

    probability: Fraction
    """Share of the training images of which a part is erased."""

    fill: Literal["constant", "noise"]
    """Pixels of the erased part. `constant`: 0 after normalisation, which is the mean colour.
    `noise`: standard normal after normalisation, drawn for each pixel and channel."""

    area: tuple[Fraction, Fraction] = (0.02, 1 / 3)
    """Smallest and largest erased part of the image's area."""

    aspect: tuple[Aspect, Aspect] = (0.3, 10 / 3)
    """Flattest and tallest erased box, height over width."""

    count: Annotated[int, Field(ge=1, le=MAX_ERASED)] = 1
    """Largest number of boxes in an image. An image has 1 to `count` of them, which share the
    area."""

    @model_validator(mode="after")
    def _a_box_can_be_smaller_than_the_image(self) -> Self:
        flattest, tallest = self.aspect
        squarest = min(max(flattest, 1.0), tallest)
        # A box of this shape and of the image's height or width, whichever it reaches first.
        largest = self.count * min(squarest, 1 / squarest)
        if self.area[0] >= largest:
            raise ValueError(
                f"area begins at {self.area[0]:g}, and no box of an aspect in {list(self.aspect)} "
                f"is inside the image then: give area below {largest:g}, or a squarer aspect"
            )
        return self


class Mix(Section):
    """Mixed training images, with shares of two classes as their label.

    The images at positions 2k and 2k + 1 of the run are partners, as in timm's `mixup_mode: pair`,
    so every device batch is even. Their numbers are drawn from the seed and k.
    """

    mixup: Concentration | None = None
    """Mixup (arXiv:1710.09412): the mean of both images, weighted with a share from the
    distribution Beta(mixup, mixup). null or 0: off."""

    cutmix: Concentration | None = None
    """CutMix (arXiv:1905.04899): both images exchange a box whose part of the area is from the
    distribution Beta(cutmix, cutmix) before it is cut off at the border. null or 0: off."""

    probability: Fraction = 1.0
    """Part of the pairs that are mixed."""

    switch: Probability | None = None
    """Part of the mixed pairs that get CutMix, where both kinds are on; null: half of them."""

    until: Duration | None = None
    """End of mixing, counted from the start of the run; epochs are rounded to whole updates. null:
    the end of training on augmented images."""

    def describe(self) -> str:
        """Describe the parts of the pairs that are mixed, and by what.

        >>> Mix(mixup=0.2, cutmix=1.0, switch=0.25).describe()
        'Mixup (0.2) in 75 %, CutMix (1) in 25 % of the pairs'
        """
        cut = self.probability * self.cutmix_part
        parts = []
        if self.mixup:
            parts.append(f"Mixup ({self.mixup:g}) in {100 * (self.probability - cut):.3g} %")
        if self.cutmix:
            parts.append(f"CutMix ({self.cutmix:g}) in {100 * cut:.3g} %")
        return f"{', '.join(parts)} of the pairs"

    @property
    def cutmix_part(self) -> float:
        """Part of the mixed pairs that get CutMix."""
        if not self.cutmix:
            return 0.0
        if not self.mixup:
            return 1.0
        return 0.5 if self.switch is None else self.switch

    @model_validator(mode="after")
    def _has_a_kind(self) -> Self:
        if not self.mixup and not self.cutmix:
            raise ValueError(
                "nothing is mixed: give mixup (such as 0.2) or cutmix (such as 1.0), or leave "
                "data.mix out"
            )
        if self.switch is not None and not (self.mixup and self.cutmix):
            missing = "cutmix" if self.mixup else "mixup"
            raise ValueError(f"switch chooses between two kinds: give {missing} too, or no switch")
        return self


class Order(Section):
    """An order of the images that reads storage in large parts.

    An epoch is a random order of chunks, which are consecutive images of the index. The images of
    every `window` chunks that follow are in a random order of their own. Both are drawn from the
    seed and the epoch, and every image occurs once in an epoch.
    """

    chunk: Annotated[int, Field(ge=1, le=MAX_CHUNK)]
    """Consecutive images that are read together; the last chunk may have fewer. 1: the order
    without data.order, whatever the window."""

    window: Annotated[int, Field(ge=1, le=MAX_CHUNK)]
    """Chunks whose images are shuffled together; the last window may have fewer. A window of all
    chunks is the order without data.order."""

    def describe(self, *, images: int, batch: int) -> str:
        """Describe the windows of an epoch, and the chunks of an update.

        >>> Order(chunk=256, window=64).describe(images=1_281_167, batch=32_768)
        'windows of 16,384 images (1.28 %); an update has images of about 191 of 5,005 chunks'
        """
        if self.chunk == 1 or self.window_samples >= images:
            return "one window has all images, which is the order without data.order"
        num_chunks = math.ceil(images / self.chunk)
        touched = min(round(self.chunks_of(batch)), num_chunks)
        return (
            f"windows of {self.window_samples:,} images ({100 * self.window_samples / images:.3g} "
            f"%); an update has images of about {touched:,} of {num_chunks:,} chunks"
        )

    @property
    def window_samples(self) -> int:
        """Number of images in a window of whole chunks."""
        return self.chunk * self.window

    def chunks_of(self, batch: int) -> float:
        """Return the mean number of chunks that this many consecutive images are in.

        >>> round(Order(chunk=256, window=64).chunks_of(32_768))
        191
        """
        size = self.window_samples

        def chunks_of_part(images: int) -> float:
            # Part of the chunks that have one of these images of a window, which are random ones.
            return self.window * (1 - (1 - images / size) ** self.chunk)

        means = []
        for start in range(0, size, math.ceil(size / 128)):
            first = min(batch, size - start)
            whole, last = divmod(batch - first, size)
            means.append(chunks_of_part(first) + whole * self.window + chunks_of_part(last))
        return sum(means) / len(means)


class HeldOut(Section):
    """Training images that validate instead of the validation images."""

    samples: Samples
    """Number of these images, drawn at random; the run trains on all others."""

    seed: Seed = 0
    """Seed of the draw, apart from the recipe's, so that runs with other seeds are measured on the
    same images."""


class Data(Section):
    """The images, and how they are shown to the model."""

    source: Literal["folder", "digits", "synthetic"]
    """`folder`: images or tar shards under --data. `digits`: 1,797 embedded handwritten
    digits. `synthetic`: generated, for trying a recipe without its data."""

    classes: Annotated[int, Field(ge=2, le=100_000)]
    """Number of classes; the folder must have exactly these. ImageNet-21k has 21,841."""

    train_samples: Samples
    """Number of training images; the folder must have exactly these."""

    val_samples: Samples
    """Number of validation images; the folder must have exactly these."""

    held_out: HeldOut | None = None
    """For choosing settings without the validation images: these training images validate, no stage
    trains or is measured on them, and the validation images are not read. An epoch is the remaining
    ones. `largebatch evaluate RUN --set data.held_out=null` measures the validation images at last.
    null: none."""

    image_size: Side
    """Side of the square the model sees, in pixels."""

    resolution: Annotated[tuple[Resolution, ...], Field(max_length=100)] = ()
    """Other sizes of the augmented images, one after the other from the start of the run; after
    them the size is image_size. Random crops show the same parts of the images at every size. Clean
    images (validation, clean and affine updates, statistics) always have image_size, because
    BatchNorm statistics depend on the size and must be those of the evaluation."""

    mean: Triple = (0.485, 0.456, 0.406)
    """Subtracted from red, green and blue, which range from 0 to 1."""

    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Red, green and blue are divided by these after the mean is subtracted."""

    crop_area: tuple[Fraction, Fraction] | None
    """Random crop while training: smallest and largest part of the image's area
    (Inception crop, arXiv:1409.4842); null shows the whole image."""

    crop_aspect: tuple[Aspect, Aspect] = (3 / 4, 4 / 3)
    """Random crop while training: narrowest and widest shape, width over height."""

    flip: Literal[False, True, "alternating"]
    """Mirror half of the training images left to right. `true` draws them in every epoch.
    `alternating` draws them once and mirrors the other half in every second epoch, so that two
    epochs show both sides of every image (arXiv:2404.00498)."""

    translate: Annotated[int, Field(ge=0, lt=MAX_SIDE)] = 0
    """Move training images by up to this many pixels of the model's input, up or down and left or
    right; the border is filled by reflection. 0: none."""

    augment: Annotated[Augment, Field(discriminator="kind")] | None = None
    """Operations on the pixels of training images: `rand_augment`, `trivial_augment`,
    `color_jitter`. Their pixels are whole numbers from 0 to 255. null: none."""

    erase: Erase | None = None
    """Random erasing; null: none. Boxes are relative to the image, so they follow its size."""

    repeats: Annotated[int, Field(ge=1, le=MAX_REPEATS)] = 1
    """Repeated augmentation (arXiv:1901.09335, DeiT): how many times each 64 images of the order
    follow, each time with other crops and other neighbours. An epoch remains train_samples
    positions, so it has 1 / `repeats` of the images, and in `repeats` epochs every image occurs
    `repeats` times. Clean updates and statistics have every image once in an epoch. 1: none."""

    order: Order | None = None
    """Order of the training images in large parts, for storage that is slow to read one image at a
    time; null: a random order of all images. It expects shuffled shards, as `largebatch data
    import` writes them. Statistics have random images in any case."""

    mix: Mix | None = None
    """Mixup and CutMix; null: training images are not mixed."""

    eval_resize: Annotated[int, Field(gt=0, le=2 * MAX_SIDE)] | None
    """Clean images (validation, polishing): the short side is resized to this, then the centre
    of image_size is cut out; null shows the whole image."""

    interpolation: Interpolation = "bilinear"
    """Filter that resizes a part to image_size. `bicubic` is Catmull and Rom's, as in Pillow."""

    @property
    def train_split(self) -> int:
        """Number of training images, without those that are held out to validate."""
        return self.train_samples - (self.held_out.samples if self.held_out else 0)

    @property
    def val_split(self) -> int:
        """Number of images that an evaluation measures."""
        return self.held_out.samples if self.held_out else self.val_samples

    @property
    def unscheduled(self) -> Self:
        """The section with images of one size and kind, for runs of another length."""
        mix = self.mix and self.mix.model_copy(update={"until": None})
        return self.model_copy(update={"resolution": (), "mix": mix})

    @field_validator("flip", mode="before")
    @classmethod
    def _flip_is_a_choice(cls, flip: object) -> object:
        if flip is True or flip is False or flip == "alternating":
            return flip
        raise ValueError(f"input should be true, false or 'alternating', got {flip!r}")

    @model_validator(mode="after")
    def _numbers_fit_each_other(self) -> Self:
        for number, part in enumerate(self.resolution[:-1]):
            if part.until is None:
                raise ValueError(f"resolution.{number}.until: null is only for the last one")
        smallest = min([self.image_size, *(part.image_size for part in self.resolution)])
        if self.translate >= smallest:
            raise ValueError(
                f"translate ({self.translate}) must be below the smallest image_size ({smallest})"
            )
        intervals = {"crop_area": self.crop_area, "crop_aspect": self.crop_aspect}
        if self.erase is not None:
            intervals |= {"erase.area": self.erase.area, "erase.aspect": self.erase.aspect}
        for key, bounds in intervals.items():
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"{key}: the first bound must not exceed the second, got {bounds}")
        if self.eval_resize is not None and self.eval_resize < self.image_size:
            raise ValueError(
                f"eval_resize ({self.eval_resize}) must be at least image_size ({self.image_size})"
            )
        return self
