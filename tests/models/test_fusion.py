"""Pairs of BatchNorm and ReLU: which layers are paired, and that nothing else changes.

Without kernels the second forward pass of a block calls the layers of the first one, and must give
its bits; with them it is compared with float64.
"""

import copy
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, run_kernels
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from largebatch import accelerator
from largebatch.distributed.serial import Serial
from largebatch.models import build, fusion, kernels, networks, with_span
from largebatch.models.batchnorm import SpanBatchNorm, Spans
from largebatch.models.fusion import count_pairs, describe_pairs, norm_relu, pair
from largebatch.optional import require_timm, require_torchvision

runs = pytest.mark.usefixtures("kernels_run")

__all__ = ["run_kernels"]
CPU = Serial(DEVICE)

require_torchvision()
require_timm()

from timm.layers import BlurPool2d, DropBlock2d, DropPath  # noqa: E402
from timm.models import resnet as timm_resnet  # noqa: E402
from torchvision.models import resnet as torchvision_resnet  # noqa: E402


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers in channels-last memory, as the kernels take them."""
    values = 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 1
    return values.movedim(1, -1).contiguous().movedim(-1, 1).to(DEVICE)


def shortcut() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16))


def drops_halves() -> nn.Module:
    layer: nn.Module = DropBlock2d(drop_prob=0.5, block_size=1)
    return layer


def drawn_shortcut() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.Dropout(0.5))


TorchvisionBasic = torchvision_resnet.BasicBlock
TorchvisionBottleneck = torchvision_resnet.Bottleneck
TimmBasic = timm_resnet.BasicBlock
TimmBottleneck = timm_resnet.Bottleneck

BLOCKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "torchvision basic": (lambda: TorchvisionBasic(8, 8), 2),
    "torchvision basic, shortcut": (lambda: TorchvisionBasic(8, 16, 1, shortcut()), 2),
    "torchvision bottleneck": (lambda: TorchvisionBottleneck(8, 2), 3),
    "torchvision bottleneck, shortcut": (lambda: TorchvisionBottleneck(8, 4, 1, shortcut()), 3),
    "timm basic": (lambda: TimmBasic(8, 8), 2),
    "timm basic, shortcut": (lambda: TimmBasic(8, 16, downsample=shortcut()), 2),
    "timm basic, drop path": (lambda: TimmBasic(8, 8, drop_path=DropPath(0.5)), 1),
    "timm basic, drawn shortcut": (
        lambda: TimmBasic(8, 16, downsample=drawn_shortcut(), drop_path=DropPath(0.5)),
        1,
    ),
    "timm basic, attention": (lambda: TimmBasic(8, 8, attn_layer="se"), 1),
    "timm basic, drop block": (lambda: TimmBasic(8, 8, drop_block=drops_halves), 1),
    "timm basic, blur": (lambda: TimmBasic(8, 8, dilation=2, aa_layer=BlurPool2d), 2),
    "timm basic, SiLU": (lambda: TimmBasic(8, 8, act_layer=nn.SiLU), 0),
    "timm bottleneck": (lambda: TimmBottleneck(8, 2), 3),
    "timm bottleneck, shortcut": (lambda: TimmBottleneck(8, 4, downsample=shortcut()), 3),
    "timm bottleneck, drop path": (lambda: TimmBottleneck(8, 2, drop_path=DropPath(0.5)), 2),
    "timm bottleneck, attention": (lambda: TimmBottleneck(8, 2, attn_layer="eca"), 2),
    "timm bottleneck, drop block": (lambda: TimmBottleneck(8, 2, drop_block=drops_halves), 2),
    "neighbours": (
        lambda: nn.Sequential(
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8),
            nn.Identity(),
            nn.ReLU(inplace=True),
            nn.BatchNorm2d(8),
            nn.Dropout(0.5),
            nn.ReLU(),
            nn.BatchNorm2d(8),
            nn.Identity(),
        ),
        1,
    ),
}
"""A block, and the number of its BatchNorm layers that are in pairs."""


def passes(block: nn.Module, *, training: bool) -> list[Tensor]:
    """Return the result of a pass, the gradients of images and weights, and the buffers."""
    block.train(training).zero_grad()
    images = draw(4, 8, 3, 3).requires_grad_()
    torch.manual_seed(1)  # drop paths and blocks draw
    out = block(images)
    (out * torch.linspace(-1, 2, out.numel(), device=DEVICE).view_as(out)).sum().backward()
    grads = [weight.grad for weight in (images, *block.parameters()) if weight.grad is not None]
    return [out, *grads, *block.buffers()]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_second_forward_pass_of_a_block_gives_the_bits_of_the_first(name: str) -> None:
    create, num = BLOCKS[name]
    torch.manual_seed(0)
    plain = with_span(create(), 2)
    paired = copy.deepcopy(plain)
    assert pair(paired)[0] == num
    assert "forward" in vars(type(paired))
    assert str(paired) == str(plain)
    for training in (True, False):
        expected = passes(plain, training=training)
        results = passes(paired, training=training)
        assert len(results) == len(expected)
        assert all(map(torch.equal, results, expected))


@runs
@pytest.mark.parametrize(
    "name",
    [
        "neighbours",
        pytest.param("timm basic, drawn shortcut", marks=pytest.mark.long),
        pytest.param("timm bottleneck, shortcut", marks=pytest.mark.long),
    ],
)
def test_a_block_in_the_kernels_computes_the_same(name: str) -> None:
    create, num = BLOCKS[name]
    torch.manual_seed(0)
    plain = with_span(create(), 4).to(DEVICE)
    paired = copy.deepcopy(plain)
    assert pair(paired)[0] == num
    real = kernels.batchnorm().normalise
    with mock.patch.object(kernels.batchnorm(), "normalise", side_effect=real) as normalise:
        results = passes(paired, training=True)
    assert sum(call.kwargs["relu"] for call in normalise.call_args_list) == num
    for result, expected in zip(results, passes(plain, training=True), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


NETWORKS = {
    "cifar_resnet20": (19, 19),
    "cifar_resnet9": (8, 8),
    "test_resnet": (12, 15),
    "torchvision/resnet18": (17, 20),
    "regnetx_002": (27, 44),
    "airbench": (0, 6),
}
"""Layers in pairs, and all: not those of shortcuts, and no other activation than ReLU."""


@pytest.mark.parametrize("name", NETWORKS)
def test_pairs_are_found_and_change_neither_names_nor_results(name: str) -> None:
    torch.manual_seed(0)
    plain = with_span(build(name, num_classes=4), 2)
    paired = copy.deepcopy(plain)
    assert pair(paired) == pair(paired) == NETWORKS[name]
    assert list(paired.state_dict()) == list(plain.state_dict())
    assert str(paired) == str(plain)
    images = torch.randn(4, 3, 32, 32)
    for training in (True, False):
        results = [
            model.train(training)(images) for model in (plain, paired, copy.deepcopy(paired))
        ]
        assert all(torch.equal(result, results[0]) for result in results[1:])


def test_recomputed_stages_of_timm_give_the_same_bits() -> None:
    torch.manual_seed(0)
    plain = with_span(build("test_resnet", num_classes=4), 2)
    plain.set_grad_checkpointing()  # type: ignore[operator]  # timm's
    paired = copy.deepcopy(plain)
    pair(paired)
    images = torch.randn(4, 3, 32, 32)
    with mock.patch("timm.models.checkpoint_seq", side_effect=timm_resnet.checkpoint_seq) as seq:
        results = [model(images) for model in (plain, paired)]
    assert torch.equal(*results)
    seq.assert_called_once()
    for result in results:
        result.sum().backward()
    for ours, theirs in zip(paired.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]  # every weight has one


def by_hand(block: Any, maps: Tensor) -> Tensor:  # noqa: ANN401 -- a block
    """The residual block of arXiv:1512.03385 with its option A, without `norm_relu`."""
    residual = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(maps)))))
    shortcut = maps[:, :, :: block.stride, :: block.stride]
    padded = torch.zeros_like(residual)
    padded[:, : shortcut.shape[1]] = shortcut
    return F.relu(residual + padded)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("outputs", [8, 16])
def test_the_residual_block_of_this_package_is_that_of_plain_layers(
    outputs: int, *, training: bool
) -> None:
    torch.manual_seed(0)
    block = networks._ResidualBlock(8, outputs, stride=outputs // 8).train(training)
    results = []
    for forward in (block.forward, functools.partial(by_hand, copy.deepcopy(block))):
        images = draw(4, 8, 4, 4).requires_grad_()
        out = forward(images)
        results.append([out, *torch.autograd.grad(out.square().sum(), images)])
    assert all(map(torch.equal, *results))


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / (exact.detach().norm() + 1e-30))


def trained(model: nn.Module, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Make an update of two micro-batches; return the loss, and gradients and buffers by name."""
    spans = Spans(model, CPU)
    total = torch.zeros((), device=DEVICE)
    for part in images.chunk(2):
        out = model(part)
        loss = (out * torch.linspace(-1, 2, out.numel(), device=DEVICE).view_as(out)).sum()
        loss.backward()
        total += loss.detach()
    spans.reduce()
    spans.update()
    grads = {name: it.grad for name, it in model.named_parameters() if it.grad is not None}
    return total, {**grads, **dict(model.named_buffers())}


