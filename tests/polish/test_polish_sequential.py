"""Sequential polishing converges layer by layer."""

import copy
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from polish_reference import Pairs, assert_right, layer_by_layer, norms
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.polish.statistics import polish

CPU = Serial(torch.device("cpu"))
ORDER = ["0", "2.one.1", "2.one.4", "2.other.1", "4"]


class Branches(nn.Module):
    """Two layers on one path and one on the other."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
        self.one = nn.Sequential(*inner, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.other = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.one(values) + self.other(values)
        return result


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), Branches()]
    model = nn.Sequential(*first, nn.ReLU(), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 2, 1))
    for _, layer in norms(model):
        nn.init.uniform_(layer.get_buffer("running_mean"), -1, 1)
        nn.init.uniform_(layer.get_buffer("running_var"), 0.5, 2)
    return model.double()


def images() -> Tensor:
    shape = torch.arange(1.0, 4).view(3, 1, 1)
    noise = torch.randn(14, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    return (noise * shape + shape).double()


def batches(*sizes: int) -> Pairs:
    return [(part, part) for part in images().split(sizes)]


@pytest.mark.parametrize("sizes", [(14,), (3, 3, 3, 3, 2), (1, 13)])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_result_is_that_of_polishing_one_layer_at_a_time(
    workers: int, sizes: tuple[int, ...]
) -> None:
    model = network()
    right = layer_by_layer(model, images(), ORDER)

    def work(worker: Thread) -> int:
        own, share = copy.deepcopy(model), batches(*sizes)[worker.rank :: workers]
        drift = polish(own, share, cast("Backend", worker), sequential=True, tolerance=1e-12)
        assert_right(own, right, rel=1e-10)
        assert drift.settling <= 1e-12
        return drift.passes

    # The longest way has four layers; the fifth pass finds nothing moved.
    assert on_threads(work, workers=workers) == [5] * workers


def test_workers_with_different_statistics_stop_together() -> None:
    """Worker 0 has all the data and begins where the passes end."""
    model = network()
    right = layer_by_layer(model, images(), ORDER)
    settled = copy.deepcopy(model)
    polish(settled, batches(14), Serial(), sequential=True, tolerance=1e-12)

    def work(worker: Thread) -> int:
        own = copy.deepcopy(model if worker.rank else settled)
        share = [] if worker.rank else batches(14)
        drift = polish(own, share, cast("Backend", worker), sequential=True)
        assert_right(own, right, rel=1e-5)
        return drift.passes

    first, second = on_threads(work, workers=2)
    assert first == second >= 2


def test_a_layer_used_twice_reaches_a_fixed_point() -> None:
    """Its statistics are those of its two inputs, the second of which depends on them."""
    norm = nn.BatchNorm2d(3).double()
    model = nn.Sequential(norm, nn.Conv2d(3, 3, 1).double(), nn.Tanh(), norm)
    drift = polish(model, batches(14), CPU, sequential=True, tolerance=1e-12)
    assert drift.settling <= 1e-12
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    with torch.no_grad():
        model.eval()(images())
    both = torch.cat(seen)
    torch.testing.assert_close(norm.running_mean, both.mean((0, 2, 3)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norm.running_var, both.var((0, 2, 3)), rtol=1e-9, atol=0)


def test_a_layer_that_never_converges_ends_the_passes_and_is_reported() -> None:
    """A large input divided by what the layer measured makes the next measurement as large."""
    norm = nn.BatchNorm2d(3, affine=False).double()

    class Enlarged(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return 1e3 * values

    drift = polish(nn.Sequential(norm, Enlarged(), norm), batches(14), CPU, sequential=True)
    assert not drift.settled
    assert drift.settling > 1e-6
    assert drift.passes > 20
    assert polish(network(), batches(14), CPU, sequential=True).settled
    assert polish(network(), batches(14), CPU).settled


def test_batches_that_can_be_used_only_once_are_refused() -> None:
    with pytest.raises(ValueError, match="needs the batches again for every pass, and a list_iter"):
        polish(network(), iter(batches(14)), CPU, sequential=True)


def test_a_failure_in_a_later_pass_leaves_the_model_untouched() -> None:
    class Failing:
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            yield from batches(14)
            if self.passes == 3:
                raise KeyboardInterrupt

    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: id(value) for name, value in model.named_buffers()}
    with pytest.raises(KeyboardInterrupt):
        polish(model, Failing(), CPU, sequential=True)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert buffers == {name: id(value) for name, value in model.named_buffers()}
    assert all(module.training for module in model.modules())
