"""The optimizer of a recipe: one section for each kind.

The learning rate is the schedule's. Biases and normalisation layers are neither decayed nor adapted
unless a setting says so, nor is what goes with them: class tokens, tables of positions, gains, and
what the model names in `no_weight_decay()` (`largebatch.models.param_groups`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from largebatch.recipe.choices import Convention
from largebatch.recipe.section import (
    Choice,
    Fraction,
    Momentum,
    NonNegative,
    Positive,
    Samples,
    Section,
    Updates,
)

if TYPE_CHECKING:
    from largebatch.recipe.keys import Keys


OF_EVERY_KIND = frozenset({"kind", "clip_norm", "layer_decay"})
"""Keys of every optimizer, which its own class does not take."""


class MomentumSGD(NamedTuple):
    """Settings of the momentum SGD that takes an optimizer's place in the affine stage."""

    momentum: float
    weight_decay: float = 0.0
    nesterov: bool = False


class Optimizer(Choice):
    """Base of the optimizers; a builder takes `largebatch.optim.building.Weights`."""

    group: ClassVar = "optimizers"

    takes_late_gradients: ClassVar[bool] = False
    """True if a protocol's servers can apply its updates one gradient at a time."""

    shares_updates: ClassVar[bool] = False
    """True if the workers share the work of an update."""

    averages_rates: ClassVar[bool] = False
    """True if its weights are an average over all rates so far, which should be constant."""

    has_trust_ratios: ClassVar[bool] = False
    """True if it has a trust ratio for every layer, for monitor: trust_ratios."""

    clip_norm: Positive | None = None
    """Scale the gradient down to this norm if it is longer, as torch.nn.utils.clip_grad_norm_ does:
    the gradient of all weights together, summed over workers and micro-batches, without the loss
    scale of fp16, once per update. Weights that are still frozen are not counted. null: never."""

    layer_decay: Fraction | None = None
    """For fine-tuning: every layer has the learning rate of the next one times this factor, and the
    last layer, the classifier, that of the schedule (arXiv:2106.08254). The layers are timm's: a
    stem, each block, the head. null: one rate for all layers."""

    def in_affine_stage(self) -> MomentumSGD:
        """Return the momentum SGD of the stage polish.affine.

        By default without weight decay: that of another optimizer may be of another scale.
        """
        return MomentumSGD(momentum=0.9)


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (arXiv:1708.03888)."""

    builder: ClassVar = "largebatch.optim.lars:build_lars"
    takes_late_gradients: ClassVar = True
    has_trust_ratios: ClassVar = True

    kind: Literal["lars"]

    convention: Convention = "reference"
    """Where learning rate and trust ratio enter. `reference`: both inside the momentum (MLPerf's
    TF2 code; optax too, but only without weight decay). `scaled-momentum`: ratio inside, rate
    outside (timm). `outside`: both outside (Intel); it can diverge where old momentum meets a tiny
    gradient, by which the ratio divides. `fujitsu`: both inside, weight decay scaled by the peak
    rate (MLPerf v0.6, open division)."""

    momentum: Momentum = 0.9

    weight_decay: NonNegative = 1e-4
    """Applied to the tensors that are adapted; biases and normalisation layers get neither."""

    eta: Positive = 1e-3
    """Trust coefficient: |step| / |weight| at learning rate 1, before momentum and decay."""

    eps: NonNegative = 0.0
    """Added to the denominator of the trust ratio. MLPerf's TF2 code turns 0 into 1e-7."""

    clip_ratio: Positive | None = None
    """The largest trust ratio; null: no limit. LARS-ImageNet-PyTorch (NUS) has 50."""

    clip_gradient: Positive | None = None
    """Clip every element of a gradient, weight decay included, to -clip_gradient .. clip_gradient;
    those of biases and normalisation layers too; null: no clipping. NUS's code has 10."""

    def in_affine_stage(self) -> MomentumSGD:
        """Return its own momentum and weight decay."""
        return MomentumSGD(self.momentum, self.weight_decay)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD."""

    builder: ClassVar = "largebatch.optim.sgd:build"
    takes_late_gradients: ClassVar = True

    kind: Literal["sgd"]

    momentum: Momentum = 0.9

    weight_decay: NonNegative = 1e-4
    """Applied to weights, without biases and normalisation layers."""

    bias_lr: Positive | None = None
    """Peak learning rate of biases and normalisation layers; it follows the schedule. null:
    schedule.peak_lr."""

    bias_weight_decay: NonNegative = 0.0
    """Applied to biases and normalisation layers."""

    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum above 0")
        return self

    def in_affine_stage(self) -> MomentumSGD:
        """Return its own settings."""
        return MomentumSGD(self.momentum, self.weight_decay, self.nesterov)


class Shampoo(Optimizer):
    """Shampoo in blocks, with the step lengths of another optimizer (arXiv:2002.09018).

    pytorch-optimizer's ScalableShampoo. Unlike Google's code it preconditions no tensor of at most
    block_size numbers and adds matrix_eps times the largest eigenvalue; and every worker computes
    all inverse roots.
    """

    builder: ClassVar = "largebatch.optim.shampoo:build_shampoo"

    kind: Literal["shampoo"]

    momentum: Momentum = 0.9
    """The library's beta1; the learning rate is outside the momentum."""

    beta2: Momentum = 0.999
    """Decay of the moving averages of which the inverse roots are taken."""

    weight_decay: NonNegative = 1e-4
    """Added to the update after preconditioning, as in Google's code."""

    nesterov: bool = True

    graft: Literal["sgd", "adagrad", "rmsprop", "none"] = "sgd"
    """Optimizer whose step length each tensor gets; none: Shampoo's own."""

    block_size: Annotated[int, Field(ge=2, le=8192)] = 128
    """Largest side of the blocks that a tensor is divided into; each has its own matrices."""

    start_step: Updates = 5
    """The first preconditioned update; earlier ones are those of the grafted optimizer."""

    root_every: Updates = 1
    """Updates between computations of the inverse roots."""

    root: Annotated[int, Field(ge=1, le=64)] | None = None
    """Statistics are raised to -1/root; null: twice the number of the block's dimensions."""

    matrix_eps: Positive = 1e-6
    """Share of the largest eigenvalue that is added to all eigenvalues before taking a root."""

    def in_affine_stage(self) -> MomentumSGD:
        """Return its own momentum and weight decay."""
        return MomentumSGD(self.momentum, self.weight_decay)