@runs
@pytest.mark.parametrize("whole", [False, True])
def test_a_network_with_pairs_trains_as_pytorchs_kernels_do(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.batchnorm(), "WHOLE", whole)
    torch.manual_seed(0)
    block = TorchvisionBasic(8, 16, 1, shortcut())
    plain = with_span(nn.Sequential(nn.Conv2d(3, 8, 3), block), 2).to(DEVICE).double()
    ours = copy.deepcopy(plain).float().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    assert pair(ours) == (2, 3)
    launch = mock.Mock(side_effect=accelerator.launch)
    monkeypatch.setattr(accelerator, "launch", launch)
    images = draw(8, 3, 5, 5)
    loss, values = trained(ours, images)
    expected, exact = trained(plain, images.double())
    assert launch.call_count == 2 * 3 * (2 if whole else 4)  # micro-batches and layers
    assert error(loss, expected) < 1e-6
    for name, value in exact.items():
        assert error(values[name], value.double()) < 2e-5, name


class Derived(torchvision_resnet.BasicBlock):  # type: ignore[misc]  # torchvision is not typed
    """A block of the user, whose forward pass may come to be another."""


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.relu = nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(images))
        return out


class Reversed(nn.Sequential):
    def forward(self, images: Tensor) -> Tensor:
        for layer in reversed(self):
            images = layer(images)
        return images


