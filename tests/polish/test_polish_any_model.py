"""polish() on every kind of model, against float64 moments by hand, on 1 to 4 gloo workers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_forked_workers import on_forked_workers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.modules.batchnorm import _NormBase

from largebatch.distributed.serial import Serial
from largebatch.optional import require_torchvision
from largebatch.polish import polish
from largebatch.training import evaluate

CPU = Serial(torch.device("cpu"))
SIZES = (4, 3, 2, 5, 7, 2)
SHARES = {1: [(0, 6)], 2: [(0, 4), (4, 6)], 3: [(0, 0), (0, 1), (1, 6)]}
SHARES[4] = [(0, 3), (3, 5), (5, 5), (5, 6)]
"""Batches of each worker, from and until; some workers have none."""

Statistics = dict[str, tuple[Tensor, Tensor]]


class OwnNorm(_NormBase):
    """A user's own layer, which normalises like BatchNorm in evaluation."""

    def forward(self, values: Tensor) -> Tensor:
        mean, var = (None, None) if self.training else (self.running_mean, self.running_var)
        return F.batch_norm(
            values, mean, var, self.weight, self.bias, training=self.training, eps=self.eps
        )


class NaiveSyncBatchNorm(nn.BatchNorm2d):
    """Like detectron2's: sums over workers in training, and is BatchNorm2d in evaluation."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- PyTorch's name
        if self.training:
            dist.all_reduce(torch.zeros(1))
        return super().forward(input)


def timms(channels: int) -> nn.Module:
    from timm.layers.norm_act import BatchNormAct2d

    layer: nn.Module = BatchNormAct2d(channels, act_layer=nn.Tanh, drop_layer=nn.Dropout)
    return layer


def timms_synchronised(channels: int) -> nn.Module:
    from timm.layers.norm_act import convert_sync_batchnorm

    layer: nn.Module = convert_sync_batchnorm(timms(channels))
    return layer


def instance(channels: int) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    body = [norm(3), nn.Conv2d(3, 4, 3), norm(4), nn.Tanh(), nn.Conv2d(4, 5, 3), norm(5)]
    model = nn.Sequential(*body, nn.Dropout(), nn.Flatten(), nn.Linear(20, 7))
    for layer in body:
        if isinstance(layer, _NormBase):
            nn.init.uniform_(layer.weight, 0.5, 2)
    return model.double()


def sharded(model: nn.Sequential, **how: Any) -> nn.Sequential:  # noqa: ANN401
    """Shard some layers alone, the others together."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[1], model[2], model):
        fully_shard(layer, mesh=mesh, **how)
    return model


def compiled(model: nn.Module) -> nn.Module:
    whole = torch.compile(model, backend="eager")
    assert isinstance(whole, nn.Module)
    with torch.no_grad():
        whole(batches()[0])
    return whole


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    with torch.no_grad():
        model(batches()[0])
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": network,
    "SyncBatchNorm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(network()),
    "timm's BatchNormAct2d": lambda: network(timms),
    "timm's SyncBatchNormAct": lambda: network(timms_synchronised),
    "detectron2's NaiveSyncBatchNorm": lambda: network(NaiveSyncBatchNorm),
    "own subclass of _NormBase": lambda: network(OwnNorm),
    "InstanceNorm": lambda: network(instance),
    "float32": lambda: network().float(),
    "InstanceNorm, float32": lambda: network(instance).float(),
    "compiled": lambda: compiled(network()),
    "compiled in place": lambda: compiled_in_place(network()),
    "DataParallel": lambda: nn.DataParallel(network()),
    "sharded": lambda: sharded(network()),
    "sharded, InstanceNorm": lambda: sharded(network(instance)),
    "sharded, compiled": lambda: compiled(sharded(network())),
    "sharded, not resharded": lambda: sharded(network(), reshard_after_forward=False),
}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(SIZES), 3, 6, 6, dtype=torch.float64, generator=generator)
    images += torch.arange(len(images)).view(-1, 1, 1, 1) / 9  # images differ
    return list(images.split(SIZES))


def share() -> list[Tensor]:
    begin, end = SHARES[dist.get_world_size()][dist.get_rank()]
    return batches()[begin:end]


