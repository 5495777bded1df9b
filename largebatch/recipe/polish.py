"""The section `polish`: Final Polishing, and the averages of weights before its statistics."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from largebatch.recipe.section import Choice, Duration, Positive, Samples, Section


def _is_empty(stages: tuple[object, ...]) -> bool:
    """Return True if a record needs no key for them: older runs have none."""
    return not stages


class SWA(Section):
    """The mean of the weights at a regular interval (arXiv:1803.05407).

    The learning rates are the schedule's: it pays off where they are high or constant, so that the
    weights move far enough.
    """

    over: Duration
    """The last part of the schedule, clean epochs included."""

    every: Duration
    """Interval between two weights of the mean; the last ones are those at the end of the schedule.
    In epochs only if the batch does not change within `over`."""


class Affine(Duration):
    """More updates after the schedule, of BatchNorm's scales and shifts and of the classifier."""

    lr: Positive
    """Learning rate of the first update; it falls to zero along half a cosine."""


class Statistics(Section):
    """The forward-only pass that measures BatchNorm's means and variances exactly."""

    samples: Samples
    """Number of clean training images that are measured."""


class Stage(Choice):
    """Base of the stages of other packages, which change the weights after the schedule.

    A builder takes the `largebatch.training.session.Session` of every worker, and runs the stage.
    """

    group: ClassVar = "stages"


class Polish(Section):
    """Final Polishing (Kasagi et al., HPDC 2020): fit BatchNorm to clean training data.

    The stages run in this order, and each ends with an evaluation. A model without BatchNorm has
    clean, ema and swa.
    """

    clean: Duration | None = None
    """The last part of the schedule trains on clean images, at the schedule's learning rate, and
    all weights move; null: none."""

    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of weights and running statistics: after every update
    EMA *= ema, EMA += (1 - ema) model. At the end of the schedule the EMA becomes the model, and
    the stages below work on it. It spans about 1 / (1 - ema) updates; null: no EMA."""

    swa: SWA | None = None
    """At the end of the schedule this mean of weights and running statistics becomes the model; in
    place of ema, and in a model with BatchNorm with statistics after it. null: none."""

    affine: Affine | None = None
    """More updates on clean images after the schedule, in which only BatchNorm's scales and
    shifts and the classifier move, by SGD: with the optimizer's momentum, its weight decay on the
    classifier's weight, and no trust ratio. Running statistics follow as in training. null: no
    such stage."""

    others: Annotated[tuple[Stage, ...], Field(max_length=100, exclude_if=_is_empty)] = ()
    """Stages of installed packages, each with its `kind`, one after the other: after affine, and
    before statistics."""

    statistics: Statistics | None = None
    """The last stage, in which no weight moves; null: none."""

    keep: Literal["always", "better"] = "always"
    """`better`: roll a stage back unless more of the held-out images are classified right after it
    than before it, or if its loss is no longer finite. `always`: keep the result of every stage; a
    loss that is not finite then ends the run."""

    held_out: Samples | None = None
    """For keep: better, the number of training images, chosen by the seed, that no stage trains or
    is measured on. Validation images never decide."""

    @model_validator(mode="after")
    def _stages_fit_each_other(self) -> Self:
        kinds = [stage.kind for stage in self.others]
        if len(kinds) > len({*kinds}):
            raise ValueError(f"others: each stage can run once, got {', '.join(kinds)}")
        if not any((self.clean, self.ema, self.swa, self.affine, self.others, self.statistics)):
            raise ValueError(
                "give at least one of clean, ema, swa, affine and statistics, or leave polish out"
            )
        if self.ema is not None and self.swa is not None:
            raise ValueError("ema and swa would each become the model: give one of the two")
        if self.keep == "better" and self.held_out is None:
            raise ValueError(
                "keep: better compares on images that are not trained on: give held_out"
            )
        if self.keep == "always" and self.held_out is not None:
            raise ValueError("held_out images would not be used: give keep: better too")
        return self
