"""What polish() measures: layers that are frozen, peculiar, or used in an unusual way."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from threads import Thread, on_threads
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError, MismatchError
from largebatch.models import with_span
from largebatch.optional import require_torchvision
from largebatch.polish import polish

CPU = Serial(torch.device("cpu"))
EPS = 1e-5


def images(*sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(sum(sizes), 3, 5, 5, dtype=torch.float64, generator=generator)
    scale = torch.arange(1.0, 4).view(3, 1, 1)
    return list((values * scale + scale + torch.arange(len(values)).view(-1, 1, 1, 1)).split(sizes))


BATCHES = images(4, 7, 5)


def moments(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    rows = torch.cat([it.movedim(1, -1).flatten(0, -2) for it in values])
    return rows.mean(0), rows.var(0)


def as_in_training(values: Tensor) -> Tensor:
    return F.batch_norm(values, None, None, training=True, eps=EPS)


def layers(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    body = [norm(3), nn.Conv2d(3, 3, 3), norm(3), nn.Tanh(), nn.Conv2d(3, 3, 1), norm(3)]
    model = nn.Sequential(*body, nn.Dropout())
    for layer in (body[0], body[2], body[5]):
        cast("Tensor", layer.running_mean).uniform_(1, 2)
        cast("Tensor", layer.running_var).uniform_(0.5, 2)
    return model.double()


@torch.no_grad()
def by_hand(model: nn.Sequential, frozen: set[int], batches: list[Tensor]) -> dict[int, Any]:
    """Run layer after layer; frozen ones normalise by their statistics, others by the batch's."""
    values, found = batches, {}
    for n, layer in enumerate(model):
        if isinstance(layer, nn.BatchNorm2d) and n not in frozen:
            found[n] = moments(values)
            values = [as_in_training(it) for it in values]
        else:
            values = [copy.deepcopy(layer).eval()(it) for it in values]
    return found


def freeze(model: nn.Module, *numbers: int) -> nn.Module:
    for n in numbers:
        model.get_submodule(str(n)).eval()
    return model


def head_in_training(model: nn.Module) -> nn.Module:
    model.eval().get_submodule("6").train()
    return model


