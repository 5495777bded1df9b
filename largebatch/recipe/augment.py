"""The section `data.augment`: operations on the pixels of training images."""

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from largebatch.recipe.section import Fraction, NonNegative, Section

OperationSet = Literal["torchvision", "timm", "big_vision"]
GeometryFilter = Literal["nearest", "bilinear", "bicubic", "random"]
Shift = Annotated[float, Field(ge=0, le=0.5)]


class SetDefaults(NamedTuple):
    """Bounds and defaults of a set of operations."""

    most: int  # largest magnitude
    probability: float
    interpolation: GeometryFilter


SETS: dict[OperationSet, SetDefaults] = {
    "torchvision": SetDefaults(most=30, probability=1.0, interpolation="nearest"),
    "timm": SetDefaults(most=10, probability=0.5, interpolation="random"),
    # A larger magnitude would keep more than the 8 bits of a pixel.
    "big_vision": SetDefaults(most=20, probability=1.0, interpolation="nearest"),
}


class RandAugment(Section):
    """Several operations per image, all of one magnitude (arXiv:1909.13719)."""

    kind: Literal["rand_augment"]

    set: OperationSet = "torchvision"
    """Operations, and what a magnitude means. `torchvision`: 14 operations, as in its RandAugment.
    `timm`: 15, as in its rand-m9. `big_vision`: 16, as in its randaug(2, 10)."""

    operations: Annotated[int, Field(ge=1, le=16)] = 2
    """Number of operations per image, drawn with replacement."""

    magnitude: Annotated[float, Field(ge=0, le=30)] = 9
    """Strength of every operation: torchvision from 0 to 30 (whole), timm from 0 to 10, big_vision
    from 0 to 20."""

    increasing: bool = False
    """timm's -inc1: a larger magnitude is further from the image for every operation. Without it,
    timm's factors of colour, contrast, brightness and sharpness rise from 0.1 to 1.9, and solarize
    and posterize weaken."""

    std: Annotated[NonNegative, Field(le=100)] = 0.0
    """timm's -mstd: standard deviation of the magnitude, drawn for every operation and limited
    to 0 .. 10."""

    probability: Fraction | None = None
    """Probability that a drawn operation is applied; null: 0.5 for timm, 1 for the others."""

    interpolation: GeometryFilter | None = None
    """Filter that rotates, shears and translates. `random`: bilinear or bicubic, drawn for every
    operation. null: random for timm, nearest for the others."""

    @model_validator(mode="after")
    def _magnitude_belongs_to_the_set(self) -> Self:
        most = SETS[self.set].most
        if self.magnitude > most:
            raise ValueError(
                f"magnitude ({self.magnitude:g}) must be at most {most} for set: {self.set}"
            )
        if self.set == "torchvision" and self.magnitude != int(self.magnitude):
            raise ValueError(
                f"magnitude ({self.magnitude:g}) must be a whole number for set: torchvision, such "
                f"as {round(self.magnitude)}"
            )
        if self.set != "timm":
            for key in ("increasing", "std"):
                if value := getattr(self, key):
                    raise ValueError(
                        f"{key} ({value!r}) is only for set: timm; leave it out for {self.set}"
                    )
        return self


class TrivialAugment(Section):
    """One operation per image, of any magnitude: torchvision's TrivialAugmentWide.

    All of 14 operations and 31 magnitudes are equally likely (arXiv:2103.10158).
    """

    kind: Literal["trivial_augment"]

    interpolation: GeometryFilter = "nearest"
    """Filter that rotates, shears and translates. `random`: bilinear or bicubic, drawn for every
    operation."""


class ColorJitter(Section):
    """Brightness, contrast, saturation and hue, in random order: torchvision's ColorJitter."""

    kind: Literal["color_jitter"]

    brightness: Annotated[NonNegative, Field(le=100)] = 0.0
    """Factors are uniform from 1 minus this (at least 0) to 1 plus this."""

    contrast: Annotated[NonNegative, Field(le=100)] = 0.0
    """Factors are uniform from 1 minus this (at least 0) to 1 plus this."""

    saturation: Annotated[NonNegative, Field(le=100)] = 0.0
    """Factors are uniform from 1 minus this (at least 0) to 1 plus this."""

    hue: Shift = 0.0
    """Shifts of the hue are uniform from minus this to this; 1 is the whole circle."""

    @model_validator(mode="after")
    def _something_changes(self) -> Self:
        if not any([self.brightness, self.contrast, self.saturation, self.hue]):
            raise ValueError("set brightness, contrast, saturation or hue above 0")
        return self


Augment = RandAugment | TrivialAugment | ColorJitter
