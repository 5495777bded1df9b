"""Muon (kellerjordan.github.io/posts/muon): momentum of matrices, orthogonalised.

For a matrix W (filters of a convolution: out x in*height*width) with gradient G:

    B = momentum * B + (1 - momentum) * G
    D = momentum * B + (1 - momentum) * G    with Nesterov momentum, else B
    W = (1 - lr * weight_decay) * W - lr * scale * NewtonSchulz(D)

NewtonSchulz is timm's, which computes in a given type. torch.optim.Muon computes in bfloat16 only
and takes no convolutions; both it and timm's Muon repeat all of the work on every worker. dion of
Microsoft shares the work, but only between workers of torch.distributed.

Here each worker orthogonalises some of the matrices, and one all-reduce distributes the results:
the numbers of all matrices, sent once per update, in the type of NewtonSchulz. A sum of one value
and zeros is exact, so every worker gets the same bits.

On a device with graphs the rate, the momentum and the decay are numbers there, so that a graph can
replay an update; see training/graph.py.
"""

import copy
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, assert_never

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from largebatch import accelerator
from largebatch.distributed.backend import Group, in_graphs
from largebatch.distributed.connection import running_backend
from largebatch.errors import RecipeError
from largebatch.models import classifier_weights, hidden_matrices, param_groups
from largebatch.optim import replay
from largebatch.optim.adamw import build_adamw
from largebatch.optim.building import Weights
from largebatch.optim.kernels.numbers import Numbers
from largebatch.optim.sgd import build_sgd
from largebatch.optional import require_muon
from largebatch.recipe import optimizers as sections

zeropower_via_newtonschulz = require_muon().zeropower_via_newtonschulz
AdjustLR = Literal["original", "match_rms_adamw"]
NSType = Literal["fp32", "bf16"]
_COEFFICIENTS = [(3.4445, -4.7750, 2.0315)]


