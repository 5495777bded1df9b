"""Batches from pixels on a device: the bits of the CPU, few launches, and no wait.

And where pixels are kept by default.
"""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import accelerator
import pytest
import torch
from accelerator import COUNTS
from decoding import CPU, open_cache, png_folder
from on_forked_workers import on_forked_workers

from largebatch import load_recipe, proof
from largebatch.data import decoding
from largebatch.data.decoders import pixel_cache
from largebatch.data.images import read_images
from largebatch.data.order import _draw
from largebatch.data.pipeline import DTYPES, Pipeline, open_images, open_pipeline
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe

WHOLE = ("data.crop_area=null", "data.image_size=32")
MOVED = ("data.translate=4", "data.flip=alternating")
CROPS = ("data.crop_area=[0.4, 1.0]", "data.flip=true")
OPERATIONS = "data.augment={kind: rand_augment, operations: 1, magnitude: 9}"


def a_recipe(*changes: str) -> Recipe:
    return load_recipe(
        "digits_96",
        [
            *("batch={global_batch: 4, bn_span: 2}", "schedule.warmup=null", "polish=null"),
            *("data.source=folder", "data.classes=2", "data.train_samples=13"),
            *("data.val_samples=13", "evaluation={}", "execution.cache=memory", *changes),
        ],
    )


def opened_images(
    recipe: Recipe, folder: Path, backend: Backend | None = None
) -> tuple[str, Pipeline]:
    """Return the remark on the choice of a decoding, and the pipeline."""
    plan = make_plan(recipe)
    backend = backend or Serial(CPU)
    images = read_images(recipe, backend, folder=folder)
    passes = plan.epoch(plan.updates)
    chosen = decoding.choose_decoding(recipe, images, backend, passes=passes)
    return chosen.remark or "", open_pipeline(recipe, plan, images, chosen, backend)


def batches(recipe: Recipe, folder: Path, device: torch.device | None) -> list[Batch]:
    """Return updates of three epochs and an evaluation, from a device or the memory of the CPU."""
    pipeline = open_images(recipe, make_plan(recipe), Serial(CPU), folder=folder)
    if device is not None:
        dtype = DTYPES[recipe.precision]
        uploaded = pixel_cache.upload(open_cache(pipeline.train_index), device)
        pipeline = replace(
            pipeline,
            dtype=dtype,
            val_index=pipeline.train_index,
            open_decoder=lambda _, view: nullcontext(
                partial(pixel_cache.decode_on_device, uploaded, view)
            ),
        )
    return [*pipeline.training(range(10), clean=False), *pipeline.validation()]


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Callable[[int, int], Path]:
    """Return a function that writes images of this size and returns their folder."""

    def write(height: int, width: int) -> Path:
        png_folder(tmp_path, one_size=True, size=(height, width))
        (tmp_path / "val").symlink_to(tmp_path / "train")
        return tmp_path

    return write


CASES: list[tuple[tuple[int, int], tuple[str, ...], int, str]] = [
    ((32, 32), (*WHOLE, *MOVED), 0, "mirrored, moved by reflection"),
    ((32, 32), (*WHOLE, *MOVED, "data.translate=31"), 0, "moved far"),
    ((32, 32), (*WHOLE, *MOVED, OPERATIONS), 0, "moved, bytes for operations"),
    ((36, 40), (*WHOLE, *CROPS, "data.eval_resize=36"), 1, "centre, crops"),
    ((36, 40), (*CROPS, *MOVED), 1, "crops, moved"),
    ((50, 60), (*CROPS, *MOVED), 1, "crops of larger images, moved"),
]
ORDERS = ["contiguous", "channels_last"]


def ways() -> list[Any]:
    """Every case, by either kernel, in both orders: with one kernel, which is slow, one is long."""
    return [
        pytest.param(
            *case[:3],
            order,
            kernels == "one kernel",
            id=f"{kernels}-{order}-{case[3]}",
            marks=[pytest.mark.long] * (kernels == "one kernel" and number % 2 != place),
        )
        for kernels in ("PyTorch's kernels", "one kernel")
        for number, case in enumerate(CASES)
        for place, order in enumerate(ORDERS)
    ]


