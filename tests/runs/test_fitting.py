"""The device batch that fits the memory of a simulated accelerator."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerator
import late_group
import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from short_runs import STATISTICS, a_recipe, log

from largebatch import run
from largebatch.accelerator import memory_errors
from largebatch.data import decoding
from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import RunningTorch
from largebatch.errors import DeviceMemoryError
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs import build
from largebatch.runs.fitting import (
    BESIDE,
    KEPT,
    SHARE,
    fitted_plan,
    keep,
    kept_plan,
    measure,
)
from largebatch.runs.options import Options
from largebatch.runs.passes import Passes
from largebatch.training.loop import EagerStep

RECIPE = a_recipe(STATISTICS, changes=("batch.global_batch=480", "execution.cache=none"))
POSSIBLE = [48, 96, 240, 480]
"""The divisors of the global batch that are whole spans."""

LIMITS = (7_000_000, 16_000_000, accelerator.MEMORY)


def chosen() -> list[tuple[int, int, dict[int, int], int, int]]:
    """Return for each limit the device batch, the free memory, and the peak of each possible.

    Then the batch of an evaluation, and its peak.
    """
    device = accelerator.simulate()
    found = []
    for limit in LIMITS:
        accelerator.ALLOCATED.limit = limit
        model = build_model(RECIPE, device)
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        drawn = torch.get_rng_state()
        free = limit - accelerator.ALLOCATED.bytes
        plan, _ = fitted_plan(RECIPE, make_plan(RECIPE), model, Serial(device))
        assert torch.equal(torch.get_rng_state(), drawn)
        for name, value in model.state_dict().items():
            assert torch.equal(value.cpu(), before[name])
        assert all(weight.grad is None for weight in model.parameters())
        accelerator.ALLOCATED.limit = accelerator.MEMORY
        passes = Passes.of(RECIPE, model, device, side=16)
        peaks = {}
        at = POSSIBLE.index(plan.device_batch)
        for num in POSSIBLE[at : at + 2]:
            peaks[num] = passes.peak_bytes(num)
            model.zero_grad()
        evaluated = plan.evaluation_batch or plan.device_batch
        evaluation = passes.peak_bytes(evaluated, evaluates=True)
        del model, passes
        found.append((plan.device_batch, free, peaks, evaluated, evaluation))
    accelerator.ALLOCATED.limit = accelerator.ALLOCATED.bytes + 200_000
    with pytest.raises(DeviceMemoryError, match=r"e-05 GB"):
        fitted_plan(RECIPE, make_plan(RECIPE), build_model(RECIPE, device), Serial(device))
    accelerator.ALLOCATED.limit = accelerator.ALLOCATED.bytes + 1000
    with pytest.raises(DeviceMemoryError, match=r"model\.name"):
        build_model(RECIPE, device)
    return found


def test_the_device_batch_is_the_largest_that_fits_and_the_measurement_leaves_no_trace() -> None:
    found = on_forked_workers(chosen, workers=1)
    assert [batch for batch, *_ in found] == [48, 96, 480]
    for batch, free, peaks, evaluated, evaluation in found:
        assert peaks[batch] <= SHARE * free
        larger = [peak for num, peak in peaks.items() if num > batch]
        assert not larger or larger[0] > SHARE * free
        # An evaluation and its graph fit beside the graph of the training passes, with a rest.
        assert peaks[batch] + 2 * evaluation < 0.95 * free
        assert evaluated == batch or evaluation > 0.8 * BESIDE * free
    assert [evaluated < batch for batch, *_, evaluated, _ in found] == [True, True, False]


def of_two() -> tuple[int, int]:
    """Return the samples that fit this worker, and the device batch that both choose."""
    device = accelerator.simulate()
    late_group.register()
    accelerator.ALLOCATED.limit = LIMITS[0] if os.environ["RANK"] == "1" else accelerator.MEMORY
    dist.init_process_group(late_group.BACKEND)
    try:
        backend, model = RunningTorch(device), build_model(RECIPE, device)
        plan = make_plan(RECIPE, workers=2)
        own, *_ = measure(RECIPE, plan, model, backend)
        return own, fitted_plan(RECIPE, plan, model, backend)[0].device_batch
    finally:
        dist.destroy_process_group()


def test_workers_choose_what_fits_the_smallest_of_their_devices() -> None:
    own, both = on_forked_workers(of_two, workers=2)
    assert (own, both) == (240, 48)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        pytest.param([96, 1, "cpu"], 96, id="the same"),
        pytest.param([96, 2, "cpu"], None, id="of two workers"),
        pytest.param([96, 1, "cuda"], None, id="of a GPU"),
        pytest.param([100, 1, "cpu"], None, id="of another batch"),
        pytest.param(None, None, id="unknown"),
    ],
)
def test_the_device_batch_of_a_run_is_kept_where_it_fits(
    kept: list[object] | None, expected: int | None, tmp_path: Path
) -> None:
    if kept is not None:
        (tmp_path / KEPT).write_text(json.dumps([*kept, "", None]))
    plan, remarks = kept_plan(RECIPE, tmp_path, Serial(torch.device("cpu")))
    assert (plan and plan.device_batch) == expected
    assert len(remarks) == (kept is not None)


def test_the_batch_of_an_evaluation_is_kept_and_holds_whole_spans_in_statistics(
    tmp_path: Path,
) -> None:
    plan = replace(make_plan(RECIPE, fits=240), evaluation_batch=100)
    backend = Serial(torch.device("cpu"))
    keep(tmp_path, backend, plan)
    kept, _ = kept_plan(RECIPE, tmp_path, backend)
    assert kept == plan
    assert (plan.device_batch, plan.statistics_batch) == (240, 96)
    assert replace(plan, evaluation_batch=7).statistics_batch == 48
    pipeline = open_images(RECIPE, plan, backend, folder=None)
    sizes = [len(batch.labels) for batch in pipeline.validation()]
    assert sizes == [100, 100, 100, 60]
    assert len(pipeline.validation_samples) == 360
    assert {len(batch.labels) for batch in pipeline.statistics(480)} == {96}
    pipeline.close()


CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def test_running_out_of_memory_halves_the_device_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own class of error is in test_on_accelerator.py."""
    real, fails = EagerStep.accumulate, iter([False, True])

    def accumulate(step: EagerStep, *args: Any, **settings: Any) -> None:  # noqa: ANN401 -- its
        if next(fails, False):
            raise CUBLAS
        real(step, *args, **settings)

    monkeypatch.setattr(EagerStep, "accumulate", accumulate)
    run(RECIPE, out=tmp_path / "run", max_steps=2, report=False)
    plans = [start["plan"]["device_batch"] for start in log(tmp_path / "run", "start")]
    assert plans == [240, 96]