def with_its_own_forward() -> nn.Module:
    block: nn.Module = TorchvisionBasic(8, 8)
    block.forward = functools.partial(TorchvisionBasic.forward, block)
    return block


@pytest.mark.parametrize(
    "create",
    [
        pytest.param(lambda: Derived(8, 8), id="derived class"),
        pytest.param(Unknown, id="unknown class"),
        pytest.param(lambda: Reversed(nn.ReLU(), nn.BatchNorm2d(8)), id="other order"),
        pytest.param(with_its_own_forward, id="forward pass of the block"),
        pytest.param(lambda: nn.Sequential(nn.BatchNorm2d(8), nn.GELU()), id="GELU"),
    ],
)
def test_other_blocks_keep_their_layers(create: Callable[[], nn.Module]) -> None:
    block = with_span(create(), 2)
    before = block.forward
    assert pair(block)[0] == 0
    assert block.forward == before or isinstance(block, nn.Sequential)
    torch.manual_seed(0)
    assert passes(block, training=True)[0].shape == (4, 8, 3, 3)


class NextVersion:
    """Forward passes of a later version of torchvision, or of this one with something around it."""

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return out

    decorated = torch.no_grad()(TorchvisionBasic.forward)

    callable = functools.partial(TorchvisionBasic.forward)