@pytest.mark.parametrize(("size", "changes", "steps", "order", "kernel"), ways())
def test_batches_from_a_device_are_those_of_the_cpu(
    size: tuple[int, int],
    changes: tuple[str, ...],
    steps: int,
    order: str,
    *,
    kernel: bool,
    folder: Callable[[int, int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit where nothing is resized, also as decoded; else a few differ by a rounding."""
    if kernel:
        pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernel")
        monkeypatch.setitem(proof.KERNEL_DEVICES, proof.CROPS, {"cpu"})
        monkeypatch.setitem(proof.DECISIONS, (proof.CROPS, CPU), None)
    recipe, images = a_recipe(f"execution.memory_format={order}", *changes), folder(*size)
    expected = batches(recipe, images, None)
    found = batches(recipe, images, CPU)
    if not steps:
        decoded = batches(recipe.with_execution(cache="none"), images, None)
        for ours, theirs in zip(decoded, expected, strict=True):
            assert torch.equal(ours.images, theirs.images)
    step = 1 / 255 / min(recipe.data.std)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.images.stride() == theirs.images.stride()
        difference = (ours.images - theirs.images).abs()
        assert difference.max() <= steps * 1.01 * step
        assert (difference > 0).float().mean() <= steps * 0.03
    if recipe.data.eval_resize is not None:  # a centre that is not resized
        assert torch.equal(found[-1].images, expected[-1].images)


def launches(recipe: Recipe, images: Path, with_kernel: bool) -> dict[str, float]:
    """Return the largest difference from the CPU, and the counts of the last batches."""
    device = accelerator.simulate()
    if with_kernel:
        accelerator.use_kernels(of_models=False, of_images=True)
    expected = batches(recipe, images, None)
    batches(recipe, images, device)  # its tables are copied once
    _draw.cache_clear()
    COUNTS.clear()
    found = batches(recipe, images, device)
    counts = {name: number / len(found) for name, number in COUNTS.totals().items()}
    pairs = zip(found, expected, strict=True)
    both = ((a.images.cpu(), b.images) for a, b in pairs)
    apart = max(float((a - b.to(a.dtype)).abs().max()) for a, b in both)
    assert {batch.images.dtype for batch in found} == {DTYPES[recipe.precision]}
    return {**counts, "apart": apart}


@pytest.mark.parametrize(
    ("kernel", "precision", "number"),
    # Triton's interpreter cuts bfloat16 off in place of rounding.
    [(False, "fp32", 5), (False, "bf16", 6), (True, "fp32", 1), (True, "fp16", 1)],
)
def test_a_batch_costs_few_launches_and_one_copy_of_a_table(
    *, kernel: bool, precision: str, number: int, folder: Callable[[int, int], Path]
) -> None:
    if kernel:
        pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernel")
    changes = (*WHOLE, *MOVED, "execution.memory_format=channels_last", f"precision={precision}")
    recipe = a_recipe(*changes)
    found = on_forked_workers(launches, recipe, folder(32, 32), kernel, workers=1)
    assert found["apart"] == 0
    assert number <= found["launches"] < number + 0.5
    assert found["transfers"] < 1.5
    assert found["syncs"] == 0
    assert found["pageable"] < 0.5


@pytest.mark.parametrize(
    ("changes", "memory", "expected"),
    [
        pytest.param((*WHOLE, *MOVED), 1e9, "device", id="small"),
        pytest.param((*WHOLE, *MOVED), 1e9 + 1, "device", id="more than the host's memory"),
        pytest.param((*WHOLE, *MOVED), 5e5, "memory", id="more than an eighth of a GPU"),
        pytest.param((*WHOLE, *MOVED), None, "memory", id="on a CPU, where no bit changes"),
        pytest.param(CROPS, 1e9, "device", id="crops"),
        pytest.param(CROPS, None, None, id="crops on a CPU, where roundings would change"),
        pytest.param((*WHOLE, "execution.decoder=torchvision"), 1e9, None, id="a decoder is given"),
        pytest.param((*WHOLE, "duration={epochs: 1}"), 1e9, None, id="one epoch"),
        pytest.param((*WHOLE, "execution.cache=none"), 1e9, None, id="switched off"),
    ],
)
def test_pixels_are_kept_where_they_fit(
    changes: tuple[str, ...],
    memory: float | None,
    expected: str | None,
    folder: Callable[[int, int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, opened = a_recipe("execution.cache=null", *changes), list[Any]()

    def note(*arguments: object) -> object:
        opened.append(arguments[-1])  # the cache
        return nullcontext

    monkeypatch.setattr(decoding, "_open_cached", note)
    if memory is not None:
        monkeypatch.setattr(pixel_cache, "AUTOMATIC", 2**31 if memory <= 1e9 else 0)
        monkeypatch.setattr("largebatch.accelerator.is_remote", lambda _: True)
        monkeypatch.setattr("largebatch.accelerator.free_memory_bytes", lambda _: memory)

    remark, _ = opened_images(recipe, folder(32, 32))
    assert opened == ([] if expected is None else [expected])
    assert ("execution.cache" in remark) == (expected is not None)


def test_pixels_that_cannot_be_written_are_decoded_each_time_unless_they_are_asked_for(
    folder: Callable[[int, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    automatic, asked = a_recipe("execution.cache=null", *WHOLE), a_recipe(*WHOLE)
    images = folder(32, 32)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        remark, pipeline = opened_images(automatic, images)
        with pytest.raises(DataError, match=r"execution\.cache"):
            open_images(asked, make_plan(asked), Serial(CPU), folder=images)
    assert "each time" in remark
    for ours, theirs in zip(pipeline.validation(), batches(asked, images, None)[10:], strict=True):
        assert torch.equal(ours.images, theirs.images)


class OtherWorker(Serial):
    """One of two workers; the other one's GPU is full, and so is its host's memory."""

    uploaded: ClassVar[bool] = False

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.bool or not self.uploaded:
            return super().all_gather(tensor)
        return torch.stack([tensor, ~tensor])


@pytest.mark.parametrize(
    ("full", "backend", "expected"),
    [
        pytest.param(True, Serial(CPU), "in memory", id="this GPU"),
        pytest.param(False, OtherWorker(CPU), "each time", id="the GPU of another worker"),
    ],
)
def test_where_a_gpu_is_full_all_workers_take_the_next_cache_unless_it_is_asked_for(
    *,
    full: bool,
    backend: Serial,
    expected: str,
    folder: Callable[[int, int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = pixel_cache.upload
    monkeypatch.setattr(OtherWorker, "uploaded", False)

    def upload(*args: Any) -> pixel_cache.Uploaded:  # noqa: ANN401 -- as the function's
        OtherWorker.uploaded = True
        if not full:
            return real(*args)
        raise pixel_cache.DeviceFullError("there is no room")

    monkeypatch.setattr(pixel_cache, "upload", upload)
    automatic, asked = (a_recipe(f"execution.cache={it}", *WHOLE) for it in ("null", "device"))
    images = folder(32, 32)
    expects = batches(a_recipe(*WHOLE), images, None)[10:]
    with monkeypatch.context() as patched:
        patched.setattr("largebatch.accelerator.is_remote", lambda _: True)
        patched.setattr("largebatch.accelerator.free_memory_bytes", lambda _: 1e9)
        remark, pipeline = opened_images(automatic, images, backend)
        assert OtherWorker.uploaded
        OtherWorker.uploaded = False
        with pytest.raises(pixel_cache.DeviceFullError):
            open_images(asked, make_plan(asked), backend, folder=images)
    assert expected in remark
    for ours, theirs in zip(pipeline.validation(), expects, strict=True):
        assert torch.equal(ours.images, theirs.images)


def test_a_choice_is_the_same_when_the_file_of_the_first_run_fills_the_disk(
    folder: Callable[[int, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = a_recipe(*WHOLE)
    pipeline = open_images(recipe, make_plan(recipe), Serial(CPU), folder=folder(32, 32))
    indexes = [pipeline.train_index]
    size = pixel_cache.num_bytes(pipeline.train_index)

    def fits(free: float, *, on_disk: bool = False) -> bool:
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
        return pixel_cache.fits_host(indexes, on_disk=on_disk)

    assert fits(size)
    assert not fits(size / 2)
    monkeypatch.setattr(pixel_cache, "AUTOMATIC", size - 1)
    assert not fits(size)
    assert fits(size, on_disk=True)
    monkeypatch.setattr(pixel_cache, "LIMIT", size - 1)
    assert not fits(size, on_disk=True)
