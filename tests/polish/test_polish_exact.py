"""Polished statistics equal float64 moments over all inputs of a layer."""

import copy
from collections.abc import Callable, Iterator
from typing import cast

import accelerator
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_forked_workers import on_forked_workers
from polish_reference import Moments, Pairs, assert_right, moments_of, norms, one_pass
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.models.batchnorm import by_spans, with_span
from largebatch.optional import require_torchvision
from largebatch.polish.statistics import polish

CPU = Serial(torch.device("cpu"))
EXACT = {torch.float64: 1e-10, torch.float32: 1e-6}


def pairs(*sizes: int, shape: tuple[int, ...] = (3, 5, 5), seed: int = 0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(sum(sizes), *shape, dtype=torch.float64, generator=generator)
    images *= 1 + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    images += torch.randn(len(images), *[1] * len(shape), generator=generator)  # images differ
    return [(part, torch.zeros(len(part))) for part in images.split(sizes)]


def cast_to(dtype: torch.dtype, batches: Pairs) -> Pairs:
    return [(images.to(dtype), labels) for images, labels in batches]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()]
    head = [nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(5, 2)]
    return nn.Sequential(*layers, *head)


def check_on(
    workers: int, model: nn.Module, share: Callable[[int], Pairs], *, right: Moments
) -> None:
    """Polish a copy on each of several workers, and compare all with their layers' inputs.

    In float64 also with what they ought to have been given.
    """
    seen: dict[str, list[Tensor]] = {name: [] for name, _ in norms(model)}

    def work(worker: Thread) -> nn.Module:
        own = copy.deepcopy(model)
        for name, layer in norms(own):
            nn.init.constant_(layer.get_buffer("running_mean"), worker.rank)  # as DDP leaves them
            layer.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].extend(inputs))
        polish(own, share(worker.rank), cast("Backend", worker))
        return own

    copies = on_threads(work, workers=workers)
    given = {name: moments_of(values) for name, values in seen.items()}
    dtype = next(model.buffers()).dtype
    for found in copies:
        assert_right(found, given, rel=EXACT[dtype])
        if dtype == torch.float64:
            assert_right(found, right, rel=1e-10)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    workers=st.integers(1, 4),
    dtype=st.sampled_from(list(EXACT)),
    data=st.data(),
)
def test_statistics_are_exact_for_any_batches_order_and_workers(
    sizes: list[int], workers: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """One image is enough where a layer sees several pixels of it; here the last sees one."""
    sizes = sizes if sum(sizes) > 1 else [2]
    batches = cast_to(dtype, data.draw(st.permutations(pairs(*sizes))))
    owners = data.draw(st.lists(st.integers(0, workers - 1), min_size=len(sizes), max_size=99))
    model = network().to(dtype)
    right = one_pass(model, batches)
    whose = list(zip(batches, owners, strict=False))
    check_on(workers, model, lambda rank: [b for b, at in whose if at == rank], right=right)


def plain(norm: nn.Module, *between: nn.Module) -> nn.Sequential:
    """Two layers, so that the second shows how the first normalises."""
    return nn.Sequential(norm, *between, nn.Tanh(), copy.deepcopy(norm))


def twice() -> nn.Sequential:
    norm = nn.BatchNorm2d(3)
    return nn.Sequential(norm, nn.Tanh(), norm)


def with_activation() -> nn.Sequential:
    require_torchvision()
    from timm.layers.norm_act import BatchNormAct2d

    return nn.Sequential(BatchNormAct2d(3, drop_layer=nn.Dropout), BatchNormAct2d(3))


KINDS = [
    pytest.param(lambda: plain(nn.BatchNorm1d(3)), (3,), id="1d, vectors"),
    pytest.param(lambda: plain(nn.BatchNorm1d(3)), (3, 7), id="1d"),
    pytest.param(lambda: plain(nn.BatchNorm3d(3)), (3, 2, 3, 4), id="3d"),
    pytest.param(lambda: plain(nn.SyncBatchNorm(3)), (3, 4, 4), id="SyncBatchNorm"),
    pytest.param(lambda: plain(nn.BatchNorm2d(3, momentum=None)), (3, 4, 4), id="cumulative"),
    pytest.param(lambda: plain(nn.BatchNorm2d(3, affine=False)), (3, 4, 4), id="not affine"),
    pytest.param(twice, (3, 4, 4), id="used twice"),
    pytest.param(with_activation, (3, 4, 4), id="timm's with activation"),
    pytest.param(lambda: with_span(plain(nn.BatchNorm2d(3)), 2), (3, 4, 4), id="ghost groups"),
    pytest.param(lambda: with_span(plain(nn.BatchNorm2d(3)), 99), (3, 4, 4), id="span > batch"),
    pytest.param(lambda: with_span(with_activation(), 3), (3, 4, 4), id="span, activation"),
]


@pytest.fixture(params=["one by one", "together"])
def spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans of a batch on a CPU and on a GPU."""
    if request.param == "together":

        def as_on_gpu(images: Tensor, model: nn.Module, *, together: bool) -> list[Tensor]:
            del together
            return by_spans(images, model, together=True)

        monkeypatch.setattr("largebatch.polish.statistics.by_spans", as_on_gpu)


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize("span", [2, 3, 4])
def test_every_span_normalises_by_its_own_moments(span: int) -> None:
    model, batches = with_span(network().double(), span), pairs(6, 2, 4, 12)
    check_on(2, model, lambda rank: batches[rank::2], right=one_pass(model, batches))


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(("make", "shape"), KINDS)
def test_every_type_of_layer_has_exact_statistics(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model, batches = make().to(dtype), cast_to(dtype, pairs(5, 2, 4, shape=shape))
    for _, layer in norms(model):
        if layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 2)
    check_on(2, model, lambda rank: batches[rank::2], right=one_pass(model, batches))


def far(*sizes: int, dtype: torch.dtype) -> Pairs:
    """Images whose mean is a million standard deviations from zero."""
    return [((images + 1e6 * images.std()).to(dtype), _) for images, _ in pairs(*sizes)]


@pytest.mark.parametrize("origin", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("sizes", [(1,), (12,), (1, 1, 1, 9), (9, 1, 2)])
@pytest.mark.parametrize("dtype", EXACT)
def test_a_mean_far_from_zero_costs_no_digits(
    dtype: torch.dtype, sizes: tuple[int, ...], origin: float
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3)).to(dtype)
    nn.init.constant_(model[0].get_buffer("running_mean"), origin)
    batches = far(*sizes, dtype=dtype)
    check_on(2, model, lambda rank: batches[rank::2], right=one_pass(model, batches))


def on_accelerator(sizes: list[int], offset: float) -> tuple[dict[str, Tensor], int]:
    """Polish there; return the statistics, and the launches of ten of the last batches."""
    accelerator.simulate()
    backend = Serial(torch.device(accelerator.NAME))
    model = network().double().to(backend.device)
    launches: list[int] = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in pairs(*sizes):
            launches.append(accelerator.COUNTS.launches.total())
            yield (images + offset).to(backend.device), labels

    polish(model, batches(), backend)
    return model.cpu().state_dict(), launches[-1] - launches[-11]


@pytest.mark.parametrize(("offset", "measuring"), [(0.0, 3), (1e3, 3 + 8)])
def test_an_accelerator_merges_many_batches_at_once_and_exactly(
    offset: float, measuring: int
) -> None:
    """Each layer adds one launch to the seven of a batch, and if its mean is far, eight more."""
    sizes = [*[9, 4, 1] * 25, *[6] * 11]  # two merges of 32 batches, and 22 at the end
    found, launches = on_forked_workers(on_accelerator, sizes, offset, workers=1)
    model = network().double()
    right = one_pass(model, [(images + offset, labels) for images, labels in pairs(*sizes)])
    model.load_state_dict(found)
    assert_right(model, right, rel=1e-10)
    assert launches == 10 * (7 + measuring)


def with_kernels() -> tuple[dict[str, Tensor], int]:
    """Polish batches of two spans there with Triton's kernels, and count those of the last."""
    accelerator.simulate()
    accelerator.use_kernels()
    backend = Serial(torch.device(accelerator.NAME))
    model = with_span(network(), 2).to(backend.device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    launches = accelerator.COUNTS.launches

    def batches() -> Iterator[Tensor]:
        for images, _ in pairs(4, 4):
            launches.clear()
            yield images.float().to(backend.device, memory_format=torch.channels_last)

    polish(model, batches(), backend)
    ours = sum(number for line, number in launches.items() if line.startswith("models/kernels"))
    return model.cpu().state_dict(), ours


def test_kernels_measure_and_normalise_spans_as_pytorch_does() -> None:
    pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
    found, launches = on_forked_workers(with_kernels, workers=1)
    assert launches == 2 * 3  # of three layers: their moments, and what they return
    model = with_span(network(), 2).double()
    polish(model, [images for images, _ in pairs(4, 4)], CPU)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_many_values_are_summed_as_exactly_as_few(layout: torch.memory_format) -> None:
    """PyTorch's kernel has an error of 5e-5 in channels-last here."""
    images = torch.randn(256, 4, 40, 40, generator=torch.Generator().manual_seed(0)) + 3
    images = images.to(memory_format=layout)
    model = nn.Sequential(nn.BatchNorm2d(4)).to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs
    polish(model, [(images, images)], CPU)
    mean, var = images.double().mean((0, 2, 3)), images.double().var((0, 2, 3))
    assert_right(model, {"0": (mean, var)}, rel=2e-7)


def test_a_batch_of_one_value_per_channel_is_normalised_to_zero_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training refuses such a batch, but the last batch of the data may be one."""
    model, batches = network().double(), pairs(4, 1)
    right = one_pass(model, batches)
    polish(copy.deepcopy(model), pairs(4, 2), CPU)
    assert not caplog.records
    polish(model, [*batches, *pairs(1)], CPU)
    assert [record.args for record in caplog.records] == [("layer 6",)]
    model = network().double()
    polish(model, batches, CPU)
    assert_right(model, right, rel=1e-10)
    with pytest.raises(DataError, match="layer 6"):
        polish(model, pairs(1), CPU)
    assert_right(model, right, rel=1e-10)


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize("sizes", [(5,), (4, 1), (3, 7)])
def test_a_last_span_of_one_image_is_normalised_to_zero(sizes: tuple[int, ...]) -> None:
    """Whatever is beside it in the batch; the last layer sees one value of it per channel."""
    model, batches = with_span(network().double(), 2), pairs(*sizes)
    right = one_pass(model, batches)
    polish(model, batches, CPU)
    assert_right(model, right, rel=1e-10)


def test_infinite_activations_are_refused() -> None:
    model, (batch,) = network().double(), pairs(4)
    batch[0][0, 0, 0, 0] = torch.inf
    with pytest.raises(DataError, match="layer 0.*infinite"):
        polish(model, [batch], CPU)
    assert model[0].get_buffer("running_var").equal(torch.ones(3).double())


@pytest.mark.parametrize(("mean", "calls"), [(0.0, 1), (1e6, 2)])
def test_all_layers_share_one_all_reduce(mean: float, calls: int) -> None:
    """A second one where means are so far from zero that sums of squares lose digits.

    One more before the pass compares the weights.
    """
    model = network().double()
    batches = [(images + mean, labels) for images, labels in pairs(4, 3, 5)]
    right = one_pass(model, batches)

    def work(worker: Thread) -> int:
        own = copy.deepcopy(model)
        polish(own, batches[worker.rank :: 3], cast("Backend", worker))
        assert_right(own, right, rel=1e-10)
        return worker.calls

    assert on_threads(work, workers=3) == [1 + calls] * 3
