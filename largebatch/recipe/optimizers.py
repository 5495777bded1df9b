"""The optimizer of a recipe: one section for each kind.

The rate is the schedule's. Biases and normalisation layers are neither decayed nor adapted by any
of them.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from largebatch.recipe.choices import Convention
from largebatch.recipe.sections import Momentum, NonNegative, Positive, Samples, Section, Updates


class LARS(Section):
    """Layer-wise adaptive rate scaling (arXiv:1708.03888)."""

    kind: Literal["lars"]

    convention: Convention
    """Where rate and trust ratio enter. `reference`: both inside the momentum (MLPerf's TF2 code;
    optax too, but only without weight decay). `scaled-momentum`: ratio inside, rate outside (timm).
    `outside`: both outside (Intel); it can blow up where old momentum meets a tiny gradient, which
    the ratio divides by. `fujitsu`: both inside, weight decay scaled by the peak rate (MLPerf v0.6,
    open division)."""

    momentum: Momentum = 0.9

    weight_decay: NonNegative = 1e-4
    """Applied to the tensors that are adapted; biases and normalisation layers get neither."""

    eta: Positive = 1e-3
    """Trust coefficient: |step| / |weight| at rate 1, before momentum and decay."""

    eps: NonNegative = 0.0
    """Added to the denominator of the trust ratio. MLPerf's TF2 code turns 0 into 1e-7."""

    clip_ratio: Positive | None = None
    """The largest trust ratio; null: no limit. LARS-ImageNet-PyTorch (NUS) has 50."""

    clip_gradient: Positive | None = None
    """Every element of a gradient is cut off at -clip_gradient and clip_gradient, weight decay
    included, that of biases and normalisation layers too; null: none is. NUS's code has 10."""


class SGD(Section):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    kind: Literal["sgd"]

    momentum: Momentum = 0.9

    weight_decay: NonNegative = 1e-4
    """Applied to weights; biases and normalisation layers get none."""

    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum above 0")
        return self


class Shampoo(Section):
    """Shampoo in blocks with another optimizer's step lengths (arXiv:2002.09018).

    pytorch-optimizer's ScalableShampoo. Unlike Google's code it preconditions no tensor of at most
    block_size numbers and adds matrix_eps times the largest eigenvalue; and it does not share the
    inverse roots between workers: each computes all of them.
    """

    kind: Literal["shampoo"]

    momentum: Momentum = 0.9
    """The library's beta1; the rate stands outside."""

    beta2: Momentum = 0.999
    """Of the moving averages that the inverse roots are taken of."""

    weight_decay: NonNegative = 1e-4
    """Added to the update when it has been preconditioned, as in Google's code."""

    nesterov: bool = True

    graft: Literal["sgd", "adagrad", "rmsprop", "none"] = "sgd"
    """Every tensor moves as far as this optimizer would move it; none: as far as Shampoo does."""

    block_size: Annotated[int, Field(ge=2, le=8192)] = 128
    """Largest side of the blocks that a tensor is cut into, each with matrices of its own."""

    start_step: Updates = 5
    """The first update that is preconditioned; those before are the grafted optimizer's."""

    root_every: Updates = 1
    """Updates between computations of the inverse roots."""

    root: Annotated[int, Field(ge=1, le=64)] | None = None
    """Statistics are raised to -1/root; null: twice the number of the block's dimensions."""

    matrix_eps: Positive = 1e-6
    """Part of the largest eigenvalue that is added to all before a root is taken."""


class ScheduleFree(Section):
    """Schedule-Free SGD (arXiv:2405.15682), by schedulefree's SGDScheduleFree.

    Gradients are computed at y; what is evaluated is x, an average of the weights. Every evaluation
    moves to x, measures its BatchNorm statistics and comes back to y. When the schedule ends, the
    model becomes x. The schedule's decay is constant, after its warm-up.
    """

    kind: Literal["schedule-free"]

    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """How far y lies from the last iterate, 0, towards x, 1."""

    weight_decay: NonNegative = 1e-4
    """Applied at y."""

    weight_power: NonNegative = 0.0
    """An update counts in the average as its number to this power; the library's r."""

    weight_lr_power: NonNegative = 2.0
    """It counts, too, as the highest rate so far to this power, so that the warm-up counts less."""

    statistics_samples: Samples | None = None
    """Clean training images that BatchNorm's statistics are measured on before every evaluation and
    when the schedule ends; null for a model without BatchNorm."""


class LAMB(Section):
    """Layer-wise adaptive moments (arXiv:1904.00962), by timm's Lamb."""

    kind: Literal["lamb"]

    beta1: Momentum = 0.9

    beta2: Momentum = 0.999

    eps: Positive = 1e-6
    """Added to the root of the second moment."""

    weight_decay: NonNegative = 0.01
    """Added, times the weight, to the adaptive step before the trust ratio is taken. The affine
    stage, which has no such ratio, decays nothing."""

    bias_correction: bool = True
    """Divide the moments by 1 - beta**step. You et al.'s code for ResNet-50 does not."""

    max_grad_norm: Positive | None = None
    """Scale gradients down where the norm of all together exceeds this; null: never."""