@pytest.mark.parametrize(("change", "skip", "frozen"), [
    pytest.param(lambda it: freeze(it, 0), (), {0}, id="one in eval()"),
    pytest.param(lambda it: freeze(it, 0, 1, 3), (), {0}, id="a part in eval()"),
    pytest.param(lambda it: freeze(it, 2), ("0",), {0, 2}, id="one in eval(), one left out"),
    pytest.param(lambda it: it, "2", {2}, id="left out by a word"),
    pytest.param(lambda it: it.eval(), ["0"], {0}, id="left out of a model in eval()"),
    pytest.param(lambda it: it.eval(), (), set(), id="whole model in eval()"),
    pytest.param(lambda it: AveragedModel(it.eval()), (), set(), id="average of one in eval()"),
    pytest.param(head_in_training, (), set(), id="dropout alone in training"),
])  # fmt: skip
def test_frozen_layers_keep_statistics_and_normalise_by_them(
    change: Callable[[nn.Module], nn.Module], skip: list[str], frozen: set[int]
) -> None:
    model, before = change(layers()), layers()
    prefix = "module." if isinstance(model, AveragedModel) else ""
    drift = polish(model, BATCHES, CPU, skip=skip)
    assert {name.removeprefix(prefix) for name in drift.notes} == {str(n) for n in frozen}
    right = by_hand(before, frozen, BATCHES)
    assert [it.name.removeprefix(prefix) for it in drift] == [str(n) for n in right]
    for n in (0, 2, 5):
        layer = model.get_submodule(f"{prefix}{n}")
        pair = right.get(n) or (before[n].running_mean, before[n].running_var)
        torch.testing.assert_close(layer.running_mean, pair[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer.running_var, pair[1], rtol=1e-10, atol=1e-10)


def test_everything_frozen_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 0.*evaluation mode"):
        polish(freeze(layers(), 0, 2, 5), BATCHES, CPU)
    for name in ("7", "1"):
        with pytest.raises(ValueError, match=f"skip: '{name}'.*0, 2, 5"):
            polish(layers(), BATCHES, CPU, skip=["0", name])
    shared = layers()
    shared[2].running_mean = shared[0].running_mean
    with pytest.raises(ValueError, match="layer 0.*layer 2"):
        polish(shared, BATCHES, CPU, skip=["0"])


class Scaled(nn.BatchNorm2d):
    """Changes its input first."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- PyTorch's name
        return super().forward(2 * input + 1)


class OwnFormula(nn.BatchNorm2d):
    """Calls no function of torch, as in tutorials."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- PyTorch's name
        mean, var = (it.view(-1, 1, 1) for it in (self.running_mean, self.running_var))  # type: ignore[union-attr]
        return (input - mean) / (var + self.eps).sqrt()


class Masked(nn.BatchNorm2d):
    """Counts only some values, in training."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: A002
        input = input[0] if isinstance(input, list) else input  # noqa: A001
        return super().forward(input if mask is None else input * mask)


class Block(nn.Module):
    """Uses a layer in its own way."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.use = norm or nn.BatchNorm2d(3).double(), use

    def forward(self, values: Tensor) -> Tensor:
        return self.use(self.norm, values)


def functional(norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    return F.batch_norm(values, norm.running_mean, running_var=norm.running_var)


def native(norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    buffers = norm.running_mean, norm.running_var
    return torch.batch_norm(values, None, None, *buffers, False, 0.1, norm.eps, False)


def with_gradient(norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    """Forces: a gradient of the input, which depends on the moments of the batch."""
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        (force,) = torch.autograd.grad(norm(values).pow(3).sum(), values)
    return force


def force_by_hand(values: Tensor) -> Tensor:
    values = values.detach().requires_grad_()
    (force,) = torch.autograd.grad(as_in_training(values).pow(3).sum(), values)
    return force


def functional_gradient(norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    force: Tensor = torch.func.grad(lambda it: norm(it).pow(3).sum())(values)
    return force


@torch.inference_mode()
def inferring(norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    return cast("Tensor", norm(values))


USES = [
    pytest.param(Block(functional), lambda x: x, as_in_training, id="function with buffers"),
    pytest.param(Block(native), lambda x: x, as_in_training, id="native function with buffers"),
    pytest.param(Scaled(3), lambda x: 2 * x + 1, lambda x: as_in_training(2 * x + 1), id="input"),
    pytest.param(Masked(3), lambda x: x, as_in_training, id="optional argument"),
    pytest.param(Block(with_gradient), lambda x: x, force_by_hand, id="gradient inside"),
    pytest.param(Block(inferring), lambda x: x, as_in_training, id="inference mode"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "measured", "result"), USES)
def test_what_is_normalised_is_measured_and_normalised_as_in_training(
    layer: nn.Module, measured: Callable[[Tensor], Tensor], result: Callable[[Tensor], Tensor]
) -> None:
    """The layer behind shows what the first returns."""
    model = nn.Sequential(copy.deepcopy(layer), nn.BatchNorm2d(3)).double()
    polish(model, BATCHES, CPU)
    first = model[0].norm if isinstance(model[0], Block) else model[0]
    for found, right in ((first, measured), (model[1], result)):
        mean, var = moments([right(it).detach() for it in BATCHES])
        torch.testing.assert_close(found.running_mean, mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.running_var, var, rtol=1e-9, atol=1e-9)
    assert not any(it.grad is not None for it in model.parameters())


@pytest.mark.parametrize(("layer", "message"), [
    pytest.param(
        Block(lambda norm, x: norm(x, mask=x > 0), Masked(3)), r"norm takes \(Tensor, Te", id="mask"
    ),
    pytest.param(
        Block(lambda norm, x: norm(x, x > 0), Masked(3)), r"norm takes \(T", id="positional mask"
    ),
    pytest.param(
        Block(lambda norm, x: norm([x]), Masked(3)), r"norm takes \(list\)", id="list"
    ),
    pytest.param(
        Block(lambda norm, x: torch.func.vmap(lambda it: norm(it[None])[0])(x)), "norm is inside",
        id="vmap",
    ),
    pytest.param(Block(functional_gradient), "norm is inside", id="torch.func"),
    pytest.param(OwnFormula(3), "OwnFormula", id="own formula"),
])  # fmt: skip
def test_a_layer_whose_values_are_not_known_is_refused_by_name(
    layer: nn.Module, message: str
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), copy.deepcopy(layer)).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        polish(model, [it.clone() for it in BATCHES], CPU)
    assert "layer 1" in str(caught.value)
    torch.testing.assert_close(model.state_dict(), before)
    assert not any("forward" in vars(it) for it in model.modules())
    polish(model, [it.clone() for it in BATCHES], CPU, skip=["1"])


class Folds(nn.Module):
    """A convolution and BatchNorm, folded into one convolution in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3)

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            return cast("Tensor", self.norm(self.conv(values)))
        scale = (self.norm.get_buffer("running_var") + self.norm.eps).rsqrt()
        return F.conv2d(values, self.conv.weight * scale.view(-1, 1, 1, 1))


def test_buffers_that_a_block_reads_do_not_depend_on_the_batches() -> None:
    """A norm that is not used is named, and one whose buffers are read elsewhere is exact."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fold, self.norm, self.last = Folds(), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.register_buffer("positions", torch.arange(4.0).expand(3, 4))  # cannot be written

        def forward(self, values: Tensor) -> Tensor:
            values = self.norm(self.fold(values))
            result: Tensor = self.last(values * self.norm.get_buffer("running_var").view(-1, 1, 1))
            return result

    torch.manual_seed(0)
    models = [Both().double()]
    models.append(copy.deepcopy(models[0]))
    drifts = [
        polish(it, order, CPU) for it, order in zip(models, (BATCHES, BATCHES[::-1]), strict=True)
    ]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    assert [*drifts[0].notes] == ["fold.norm"]
    with pytest.raises(DataError, match="3 batches.*layer norm"):
        polish(Folds().double(), BATCHES, CPU)
    with pytest.raises(DataError, match="no worker"):
        polish(Folds().double(), [], CPU)


@pytest.mark.parametrize("span", [None, 2])
def test_a_forward_runs_models_of_several_inputs(span: int | None) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, one: Tensor, *, other: Tensor) -> dict[str, Tensor]:
            return {"loss": self.last(self.norm(one + other))}

    model = Adds().double()
    model = with_span(model, span) if span else model
    batches = [{"a": it.float(), "b": [it - it.float()]} for it in images(4, 6, 4)]
    polish(model, batches, CPU, forward=lambda net, it: net(it["a"].double(), other=it["b"][0]))
    values = images(4, 6, 4)
    groups = torch.cat(values).split(2) if span else values
    for norm, right in ((model.norm, values), (model.last, [as_in_training(x) for x in groups])):
        mean, var = moments(list(right))
        torch.testing.assert_close(norm.running_mean, mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(norm.running_var, var, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("change", "message"), [
    pytest.param(lambda it: cast("Tensor", it[1].weight).data[0, 0, 0, 0].add_(1e-9), "checksum",
                 id="a weight"),
    pytest.param(lambda it: it[0].running_mean.add_(1), "checksum", id="frozen statistics"),
    pytest.param(lambda it: it[5].eval(), "layers to measure", id="frozen on one worker"),
])  # fmt: skip
def test_workers_of_different_networks_are_not_pooled(
    change: Callable[[nn.Sequential], object], message: str
) -> None:
    def work(worker: Thread) -> None:
        own = cast("nn.Sequential", freeze(layers(), 0))
        own.get_buffer("2.running_var").add_(worker.rank)  # measured: may differ
        if worker.rank == 1:
            change(own)
        polish(own, BATCHES, cast("Backend", worker))

    with pytest.raises(MismatchError, match=message):
        on_threads(work, workers=2)


def test_frozen_classes_stay_as_they_are_and_are_named() -> None:
    require_torchvision()
    from timm.layers.norm_act import FrozenBatchNormAct2d
    from torchvision.ops import FrozenBatchNorm2d

    model = layers()
    model[0], model[2] = FrozenBatchNorm2d(3).double(), FrozenBatchNormAct2d(3).double()
    drift = polish(model, BATCHES, CPU)
    assert ([*drift.notes], [it.name for it in drift]) == (["0", "2"], ["5"])
    assert not model.get_buffer("0.running_mean").any()


class Unknown(nn.Module):
    """A layer with running statistics that is not one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(3))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.GroupNorm(1, 3), "nothing to polish"),
        (Unknown(), "layer 0.*Unknown"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "layer 0.*InstanceNorm2d"),
        (nn.LazyBatchNorm2d(), "layer 0.*initialised"),
    ],
)
def test_a_layer_that_cannot_be_measured_is_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        polish(nn.Sequential(layer).double(), BATCHES, CPU)


class GhostOfOthers(nn.BatchNorm2d):
    """As many codes write it: statistics of two ghost batches in one buffer, the first in use."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.ones(2 * channels))

    def forward(self, inputs: Tensor) -> Tensor:
        buffers = (self.get_buffer(name) for name in ("running_mean", "running_var"))
        mean, var = (it[: self.num_features] for it in buffers)
        return F.batch_norm(inputs, mean, var, self.weight, self.bias, False, 0.1, self.eps)


def test_ghost_batches_of_other_codes_are_refused_in_one_line() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), GhostOfOthers(4))
    with pytest.raises(ValueError, match="layer 1.* 4 .* 8"):
        polish(model.float(), [torch.randn(4, 3, 5, 5)], CPU)
    assert torch.equal(model[1].running_mean, torch.ones(8))  # type: ignore[arg-type]