class Muon(Optimizer):
    """Muon for some matrices, and an optimizer of torch for all other weights.

    `matrices` are what `largebatch.models.hidden_matrices` returns, `others` an optimizer of the
    other weights; its groups have a `lr_ratio`: their learning rate over that of Muon. Without one,
    it follows from the rate of the group. The default `workers` are those connected by
    torch.distributed or Horovod. Gradients must be averaged before `step`.

    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    >>> others = torch.optim.SGD(model[1].parameters(), lr=0.1)
    >>> optimizer = Muon([model[0].weight], others, lr=0.02)
    >>> [group["lr_ratio"] for group in optimizer.param_groups]
    [1.0, 5.0]
    """

    _numbers: Numbers | None = None
    """Numbers of the last step, on a device with graphs; a copy of an optimizer has none."""

    def __init__(  # noqa: PLR0913 -- the hyper-parameters of Muon
        self,
        matrices: Sequence[nn.Parameter],
        others: Optimizer,
        workers: Group | None = None,
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_dtype: NSType = "fp32",
        adjust_lr: AdjustLR = "original",
        normalize_weights: bool = False,
    ) -> None:
        """Create the optimizer; `ns_dtype` fp32 is the type of the weights, float64 too.

        With `normalize_weights` every matrix is scaled to norm sqrt(rows) before its update.
        """
        group = {
            "params": matrices,
            "lr_ratio": 1.0,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr": adjust_lr,
            "normalize_weights": normalize_weights,
        }
        # The schedule sets one rate in all groups, so theirs are kept as ratios to it.
        other_groups = [dict(other) for other in others.param_groups]
        for other in other_groups:
            if "lr_ratio" not in other:
                other["lr_ratio"] = other["lr"] / lr
            other["lr"] = lr
        super().__init__([group, *other_groups], {"lr": lr})
        self._others = others
        self._workers = workers or running_backend(matrices[0].device)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_others": self._others, "_workers": self._workers}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Muon":
        memo[id(self._workers)] = self._workers  # a connection, which copies share
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 -- a loss
        """Update the weights; every worker must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self._use_numbers()
        rows = zip(group["params"], group["steps"], group["kept"], strict=True)
        trained = [row for row in rows if row[0].grad is not None]
        directions = self._orthogonalize([weight for weight, _, _ in trained], group)
        for (weight, step, kept), direction in zip(trained, directions, strict=True):
            if group["normalize_weights"]:
                norm = weight.norm()
                weight.mul_(math.sqrt(len(weight)) / norm.masked_fill(norm == 0, 1))  # 0 stays 0
            weight.mul_(kept)
            if isinstance(step, Tensor):
                weight.addcmul_(direction, step)
            else:
                weight.add_(direction, alpha=step)
        self._lend()
        self._others.step()
        return loss

    def refusal(self) -> str | None:
        """Return why a graph cannot repeat the last step; None if it can."""
        if self._numbers is None:
            return "the numbers of Muon are on the host"
        if not in_graphs(self._workers):
            return "only NCCL's sums can be recorded, and Muon's are not"
        self._lend()
        return replay.refusal(self._others)

    def reads(self) -> object:
        """Return what a graph of the last step has fixed."""
        self._lend()
        keys = ("nesterov", "ns_steps", "ns_dtype", "normalize_weights")
        return replay.reads(self._others), [self.param_groups[0][key] for key in keys]

    def refresh(self) -> None:
        """Send hyper-parameters to the device: before a replay."""
        self._use_numbers()
        self._lend()
        assert isinstance(self._others, accelerator.Replayable), "see refusal"
        self._others.refresh()

    def _use_numbers(self) -> dict[str, Any]:
        """Return all matrices as one group with its numbers, on a device with graphs those there.

        They have the type of the weights, which must be long enough for them. Groups of matrices
        differ in their learning rates only.
        """
        groups = [group for group in self.param_groups if _holds_matrices(group)]
        group = groups[0]
        weights = [weight for layer in groups for weight in layer["params"]]
        momentum = group["momentum"]
        steps = [
            -layer["lr"] * _scale(weight, layer["adjust_lr"])
            for layer in groups
            for weight in layer["params"]
        ]
        kept = [1 - layer["lr"] * layer["weight_decay"] for layer in groups]
        numbers = [momentum, 1 - momentum, *kept, *steps]
        # Replays read numbers from one tensor, so weights on several devices are left to the host.
        # In 16 bits 1 - lr * weight_decay would often round to 1.
        kinds = {
            (weight.device, weight.dtype)
            for weight in weights
            if weight.device.type in accelerator.GRAPHS
        }
        if len(kinds) == 1 and all(weight.itemsize >= 4 for weight in weights):
            self._numbers = self._numbers or Numbers(*kinds.pop())
            numbers = list(self._numbers.use(numbers).unbind())
        momentum, rest, *others = numbers
        kept = others[: len(groups)]
        of_weights = [
            number for layer, number in zip(groups, kept, strict=True) for _ in layer["params"]
        ]
        return {
            **group,
            "params": weights,
            "momentum": momentum,
            "rest": rest,
            "kept": of_weights,
            "steps": others[len(groups) :],
        }

    def _orthogonalize(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if not weights:
            return []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            state["momentum_buffer"].lerp_(weight.grad, group["rest"])
        widest = functools.reduce(torch.promote_types, (weight.dtype for weight in weights))
        dtype = torch.bfloat16 if group["ns_dtype"] == "bf16" else widest
        numbers = [weight.numel() for weight in weights]
        # Zeros stay where other workers write: a sum with zeros is exact.
        flat = torch.zeros(sum(numbers), dtype=dtype, device=weights[0].device)
        parts = [
            part.view(weight.shape)
            for part, weight in zip(flat.split(numbers), weights, strict=True)
        ]
        # An iteration multiplies the matrix by its own product along the shorter side.
        costs = [math.prod(_sides(weight)) * min(_sides(weight)) for weight in weights]
        share = own_share(costs, rank=self._workers.rank, workers=self._workers.world_size)
        for places in _of_equal_shapes(share, weights):
            directions = [self._direction(weights[place], group) for place in places]
            matrices = directions[0] if len(places) == 1 else torch.stack(directions)
            orthogonal = zeropower_via_newtonschulz(
                matrices, group["ns_steps"], _COEFFICIENTS, dtype=dtype
            )
            for place, matrix in zip(
                places, orthogonal.view(-1, *directions[0].shape), strict=True
            ):
                parts[place].copy_(matrix.view(weights[place].shape))
        self._workers.all_reduce(flat).wait()
        return parts

    def _direction(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        grad = weight.grad
        assert grad is not None
        buffer = self.state[weight]["momentum_buffer"]
        direction: Tensor = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return direction.flatten(1)

    def _lend(self) -> None:
        """Give the other optimizer its own rates, and the state held here."""
        self._others.state = self.state
        self._others.param_groups = [
            {**group, "lr": group["lr"] * group["lr_ratio"]}
            for group in self.param_groups
            if not _holds_matrices(group)
        ]


def _holds_matrices(group: dict[str, Any]) -> bool:
    return "ns_steps" in group  # the groups of the other optimizer have no such key


def own_share(costs: Sequence[int], *, rank: int, workers: int) -> list[int]:
    """Return the places that a worker computes: the most expensive first.

    Each goes to the worker with least to do.

    >>> [own_share([2, 5, 4, 1], rank=rank, workers=3) for rank in range(3)]
    [[1], [2], [0, 3]]
    """
    loads = [(0, worker) for worker in range(min(workers, len(costs)))]
    share = []
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + costs[place], worker))
        if worker == rank:
            share.append(place)
    return share


def _of_equal_shapes(places: Sequence[int], weights: Sequence[Tensor]) -> Iterable[list[int]]:
    """Divide places into those of weights that are orthogonalised together.

    On a GPU these are matrices of equal shapes: small ones are bound by launches. A CPU multiplies
    single matrices faster.
    """
    batches: dict[object, list[int]] = {}
    for place in places:
        weight = weights[place]
        is_alone = weight.device.type == "cpu"
        key = place if is_alone else (_sides(weight), weight.dtype, weight.device)
        batches.setdefault(key, []).append(place)
    return batches.values()


def _sides(weight: Tensor) -> tuple[int, int]:
    return len(weight), weight[0].numel()


def _scale(weight: Tensor, adjust_lr: AdjustLR) -> float:
    """Return the factor of the learning rate for this weight.

    That of Muon's author is of the last two sides of the gradient: those of a kernel, not of the
    matrix that is orthogonalised.
    """
    rows, columns = _sides(weight)
    if adjust_lr == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if weight.ndim > 3:
        rows, columns = weight.shape[-2:]
    return math.sqrt(max(1, rows / columns))


def build_muon(section: sections.Muon, weights: Weights) -> Muon:
    """Build Muon for the hidden matrices of a model; raise RecipeError if it has none."""
    matrices = hidden_matrices(weights.model)
    if not matrices:
        name = type(weights.model).__name__
        raise RecipeError(f"optimizer.kind: muon: {name} has no hidden matrices; take another")
    others = _build_others(section.others, weights.model, matrices, muon_lr=weights.lr)
    settings = section.model_dump(exclude={*sections.OF_EVERY_KIND, "others"})
    return Muon(matrices, others, weights.workers, lr=weights.lr, **settings)


def _build_others(
    section: sections.MuonSGD | sections.MuonAdamW,
    model: nn.Module,
    matrices: list[nn.Parameter],
    *,
    muon_lr: float,
) -> Optimizer:
    taken = set(matrices)
    classifiers = classifier_weights(model)
    decayed, plain = (group["params"] for group in param_groups(model, weight_decay=0.0))
    head = [weight for weight in decayed if weight in classifiers]
    rest = [weight for weight in decayed if weight not in taken | classifiers]
    lr = section.lr or muon_lr
    head_lr = section.head_lr or lr
    decay = section.weight_decay
    bias_decay = section.bias_weight_decay
    groups: list[dict[str, Any]] = [
        {"params": rest, "lr_ratio": lr / muon_lr, "weight_decay": decay},
        {"params": head, "lr_ratio": head_lr / muon_lr, "weight_decay": decay},
        {"params": plain, "lr_ratio": lr / muon_lr, "weight_decay": bias_decay},
    ]
    match section:
        case sections.MuonSGD():
            return build_sgd(
                groups,
                lr=lr,
                momentum=section.momentum,
                nesterov=section.nesterov,
                scaled=False,  # a scaler steps Muon, and not this optimizer
            )
        case sections.MuonAdamW():
            betas = (section.beta1, section.beta2)
            return build_adamw(groups, lr=lr, betas=betas, eps=section.eps)
        case _:
            assert_never(section)
