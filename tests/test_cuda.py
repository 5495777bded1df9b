"""Tests that need a GPU: the same numbers as on the CPU, and no wait for the device.

`make bench-gpu` runs these before it measures anything.
"""

import math
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import augmented, needs_dali, photograph, png_folder, run_cached, run_on_device
from decoding import run as decode
from PIL import Image
from torch import Tensor, nn
from torch.amp import GradScaler

from largebatch import load_recipe, run
from largebatch.data.augment import clean_request
from largebatch.data.decoders import dali, torchvision
from largebatch.data.erasing import draw_erasures, erase
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.operations.applying import operate
from largebatch.data.operations.draws import draw
from largebatch.data.pipeline import open_images
from largebatch.data.types import Batch, Batches, Request, View
from largebatch.distributed.reducer import Reducer, by_bytes
from largebatch.distributed.serial import Serial
from largebatch.optim.lars import LARS
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Erase
from largebatch.runs.state import build_step_log
from largebatch.tracking.events import StepEvent, System
from largebatch.training.loop import Stopwatch, Update
from largebatch.training.session import log_update
from largebatch.training.state import Progress

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA GPU; make bench-gpu runs these on one"
)

GPU = torch.device("cuda")
DIGITS = Path(__file__).parent.parent / "recipes" / "quickstart" / "digits_96.yaml"
SHORT = ["duration.epochs=8", "schedule.warmup.epochs=1", "polish=null", "evaluation={}"]


