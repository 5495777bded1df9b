"""What every section of a recipe shares: strictness, and the units of its numbers."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

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


class Span(Section):
    """A stretch of training, in epochs or in steps."""

    epochs: PositiveFloat | None = None
    steps: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give either epochs or steps")
        return self