@runs
@pytest.mark.parametrize("name", ["forward", "decorated", "callable"])
def test_a_library_that_changed_its_forward_pass_keeps_it_and_the_log_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchvisionBasic, "forward", vars(NextVersion)[name])
    block = with_span(TorchvisionBasic(8, 8), 2).to(DEVICE)
    block = block.to(memory_format=torch.channels_last)
    assert pair(block) == (0, 2)
    (remark,) = describe_pairs(block)
    assert "torchvision.models.resnet.BasicBlock" in remark


def test_the_known_forward_passes_are_those_of_the_installed_libraries() -> None:
    for name, rewrite in fusion._REWRITES.items():
        module, _, kind = name.rpartition(".")
        method = getattr(getattr(importlib.import_module(module), kind), rewrite.method)
        assert fusion._digest(method) == rewrite.digest, inspect.getsource(method)


def test_a_digest_is_that_of_the_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        "def forward(self, x):\n    return self.relu(x)\n",
        'def forward(self, x: Tensor) -> Tensor:\n    """Text."""\n    return self.relu(x)  # it\n',
        "    def forward(self, x):\n\n        return self.relu( x )\n",
        "def forward(self, x):\n    return self.relu(self.bn(x))\n",
    ]
    digests = []
    for source in sources:
        monkeypatch.setattr(inspect, "getsource", lambda _, source=source: source)
        digests.append(fusion._digest.__wrapped__(lambda: None))
    assert len(set(digests[:3])) == 1
    assert digests[3] != digests[0]


def pairs_of_layers() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Identity(), nn.ReLU())