def statistics(model: nn.Module) -> Statistics:
    """Return copies of a model's running statistics, without the names of wrappers."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, _NormBase):
            pair = layer.get_buffer("running_mean").clone(), layer.get_buffer("running_var").clone()
            found[name.removeprefix("module.").removeprefix("_orig_mod.")] = pair
    return found


@torch.no_grad()
def by_hand(model: nn.Sequential, *, sequential: bool = False) -> Statistics:
    """Return the expected statistics: run layer after layer on all batches, in float64."""
    model = copy.deepcopy(model).double().eval()
    values, found = batches(), {}
    for name, layer in model.named_children():
        if isinstance(layer, _NormBase):
            found[name] = moments(values, by_sample=isinstance(layer, nn.InstanceNorm2d))
            layer.running_mean, layer.running_var = found[name]
            values = [layer(v) if sequential else as_in_training(layer, v) for v in values]
        else:
            values = [layer(v) for v in values]
    return found


def moments(values: list[Tensor], *, by_sample: bool) -> tuple[Tensor, Tensor]:
    if by_sample:
        rows = torch.cat(values).flatten(2)
        return rows.mean(2).mean(0), rows.var(2).mean(0)
    rows = torch.cat(values).transpose(0, 1).flatten(1)
    return rows.mean(1), rows.var(1)


def as_in_training(layer: _NormBase, values: Tensor) -> Tensor:
    if isinstance(layer, nn.InstanceNorm2d):
        return F.instance_norm(values, weight=layer.weight, bias=layer.bias, eps=layer.eps)
    out = F.batch_norm(values, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    act = getattr(layer, "act", nn.Identity())
    result: Tensor = act(out)
    return result


def assert_close(found: Statistics, right: Statistics, *, rel: float) -> None:
    assert found.keys() == right.keys()
    for name, pair in right.items():
        for value, expected in zip(found[name], pair, strict=True):
            torch.testing.assert_close(value.double(), expected, rtol=rel, atol=rel)


def on_every_worker(value: Any) -> list[Any]:  # noqa: ANN401
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def polish_every_kind() -> dict[str, list[Statistics]]:
    """Polish each kind of model; return the statistics of every worker."""
    require_torchvision()
    dist.init_process_group("gloo")
    found = {}
    for name, make in KINDS.items():
        model = make()
        dtype = next(model.buffers()).dtype
        polish(model, [images.to(dtype) for images in share()])
        found[name] = on_every_worker(statistics(model))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 4))]
)
def test_every_kind_of_model_has_the_moments_of_all_workers_images(workers: int) -> None:
    require_torchvision()
    found = on_forked_workers(polish_every_kind, workers=workers)
    assert found.keys() == KINDS.keys()
    norms = {"timm": timms, "InstanceNorm": instance}
    for name, of_workers in found.items():
        norm = next((norms[key] for key in norms if key in name), nn.BatchNorm2d)
        rel = 1e-6 if "float32" in name else 1e-10
        for own in of_workers:
            assert_close(own, by_hand(network(norm)), rel=rel)


def is_divided(layer: nn.Module) -> bool:
    return type(layer.get_parameter("weight")).__name__ == "DTensor"


def update(model: nn.Sequential) -> list[Tensor]:
    """Return the complete weights after an update; check what is gathered in between."""
    assert all(is_divided(model[n]) for n in (0, 1, 8))
    loss = model(batches()[dist.get_rank()]).square().sum()
    assert [is_divided(model[n]) for n in (0, 1, 8)] == [False, True, False]
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model.zero_grad()
    weights: list[Any] = list(model.parameters())
    return [weight.full_tensor() for weight in weights]


def copy_statistics(source: nn.Module, target: nn.Module) -> None:
    for name, (mean, var) in statistics(source).items():
        layer = target.get_submodule(name)
        layer.running_mean, layer.running_var = mean, var


def update_after_polishing() -> None:
    """Compare updates with those of a model that has the same statistics from the beginning."""
    dist.init_process_group("gloo")
    model, other = (sharded(network().eval()) for _ in "ab")
    labelled = [(images, torch.arange(len(images)) % 7) for images in share()]
    for sequential in (False, True):  # before the first forward pass, and later
        polish(model, share(), sequential=sequential)
        assert evaluate(model, labelled).samples == sum(SIZES)
        copy_statistics(model, other)
        assert all(map(torch.equal, update(model), update(other)))
    dist.destroy_process_group()


def update_after_failures() -> None:
    """Fail inside a layer that is gathered alone, in one of the root, and on one worker only."""
    dist.init_process_group("gloo")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model, other = (sharded(network().eval()) for _ in "ab")
    before = statistics(model)
    for broken in (model[1], model[4]):
        hook = broken.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            polish(model, batches())
        hook.remove()
        assert_close(statistics(model), before, rel=0)
        assert all(map(torch.equal, update(model), update(other)))
    if dist.get_rank():
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, ((images, fail()) for images in batches()), CPU)  # type: ignore[func-returns-value]
    else:
        pairs = [(images, torch.zeros(len(images), dtype=torch.long)) for images in batches()]
        evaluate(model, pairs, CPU)
    assert all(map(torch.equal, update(model), update(other)))
    dist.destroy_process_group()


def polish_changed_weights() -> None:
    """Change weights that a forward pass has gathered, as averages of weights do."""
    dist.init_process_group("gloo")
    model, complete = sharded(network().eval()), network()
    weights = list(model.parameters())
    model(batches()[0])
    for weight, target in zip(weights, complete.parameters(), strict=True):
        weight.data.mul_(2)
        target.data.mul_(2)
    polish(model, share())
    assert_close(statistics(model), by_hand(complete), rel=1e-10)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "work", [update_after_polishing, update_after_failures, polish_changed_weights]
)
def test_a_sharded_model_is_as_before_apart_from_its_statistics(work: Callable[[], None]) -> None:
    on_forked_workers(work, workers=2)


def refusal_of_tensor_parallelism() -> str:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"8": ColwiseParallel()})
    with pytest.raises(ValueError, match="weights divided over workers") as caught:
        polish(model, share())
    with pytest.raises(ValueError, match="weights divided over workers"):
        evaluate(model, [(images, torch.zeros(len(images)).long()) for images in share()])
    dist.destroy_process_group()
    return str(caught.value)


def test_tensor_parallelism_is_refused() -> None:
    message = on_forked_workers(refusal_of_tensor_parallelism, workers=2)
    assert message.endswith("pass a complete copy of it")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [torch.float32, None])
def test_statistics_of_half_precision_are_rounded_once(
    dtype: torch.dtype, given: torch.dtype | None
) -> None:
    """Images are float32, or of the model's type; each layer is run here by hand."""
    model = network().to(dtype)
    polish(model, [images.to(given or dtype) for images in batches()], CPU)
    values = [images.to(dtype) for images in batches()]
    for name, layer in network().to(dtype).eval().named_children():
        if isinstance(layer, nn.BatchNorm2d):
            mean, var = moments([v.double() for v in values], by_sample=False)
            found = model.get_submodule(name)
            assert found.get_buffer("running_mean").equal(mean.to(dtype))
            assert found.get_buffer("running_var").equal(var.to(dtype))
            for n, own in enumerate(values):
                rows = own.double().transpose(0, 1).flatten(1)
                batch = rows.mean(1).to(dtype), rows.var(1, correction=0).to(dtype)
                values[n] = F.batch_norm(own, *batch, layer.weight, layer.bias, eps=layer.eps)
        else:
            values = [layer(v).detach() for v in values]


class Unknown(nn.Module):
    """A layer with running statistics that is none of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_var", torch.ones(3))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.GroupNorm(1, 3), "no running statistics, so there is nothing to polish"),
        (nn.InstanceNorm2d(3), "no running statistics, so there is nothing to polish"),
        (Unknown(), "layer 0 is of type Unknown, whose running statistics cannot be measured"),
        (nn.LazyBatchNorm2d(), "layer 0 is not initialised; run the model on a batch first"),
    ],
)
def test_a_layer_that_cannot_be_measured_is_one_line(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        polish(nn.Sequential(layer).double(), batches(), CPU)
    assert "\n" not in str(caught.value)
