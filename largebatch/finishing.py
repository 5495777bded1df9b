"""What a recipe may say of Final Polishing: which stages there are, and when a stage is kept."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from largebatch.section import Section, Span


class Affine(Span):
    """More updates after the schedule, of BatchNorm's scales and shifts and of the classifier."""

    lr: PositiveFloat
    """The rate of the first of them; it falls to zero along half a cosine."""


class Statistics(Section):
    """The forward-only pass that measures BatchNorm's means and variances exactly."""

    samples: PositiveInt
    """How many clean training pictures are measured."""

    sequential: bool = False
    """Each layer is measured with the layers before it polished and normalising as in evaluation,
    in as many passes as that takes; false: in one pass, each normalising by its batch."""


class Polish(Section):
    """Final Polishing (Kasagi et al., HPDC 2020): let BatchNorm see clean training data.

    The stages come in this order, and each ends with an evaluation.
    """

    clean: Span | None = None
    """The last part of the schedule trains on clean pictures, at the schedule's rate, and all
    weights move; null: none of it."""

    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """After every update, average *= ema, average += (1 - ema) model: weights and running
    statistics alike. When the schedule has ended the average becomes the model, and the stages
    below work on it. 1 / (1 - ema) is how many updates it reaches back; null: no average."""

    affine: Affine | None = None
    """More updates on clean pictures after the schedule, in which only BatchNorm's scales and
    shifts and the classifier move, by SGD: with the optimizer's momentum, its weight decay on the
    classifier's weight, and no trust ratio. Running statistics follow as in training. null: no
    such stage."""

    statistics: Statistics | None = None
    """The last stage, in which no weight moves; null: none."""

    keep: Literal["always", "better"] = "always"
    """`better`: undo a stage unless more of the held-out pictures are classified right after it
    than before it, and one whose loss stops being a number. `always`: keep what every stage did;
    such a loss then ends the run."""

    held_out: PositiveInt | None = None
    """For keep: better, how many training pictures, chosen by the seed, no stage is trained or
    measured on. Validation pictures never decide."""

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not (self.clean or self.ema or self.affine or self.statistics):
            raise ValueError(
                "give at least one of clean, ema, affine and statistics; without polishing, leave "
                "polish out"
            )
        return self

    @model_validator(mode="after")
    def _somebody_judges(self) -> Self:
        if self.keep == "better" and self.held_out is None:
            raise ValueError(
                "keep: better compares on training pictures that are not trained on: give held_out"
            )
        if self.keep == "always" and self.held_out is not None:
            raise ValueError("held_out pictures would not be used: give keep: better too")
        return self
