"""polish and evaluate without the rest, on two workers connected by other code."""

import copy
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parts_on_workers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fake_horovod import FakeHorovod
from on_forked_workers import on_forked_workers
from parts_on_workers import (
    BATCHES,
    HOROVOD,
    MODELS,
    PAGE,
    PARALLEL,
    SIZES,
    SPAN,
    Case,
    data,
    network,
)
from polish_reference import Pairs, assert_right, one_pass
from programs import output_of
from torch import nn
from torch.optim.swa_utils import AveragedModel

from largebatch.distributed import Serial, running_backend
from largebatch.errors import BackendError
from largebatch.models import with_span
from largebatch.polish import polish
from largebatch.training import evaluate

CPU = torch.device("cpu")
WORK = str(parts_on_workers.__file__)
Found = list[dict[str, Any]]
"""Results of each worker, by the name of the case."""


def written(folder: Path) -> Found:
    """Return what the two workers wrote."""
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def torch_found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("torch")
    on_forked_workers(parts_on_workers.work, folder, workers=2)
    return written(folder)


@pytest.fixture(scope="module")
def horovod_found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip(
        "horovod.torch", reason="horovod is not installed; run launch/install_horovod.sh"
    )
    horovodrun = str(Path(sysconfig.get_path("scripts"), "horovodrun"))
    folder = tmp_path_factory.mktemp("horovod")
    command = [horovodrun, "-np", "2", "--gloo", sys.executable, "-W", "error", WORK, str(folder)]
    output_of(*command, timeout=300)
    return written(folder)


def plain(case: Case) -> nn.Module:
    """Return the network with the weights and the statistics that a worker ended with."""
    model = network()
    model.load_state_dict(case["state"])
    return model


def check(found: Found, name: str, batches: Pairs) -> None:
    """Compare both workers with float64 moments and counts over all batches by hand."""
    cases = [worker[name] for worker in found]
    for key, value in cases[0]["state"].items():
        if "tracked" not in key:  # counts of batches are none of polishing's business
            assert value.equal(cases[1]["state"][key]), key
    model = plain(cases[0])
    with_spans = with_span(copy.deepcopy(model), SPAN) if name == "span" else model
    assert_right(model, one_pass(with_spans, batches), rel=1e-10)
    for case in cases:
        assert [layer.rpartition(".")[2] for layer in case["layers"]] == ["0", "2"]
        assert case["metrics"] == pytest.approx(counted(model, batches), rel=1e-12)


@torch.no_grad()
def counted(model: nn.Module, batches: Pairs) -> dict[str, float]:
    """Evaluate one image at a time."""
    model.eval()
    hits, losses = [], []
    for images, labels in batches:
        for image, label in zip(images, labels, strict=True):
            scores = model(image.unsqueeze(0))
            hits.append(scores[0].argsort(descending=True).tolist().index(label.item()))
            losses.append(F.cross_entropy(scores, label.unsqueeze(0)).item())
    num = len(hits)
    top1, top5 = sum(hit < 1 for hit in hits), sum(hit < 5 for hit in hits)
    return {"top1": top1 / num, "top5": top5 / num, "loss": sum(losses) / num, "samples": num}


@pytest.mark.parametrize("name", MODELS | PARALLEL)
def test_a_process_group_is_found_and_any_model_measured_on_all_workers(
    name: str, torch_found: Found
) -> None:
    check(torch_found, name, data())


@pytest.mark.long
@pytest.mark.parametrize("name", HOROVOD)
def test_horovod_is_found_and_a_model_measured_on_all_workers(
    name: str, horovod_found: Found
) -> None:
    check(horovod_found, name, data())


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_may_have_any_form_and_a_worker_none(kind: str, torch_found: Found) -> None:
    check(torch_found, kind, data()[:4] if kind == "worker 0's, and none" else data())


def test_update_bn_of_pytorch_differs_between_workers_and_polish_does_not(
    torch_found: Found,
) -> None:
    first, second = (worker["update_bn"]["2.running_var"] for worker in torch_found)
    right = one_pass(plain(torch_found[0]["after update_bn"]), data())["2"][1]
    for one, other in ((first, second), (first, right), (second, right)):
        assert not torch.allclose(one, other, rtol=0.01)
    check(torch_found, "after update_bn", data())


def test_sharded_models_are_refused(torch_found: Found) -> None:
    assert [len(worker["sharded"]) for worker in torch_found] == [6, 6]


def test_every_block_of_the_page_runs_on_two_workers(torch_found: Found) -> None:
    headings = re.findall("^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    for worker in torch_found:
        assert worker["page"] == headings
    assert len(headings) == 7


def test_a_single_process_polishes_and_evaluates_alone() -> None:
    model = AveragedModel(network())
    polish(model, data())
    assert_right(model.module, one_pass(network(), data()), rel=1e-10)
    assert evaluate(model, data(), expected=sum(SIZES)).samples == sum(SIZES)
    assert isinstance(running_backend(CPU), Serial)


def test_unconnected_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BackendError, match="worker 1 of 4"):
        polish(network(), data())
    with pytest.raises(BackendError, match="or pass backend=Serial()"):
        evaluate(network(), data())
    assert evaluate(network(), data(), Serial(CPU)).samples == sum(SIZES)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert evaluate(network(), data()).samples == sum(SIZES)


def test_horovod_is_used_once_it_is_initialised_and_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hvd = FakeHorovod()
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    assert running_backend(CPU).name == "serial"
    hvd.init(process_sets="dynamic")
    backend = running_backend(torch.device("cuda", 0))
    assert (backend.name, backend.rank, backend.world_size) == ("horovod", 1, 2)
    assert backend.device == CPU  # this Horovod was built without GPU support
    hvd.built_for_gpu = True
    assert running_backend(torch.device("cuda", 0)).device == torch.device("cuda", 0)
    backend.close()
    assert hvd.running


def test_a_process_group_without_a_library_for_gpus_sums_on_the_cpu_and_stays_open(
    tmp_path: Path,
) -> None:
    dist.init_process_group("cpu:gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        backend = running_backend(torch.device("cuda", 0))
        assert (backend.name, backend.world_size, backend.device) == ("torch", 1, CPU)
        backend.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        pytest.param({"img": 1, "cls": 2}, "a mapping.* img, cls;", id="keys"),
        pytest.param({"image": "path"}, "a mapping.* image;", id="no tensor"),
        pytest.param({}, r"a mapping.*\(none\);", id="empty mapping"),
        pytest.param((), r"a tuple of \(\);", id="empty"),
        pytest.param(["a", 1], r"a list of \(str, int\);", id="no tensors"),
        pytest.param("abc", "a str;", id="word"),
        pytest.param(None, "a NoneType;", id="nothing"),
    ],
)
def test_a_batch_without_images_is_refused_with_its_content(batch: object, message: str) -> None:
    parts: list[Callable[..., object]] = [polish, evaluate]
    for part in parts:
        with pytest.raises(ValueError, match=f"batch is {message}"):
            part(network(), [batch])
