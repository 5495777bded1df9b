"""What a recipe may say of its pictures: where they come from, and what is shown of each."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from largebatch.section import Fraction, PositiveTriple, Section, Triple

Decoder = Literal["dali", "torchvision"]
Interpolation = Literal["bilinear", "bicubic"]
Cache = Literal["memory", "device"]


class Data(Section):
    """The pictures, and how they are shown to the model."""

    source: Literal["folder", "digits", "synthetic"]
    """`folder`: pictures or tar shards under --data. `digits`: scikit-learn's 1,797 handwritten
    digits, embedded. `synthetic`: made up, for trying a recipe without its data."""

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

    interpolation: Interpolation = "bilinear"
    """How a part is resized to image_size. `bicubic` is Catmull and Rom's, as in Pillow."""

    antialias: bool = True
    """Widen the filter where a part is made smaller, as Pillow always does; false needs DALI."""

    decoder: Decoder = "dali"
    """What decodes and resizes the pictures, unless there is a cache; --decoder overrides it."""

    eval_decoder: Decoder | None = None
    """What decodes the clean pictures instead; null: the same. Their pixels differ slightly."""

    cache: Cache | None = None
    """Decode once and keep the pixels of small sets. `memory`: in one file that all workers of a
    machine map, in the user's cache, where a file is removed after 30 days without use. `device`:
    besides on the GPU of every worker; on a CPU that is `memory`. null: decode each time."""

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

    @model_validator(mode="after")
    def _somebody_can_do_it(self) -> Self:
        if self.cache is not None and self.source == "synthetic":
            raise ValueError(f"cache: {self.cache} keeps decoded pictures, and these are synthetic")
        if self.cache is not None and self.eval_decoder is not None:
            raise ValueError(
                f"eval_decoder: {self.eval_decoder} would not be used: cache: {self.cache} decodes "
                "all pictures once"
            )
        if not self.antialias and (self.cache or "torchvision" in self.decoders):
            raise ValueError(
                "antialias: false can only be done by decoder: dali, without eval_decoder or cache"
            )
        return self

    @property
    def decoders(self) -> tuple[Decoder, Decoder]:
        """Who decodes training pictures and who clean ones, where there is no cache."""
        return self.decoder, self.eval_decoder or self.decoder

    def who_decodes(self) -> str:
        """Say in words where pixels come from, and whether all of them come from there."""
        if self.source == "synthetic":
            return "made up"
        if self.cache is not None:
            where = "; on CPU workers: the same as memory" if self.cache == "device" else ""
            return f"decoded once, kept as bytes (cache: {self.cache}{where})"
        train, clean = self.decoders
        if train == clean:
            return f"decoded by {train}"
        return f"decoded by {train} to train and by {clean} to evaluate: not the same pixels"
