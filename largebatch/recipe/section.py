"""The base of all sections, the types and bounds they share, and how to walk through their keys."""

from collections.abc import Iterator
from inspect import signature
from typing import Annotated, Any, Self, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

MAX_UPDATES = 2_000_000
"""Updates of a run: four times those of ResNet-50's 90 epochs in batches of 256. Planning computes
every learning rate, which takes some seconds for these."""

MAX_EPOCHS = 1_000_000
"""Epochs of a run; the limit is high because a data set may be tiny. MAX_UPDATES holds too."""

MAX_SAMPLES = 2**25
"""Samples of a split: twice ImageNet-21k's. Every worker holds their order, 1 GB for these."""

MAX_BATCH = 2**24
"""Samples in one update: more than ImageNet-21k has. Their divisors are tried one by one."""

LARGEST = 3e38
"""Bounds learning rates and coefficients: fp32 holds no larger ones, and torch refuses them."""

Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Samples = Annotated[int, Field(gt=0, le=MAX_SAMPLES)]
Batch = Annotated[int, Field(gt=0, le=MAX_BATCH)]
Updates = Annotated[int, Field(gt=0, le=MAX_UPDATES)]
Epochs = Annotated[float, Field(gt=0, le=MAX_EPOCHS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]

CHOOSERS = ("kind", "source")
"""Keys whose values choose one section of a union; `source` is that of `data`."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are not coerced, nothing mutates."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **words: Any) -> None:  # noqa: ANN401 -- pydantic's
        """Show plain types in the signature, without pydantic's bounds."""
        super().__pydantic_init_subclass__(**words)
        hints, own = get_type_hints(cls), signature(cls)
        plain = [it.replace(annotation=hints[it.name]) for it in own.parameters.values()]
        cls.__signature__ = own.replace(parameters=plain)


class Duration(Section):
    """A stretch of training, in epochs or in steps."""

    epochs: Epochs | None = None
    steps: Updates | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self


def sections_of(annotation: object) -> list[type[Section]]:
    """Return the sections that a field may hold: one, or several for a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def kinds_of(section: type[Section]) -> tuple[str, ...]:
    """Return the values that choose this section in its union; none if it is in no union."""
    chooser = chooser_of(section)
    return () if chooser is None else get_args(section.model_fields[chooser].annotation)


def chooser_of(section: type[Section]) -> str | None:
    """Return the key that chooses this section in its union; None if it is in no union."""
    return next((key for key in CHOOSERS if key in section.model_fields), None)


def every_field(
    section: type[Section], prefix: str = ""
) -> Iterator[tuple[str, type[Section], FieldInfo]]:
    """Yield the dotted key of every field of a section and of those below it, and its owner."""
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        yield dotted, section, field
        for below in sections_of(field.annotation):
            yield from every_field(below, f"{dotted}.")