class Twice(Serial):
    """One of two workers that hold the same."""

    world_size = 2

    def all_reduce(self, tensor: Tensor) -> Any:  # noqa: ANN401 -- as Serial's
        tensor.mul_(2)
        return super().all_reduce(tensor)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_channels_last_gradients_are_summed_in_their_layout(dtype: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).cuda()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs
    x = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    model(x).square().mean().backward()
    alone = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    workers = Twice(torch.device("cuda"))
    with Reducer(model.named_parameters(), workers, grouping=by_bytes(900), dtype=dtype) as reducer:
        for _ in range(2):
            reducer.zero()
            reducer.arm()
            model(x).square().mean().backward()
            reducer.wait()
        for weight, expected in zip(model.parameters(), alone, strict=True):
            assert weight.grad is not None
            assert expected is not None
            assert weight.grad.stride() == weight.stride()
            rounding = 1e-5 if dtype is None else torch.finfo(dtype).eps
            torch.testing.assert_close(weight.grad, 2 * expected, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_digits_are_learned_in_every_precision(precision: str, tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS, [*SHORT, f"precision={precision}"])
    summary = run(recipe, out=tmp_path / "run")
    assert summary.top1 is not None
    assert summary.top1 > 0.8
    assert summary.skipped_steps < 10


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, so that nothing is found decoded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def steps_apart(ours: Batch, theirs: Batch) -> Tensor:
    """Return how far images differ whose values are 0 .. 255; the labels must be the same."""
    assert ours.images.device.type == ours.labels.device.type == GPU.type
    assert ours.labels.tolist() == theirs.labels.tolist()
    return (ours.images.cpu() - theirs.images.cpu()).abs()


@needs_dali
@pytest.mark.parametrize(
    ("suffix", "most", "mean"),
    [
        pytest.param("png", 1.01, 0.25, id="decoded by the processor, as in test_decoders"),
        # Two decoders that keep to the JPEG standard differ by a step in brightness and in both
        # colours (ITU-T T.83), and blue is brightness and 1.77 of a colour.
        pytest.param("jpg", 4.01, 0.5, id="decoded by the GPU"),
    ],
)
def test_dali_on_the_gpu_matches_torchvision(
    suffix: str, most: float, mean: float, cache: Path
) -> None:
    for number in range(8):
        place = cache / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(photograph(300 + 20 * number, 500 - 25 * number))
        image.save(place / f"{number}.{suffix}", quality=92)
    index = load_or_read(cache, "train")
    clean = clean_request(index, np.arange(8), image_size=128, resize=146)
    requests = [*augmented(index, 8, 3), clean]
    ours = decode(dali.open_decoder, index, requests, device=GPU)
    for a, b in zip(ours, decode(torchvision.open_decoder, index, requests), strict=True):
        difference = steps_apart(a, b)
        assert difference[:, :, 1:-1, 1:-1].max() <= most
        assert difference.max() <= 32  # DALI repeats the outermost pixel, see test_decoders
        assert difference.mean() <= mean


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.usefixtures("cache")
def test_digits_cached_on_the_gpu_equal_those_cached_in_memory(clean: bool) -> None:
    both = []
    scale = ["data.mean=[0,0,0]", f"data.std=[{1 / 255},{1 / 255},{1 / 255}]"]
    for way, device in (("device", GPU), ("memory", torch.device("cpu"))):
        recipe = load_recipe(DIGITS, [f"execution.cache={way}", *scale])
        plan = make_plan(recipe, workers=1)
        pipeline = open_images(recipe, plan, Serial(device), folder=None)
        both.append([*pipeline.training(range(3), clean=clean), *pipeline.validation()])
    for ours, theirs in zip(*both, strict=True):
        difference = steps_apart(ours, theirs)
        assert difference.max() <= 2.01  # two roundings
        assert (difference > 1.01).float().mean() < 1e-3
        assert difference.mean() < 0.15


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_cached_images_are_resized_on_the_gpu_like_on_the_cpu(
    interpolation: str, cache: Path
) -> None:
    index = png_folder(cache, one_size=True)
    requests = augmented(index, 13, 4)
    ours, theirs = (
        kept_on(device, index, requests, interpolation=interpolation)
        for device in (GPU, torch.device("cpu"))
    )
    for a, b in zip(ours, theirs, strict=True):
        difference = steps_apart(a, b)
        assert difference.max() <= 1.01  # a half, where sums in another order differ
        assert (difference > 0.01).float().mean() < 1e-3


def kept_on(
    device: torch.device, index: Index, requests: list[Request], **changes: object
) -> Batches:
    return run_on_device(index, requests, device=device, **changes)


def opened(way: str, index: Index, requests: list[Request]) -> Batches:
    if way == "device":
        return kept_on(GPU, index, requests)
    if way == "memory":
        return run_cached(index, requests, device=GPU)
    return decode(
        {"dali": dali, "torchvision": torchvision}[way].open_decoder, index, requests, device=GPU
    )


@pytest.mark.parametrize(
    "way", [pytest.param("dali", marks=needs_dali), "torchvision", "memory", "device"]
)
def test_a_batch_does_not_change_while_the_gpu_is_behind(way: str, cache: Path) -> None:
    """The host goes on to other batches, and drops this one, before the GPU has read it."""
    index = png_folder(cache, one_size=way == "device")
    requests = augmented(index, 5, 12)
    expected = [batch.images.cpu() for batch in opened(way, index, requests)]
    copies = []
    with closing(opened(way, index, requests)) as batches:
        for batch in batches:
            torch.cuda._sleep(100_000_000)  # cycles: what is asked for below comes long after
            copies.append((batch.images.clone(), batch.labels.clone()))
            del batch
    torch.cuda.synchronize()
    assert len(copies) == 12
    for (images, labels), image, request in zip(copies, expected, requests, strict=True):
        assert torch.equal(images.cpu(), image)
        assert labels.tolist() == index.labels[request.samples].tolist()


def test_nothing_waits_for_a_gpu_with_cached_images(cache: Path) -> None:
    index = png_folder(cache, one_size=True)
    batches = kept_on(GPU, index, augmented(index, 13, 4))
    next(batches)  # mean and deviation are copied, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(batches)) == 3
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "augment",
    [
        "{kind: rand_augment, set: timm, magnitude: 9, std: 0.5, probability: 1.0, operations: 1}",
        "{kind: trivial_augment}",
        "{kind: color_jitter, brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1}",
    ],
)
def test_operations_on_a_gpu_are_those_of_a_cpu(augment: str) -> None:
    """For the same pixels; only interpolated ones may differ, by 1. Nothing waits."""
    section = load_recipe(DIGITS, [f"data.augment={augment}"]).data.augment
    assert section is not None
    view = View(image_size=32, mean=(0.0,) * 3, std=(1 / 255,) * 3, interpolation="bilinear")
    operations = draw(section, 3, range(256), view)
    pixels = np.stack([photograph(40, 40)[row % 8 : row % 8 + 32, :32] for row in range(256)])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    expected = operate(images, operations)
    on_gpu = images.to(GPU)
    operate(on_gpu, operations)  # mean and deviation are copied, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = operate(on_gpu, operations)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = (found.cpu() - expected).abs()
    assert difference.max() <= 1.01
    assert (difference > 0.01).float().mean() < 1e-3