@runs
def test_hooks_and_evaluation_use_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    block = with_span(pairs_of_layers(), 2).to(DEVICE)
    assert pair(block) == pair(block) == (1, 1)
    pickled = pickle.loads(pickle.dumps(block))
    assert (count_pairs(pickled), pair(pickled)) == ((0, 1), (1, 1))
    assert "1 of 1" in "".join(describe_pairs(block))
    assert not [*describe_pairs(copy.deepcopy(block).double())]
    fused = kernels.batchnorm()
    normalise = mock.Mock(side_effect=fused.normalise)
    monkeypatch.setattr(fused, "normalise", normalise)
    images = draw(4, 3, 2, 2)
    block(images)
    assert normalise.call_args.kwargs["relu"]
    inputs: list[Tensor] = []
    hook = block[-1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    block(images)
    assert not normalise.call_args.kwargs["relu"]
    assert bool((inputs[0] < 0).any())
    hook.remove()
    block.eval()(images)
    assert normalise.call_count == 2
    assert block.append(nn.Flatten())(images).ndim == 2


class Doubled(nn.Module):
    """Parametrization of a weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Negated(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return -images


@runs
@pytest.mark.parametrize(
    ("layer", "name", "value"),
    [
        ("act1", "forward", torch.abs),
        ("", "bn1", nn.GroupNorm(2, 8)),
        ("", "forward", torch.square),
        *(
            pytest.param(*change, marks=pytest.mark.long)
            for change in (
                ("drop_block", "forward", torch.abs),
                ("", "act1", nn.GELU()),
                ("", "act2", nn.GELU()),
                ("", "drop_block", Negated()),
                ("", "se", Negated()),
                ("", "drop_path", Negated()),
                ("", "downsample", Negated()),
            )
        ),
    ],
)
def test_what_changes_after_pairing_is_called(layer: str, name: str, value: Any) -> None:  # noqa: ANN401 -- any attribute
    torch.manual_seed(0)
    block = with_span(TimmBasic(8, 8), 4).to(DEVICE)
    assert pair(block) == (2, 2)
    images = draw(4, 8, 2, 2)
    unchanged = block(images)
    setattr(block.get_submodule(layer), name, copy.deepcopy(value))
    block = block.to(DEVICE)
    expected = (
        value(images) if name == "forward" and not layer else TimmBasic.forward(block, images)
    )
    changed = block(images)
    torch.testing.assert_close(changed, expected, rtol=1e-5, atol=1e-5)
    assert (changed - unchanged).abs().max() > 0.01


@runs
@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (TimmBasic, "forward", lambda _, x: 2 * x),
        pytest.param(nn.ReLU, "forward", lambda _, x: x.abs(), marks=pytest.mark.long),
        pytest.param(nn.Identity, "forward", lambda _, x: x.neg(), marks=pytest.mark.long),
        (SpanBatchNorm, "forward", lambda _, x: x + 1),
        (F, "relu", lambda x, inplace=False: x.abs()),
    ],
)
def test_what_is_patched_after_pairing_is_called(
    place: Any,  # noqa: ANN401 -- a class or a module
    name: str,
    value: Any,  # noqa: ANN401 -- a function
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    block = with_span(TimmBasic(8, 8), 4).to(DEVICE)
    plain = copy.deepcopy(block)
    assert pair(block) == (2, 2)
    images = draw(4, 8, 2, 2)
    unchanged = block(images)
    monkeypatch.setattr(place, name, value)
    changed = block(images)
    torch.testing.assert_close(changed, plain(images), rtol=1e-5, atol=1e-5)
    assert (changed - unchanged).abs().max() > 0.01


@runs
@pytest.mark.parametrize("before", [False, True])
def test_a_parametrized_layer_normalises_with_the_weight_that_is_computed(*, before: bool) -> None:
    block, images = with_span(pairs_of_layers().to(DEVICE), 4), draw(4, 3, 2, 2)
    if before:
        register_parametrization(block[1], "weight", Doubled())
    assert pair(block) == (int(not before), 1)
    if not before:
        register_parametrization(block[1], "weight", Doubled())
    plain = nn.BatchNorm2d(8).to(DEVICE)
    plain.weight.data *= 2
    expected = F.relu(plain(block[0](images)))
    torch.testing.assert_close(block(images), expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(block(images).square().sum(), list(block[1].parameters())[-1:])
    assert grad.abs().sum() > 0
    other = pairs_of_layers()
    register_parametrization(other[1], "weight", Doubled())
    with pytest.raises(ValueError, match="layer 1"):
        with_span(other, 2)


def test_an_activation_inside_a_batchnorm_is_not_left_out() -> None:
    layer = with_span(build("regnetx_002", num_classes=2), 2).get_submodule("stem.bn")
    assert [*layer.children()]
    images = draw(4, 32, 2, 2)
    assert torch.equal(norm_relu(layer, images), F.relu(layer(images)))
    assert not fusion._fits([layer])


def replica(module: nn.Module) -> nn.Module:
    """Return a replica as torch.nn.parallel.replicate makes it, of the same device."""
    result: nn.Module = module._replicate_for_data_parallel()
    for name, weight in module.named_parameters(recurse=False):
        setattr(result, name, weight)
    return result


@runs
@pytest.mark.parametrize(
    "way", ["replica", *(pytest.param(way, marks=pytest.mark.long) for way in ("copy", "deepcopy"))]
)
def test_a_copy_of_a_block_computes_with_its_own_weights(way: str) -> None:
    """DataParallel's replicas have the attributes of the original and other weights."""
    block, images = with_span(TorchvisionBasic(8, 8).to(DEVICE), 4), draw(4, 8, 2, 2)
    assert pair(block) == (2, 2)
    twin: Any = replica(block) if way == "replica" else getattr(copy, way)(block)
    assert type(twin) is type(block)
    assert count_pairs(twin) == (2, 2)
    twin._modules = {**twin._modules, "conv1": nn.Conv2d(8, 8, 3, padding=1).to(DEVICE)}
    expected = TorchvisionBasic.forward(twin, images)
    torch.testing.assert_close(twin(images), expected, rtol=1e-5, atol=1e-5)
    assert (twin(images) - block(images)).abs().max() > 0.01
    replica(block.bn1)(images)  # as torch's
    Spans(block, CPU)
    with pytest.raises(ValueError, match="DataParallel"):
        replica(block.bn1)(images)
