"""The section `reduction`: how the gradients of a global batch become one."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.recipe.choices import Precision
from largebatch.recipe.sections import Section


class Reduction(Section):
    """How the gradients of a global batch become one, and what they are sent as."""

    kind: Literal["sum", "adasum"] = "sum"
    """`sum`: the mean gradient over the global batch. `adasum`: the mean gradients of `parts` of it
    are combined in pairs by how far they agree (arXiv:2006.02924), every tensor by itself: equal
    ones give their mean, orthogonal ones their sum."""

    parts: Annotated[int, Field(ge=2, le=65_536)] | None = None
    """For adasum, into how many parts of consecutive samples the global batch is divided: a power
    of two, in the paper the number of workers. Any number of workers that divides it, or that it
    divides, computes the same."""

    dtype: Precision = "fp32"
    """Gradients are sent in this type. They are divided by the global batch before they are rounded
    and summed, so that no sum overflows; those of normalisation layers stay in fp32, in one last
    group. fp16 needs precision: fp16, whose loss scale keeps small gradients from vanishing."""

    @model_validator(mode="after")
    def _parts_are_for_adasum(self) -> Self:
        if (self.kind == "adasum") != (self.parts is not None):
            raise ValueError("kind: adasum and parts belong together: give both or neither")
        if self.parts is not None and self.parts & (self.parts - 1):
            raise ValueError(f"parts ({self.parts}) must be a power of two: 2, 4, 8 ...")
        if self.kind == "adasum" and self.dtype != "fp32":
            raise ValueError(f"kind: adasum sends in fp32: leave dtype: {self.dtype} out")
        return self