def test_erased_pixels_are_those_of_the_cpu_to_the_last_bit_and_nothing_waits() -> None:
    erasures = draw_erasures(3, range(64), Erase(probability=0.5, fill="noise", count=2))
    images = torch.randn(64, 3, 96, 96)
    there = images.to(GPU)
    erase(there.clone(), erasures)  # the table of the noise is copied, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        erase(there, erasures)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(there.cpu(), erase(images, erasures))


def test_nothing_waits_for_a_gpu_whose_update_is_logged() -> None:
    """With all that can be monitored; the record itself waits, one update later."""
    layers = [nn.Linear(5, 4).cuda(), nn.Linear(4, 3).cuda()]
    model, kernels = nn.Sequential(*layers), [layer.weight for layer in layers]
    optimizer = LARS([{"params": kernels}], lr=0.1, momentum=0.9)
    monitored = "monitor=[gradient_norm, trust_ratios, system]"
    progress, recipe = Progress(), load_recipe(DIGITS, [*SHORT, monitored])
    state: Any = SimpleNamespace(
        progress=progress,
        count=lambda *_, **__: None,
        follow=lambda *_: None,
        scaler=GradScaler("cuda", enabled=False),
        model=model,
        updater=SimpleNamespace(optimizer=optimizer),
    )
    events: list[Any] = []
    log = build_step_log(
        recipe,
        make_plan(recipe, workers=1),
        Serial(GPU),
        state,
        emit=events.append,
    )
    loss, finite, waited = torch.ones((), device=GPU), torch.tensor(True).to(GPU), Stopwatch(GPU)
    for step, mode in enumerate(("default", "error")):  # the first copies a table to the device
        kernels[0].grad = torch.ones_like(kernels[0])  # none of the other, whose ratio is absent
        log.flush()
        assert log.monitors.measure_norm is not None
        torch.cuda.set_sync_debug_mode(mode)
        try:
            norm = log.monitors.measure_norm()
            optimizer.step()
            update = Update(step, 0.1, loss, loss, None, finite, waited, waited, loss)
            log_update("train", update._replace(gradient_norm=norm), state, log)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    log.flush()
    steps = [each for each in events if isinstance(each, StepEvent)]
    assert [each.loss for each in steps] == [1.0, 1.0]
    assert [each.gradient_norm for each in steps] == pytest.approx([20**0.5] * 2)
    assert [[math.isnan(r) for r in each.trust_ratios] for each in steps] == [[False, True]] * 2
    assert sum(isinstance(each, System) for each in events) == 2


def test_a_device_batch_is_measured_and_halved_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time the GPU seems to have more memory than it has."""
    large = ["batch.global_batch=1152", "data.image_size=128", "execution.cache=memory"]
    recipe = load_recipe(DIGITS, [*SHORT, *large, "duration.epochs=4"])
    total = torch.cuda.get_device_properties(0).total_memory
    for seeming, most in ((1.5e9, 1.5e9), (8e9, 1.5e9)):
        torch.cuda.empty_cache()
        monkeypatch.setattr("largebatch.accelerator.free_memory_bytes", lambda _, it=seeming: it)
        monkeypatch.setattr("largebatch.accelerator.memory_bytes", lambda: 0)
        torch.cuda.set_per_process_memory_fraction(most / total)
        try:
            found = run(recipe, out=tmp_path / f"{seeming:.0f}")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert found.status == "finished"
        assert found.device_batch < 1152
        assert found.peak_memory_bytes is not None
        assert found.peak_memory_bytes <= most