class ScheduleFree(Optimizer):
    """Schedule-Free SGD (arXiv:2405.15682), by schedulefree's SGDScheduleFree.

    Gradients are computed at y; evaluations use x, an average of the weights. Every evaluation
    moves to x, measures its BatchNorm statistics and returns to y. At the end of the schedule the
    model becomes x. The schedule's decay is constant, after its warm-up.
    """

    builder: ClassVar = "largebatch.optim.schedule_free:build_schedule_free"
    averages_rates: ClassVar = True

    kind: Literal["schedule-free"]

    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Place of y between the last iterate, 0, and x, 1."""

    weight_decay: NonNegative = 1e-4
    """Applied at y."""

    weight_power: NonNegative = 0.0
    """Exponent r: an update's weight in the average is its number to this power."""

    weight_lr_power: NonNegative = 2.0
    """The weight is also the highest learning rate so far to this power, so that the warm-up counts
    less."""

    statistics_samples: Samples | None = None
    """Number of clean training images on which BatchNorm's statistics are measured, before every
    evaluation and at the end of the schedule; null for a model without BatchNorm."""

    def in_affine_stage(self) -> MomentumSGD:
        """Return its own momentum and weight decay."""
        return MomentumSGD(self.momentum, self.weight_decay)

    def conflicts(self, recipe: "Keys") -> Iterator[str]:
        """Yield what else the recipe has to average or lower the rate with."""
        polish = recipe.polish
        replaces = "optimizer.kind: schedule-free averages the weights"
        if recipe.schedule.decay.kind not in {"constant", "fix"}:
            yield (
                f"{replaces} instead of lowering the rate: schedule.decay must be "
                f"{{kind: constant}}, got {recipe.schedule.decay.kind}"
            )
        for key in ("ema", "swa"):
            if polish is not None and getattr(polish, key) is not None:
                yield f"polish.{key}: {replaces} already; leave it out"
        if polish is not None and polish.clean and polish.keep == "better":
            yield (
                f"polish.clean cannot be rolled back: {replaces} of the whole schedule; leave out "
                "clean or keep: better"
            )
        if (self.statistics_samples is None) != (recipe.batch.bn_span is None):
            yield (
                "optimizer.statistics_samples is for models with BatchNorm: give it and "
                "batch.bn_span, or neither"
            )