@pytest.mark.parametrize(
    "error",
    [
        CUBLAS,
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        torch.AcceleratorError("CUDA error: out of memory", 2),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: str(error)[:35],
)
def test_every_class_of_out_of_memory_is_torchs_own_error(error: RuntimeError) -> None:
    with pytest.raises(torch.OutOfMemoryError), memory_errors():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("out of resource: shared memory, Required: 262144"),
        ValueError("out of memory"),
    ],
)
def test_other_errors_are_not_taken_for_memory(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, memory_errors():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("workers", "fits", "changes", "expected"),
    [
        pytest.param(1, 100, (), (96, 1), id="whole spans"),
        pytest.param(1, 960, (), (960, 1), id="all of the share, more than the 256 of a CPU"),
        pytest.param(4, 40, (), (24, 2), id="spans over workers where none fits whole"),
        pytest.param(1, 40, (), (48, 1), id="the smallest possible"),
        pytest.param(1, 960, ("monitor=[noise_scale]",), (240, 1), id="noise needs many"),
        pytest.param(1, 960, ("execution.device_batch=192",), (192, 1), id="given"),
    ],
)
def test_a_plan_takes_what_fits(
    workers: int, fits: int, changes: tuple[str, ...], expected: tuple[int, int]
) -> None:
    recipe = a_recipe(STATISTICS, changes=("batch.global_batch=960", *changes))
    plan = make_plan(recipe, workers=workers, fits=fits)
    assert (plan.device_batch, plan.sync_workers) == expected


def test_the_device_batch_is_measured_beside_the_cached_images_and_decides_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache on a GPU takes memory, which the device batch must not count on."""
    order: list[str] = []

    def choose(*arguments: Any, **settings: Any) -> decoding.Decoding:  # noqa: ANN401 -- as its own
        order.append("decoding")
        return decoding.choose_decoding(*arguments, **settings)

    def resolve(recipe: Recipe, *_: object, **__: object) -> tuple[Plan, list[str]]:
        order.append("plan")
        return make_plan(recipe, fits=48), ["measured"]

    monkeypatch.setattr(build, "choose_decoding", choose)
    monkeypatch.setattr(build, "resolve", resolve)
    with build.open_session(RECIPE, Options(out=tmp_path), {}) as session:
        assert session.plan.device_batch == 48
        assert session.pipeline.plan is session.plan
        assert session.remarks == ("measured",)
    assert order == ["decoding", "plan"]