class LAMB(Optimizer):
    """Layer-wise adaptive moments (arXiv:1904.00962), by timm's Lamb."""

    builder: ClassVar = "largebatch.optim.lamb:build_lamb"

    kind: Literal["lamb"]

    beta1: Momentum = 0.9

    beta2: Momentum = 0.999

    eps: Positive = 1e-6
    """Added to the root of the second moment."""

    weight_decay: NonNegative = 0.01
    """Added, times the weight, to the adaptive step before the trust ratio is taken. The affine
    stage has no such ratio and no decay."""

    bias_correction: bool = True
    """Divide the moments by 1 - beta**step. You et al.'s code for ResNet-50 does not."""

    max_grad_norm: Positive | None = None
    """timm's own form of clip_norm, as a part of LAMB: gradients are divided by max(1, norm /
    max_grad_norm). timm's default is 1; null: never."""

    @model_validator(mode="after")
    def _clips_once(self) -> Self:
        if self.clip_norm is not None and self.max_grad_norm is not None:
            raise ValueError("clip_norm and max_grad_norm both clip the gradient: give one of them")
        return self

    def in_affine_stage(self) -> MomentumSGD:
        """Return its first decay as the momentum."""
        return MomentumSGD(self.beta1)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101), as torch.optim.AdamW."""

    builder: ClassVar = "largebatch.optim.adamw:build"

    kind: Literal["adamw"]

    beta1: Momentum = 0.9

    beta2: Momentum = 0.999

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    weight_decay: NonNegative = 0.01
    """Each update first multiplies the weights by 1 - learning rate * weight_decay; biases and
    normalisation layers are not decayed."""

    def in_affine_stage(self) -> MomentumSGD:
        """Return its first decay as the momentum."""
        return MomentumSGD(self.beta1)


class _MuonOthers(Section):
    """The weights that Muon does not take: first layer, classifier, biases and normalisation."""

    head_lr: Positive | None = None
    """Peak learning rate of the classifier's weights, without its biases; null: `lr`."""

    weight_decay: NonNegative = 0.0
    """Applied to the first layer and the classifier, without their biases."""

    bias_weight_decay: NonNegative = 0.0
    """Applied to biases and normalisation layers. airbench decays them."""


class MuonSGD(_MuonOthers):
    """The weights that Muon does not take, by torch.optim.SGD."""

    kind: Literal["sgd"]

    lr: Positive
    """Peak learning rate of these weights. Like Muon's it follows `schedule`."""

    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9

    nesterov: bool = True

    def in_affine_stage(self) -> MomentumSGD:
        """Return its own settings."""
        return MomentumSGD(self.momentum, self.weight_decay, self.nesterov)


class MuonAdamW(_MuonOthers):
    """The weights that Muon does not take, by torch.optim.AdamW."""

    kind: Literal["adamw"]

    lr: Positive | None = None
    """Peak learning rate of these weights. Like Muon's it follows `schedule`. null:
    schedule.peak_lr, which fits both with adjust_lr: match_rms_adamw."""

    beta1: Momentum = 0.9

    beta2: Momentum = 0.95

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    def in_affine_stage(self) -> MomentumSGD:
        """Return its first decay as the momentum."""
        return MomentumSGD(self.beta1)


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalised (kellerjordan.github.io/posts/muon).

    Takes the filters of convolutions, as out x in*height*width, and other matrices. The first
    layer, the classifier, embeddings, depthwise convolutions, biases and normalisation layers
    are updated by `others`. Newton-Schulz is timm's; the workers share it.
    """

    builder: ClassVar = "largebatch.optim.muon:build_muon"
    shares_updates: ClassVar = True

    kind: Literal["muon"]

    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of the learning rate for a matrix of rows x columns. `original`: sqrt(max(1,
    rows / columns)), and for a convolution that of its kernel, height x width, as in Keller
    Jordan's code: 1 where it is square. `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), with which
    steps are as long as those of AdamW (arXiv:2502.16982), so that AdamW's rates can be used."""

    momentum: Momentum = 0.95

    nesterov: bool = True

    weight_decay: NonNegative = 0.01
    """Each update first multiplies the matrices by 1 - learning rate * weight_decay."""

    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Iterations of Newton-Schulz."""

    ns_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which Newton-Schulz computes and its results are sent. `bf16`, as in Keller Jordan's
    code, is faster on GPUs and slower on most CPUs; then rounding is visible: another number of
    workers changes an update in its third digit."""

    normalize_weights: bool = False
    """Scale every matrix to norm sqrt(rows) before each update, as airbench does."""

    others: Annotated[MuonSGD | MuonAdamW, Field(discriminator="kind")] = MuonAdamW(kind="adamw")

    @model_validator(mode="after")
    def _rates_have_one_scale(self) -> Self:
        if self.others.lr is None and self.adjust_lr == "original":
            raise ValueError(
                "adjust_lr: original needs others.lr: schedule.peak_lr is Muon's; or take "
                "match_rms_adamw"
            )
        return self

    def in_affine_stage(self) -> MomentumSGD:
        """Return the settings of the weights that it does not take."""
        return self.others.in_affine_stage()
