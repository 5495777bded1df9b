"""The Horovod backend against a fake module, itself checked against the real one."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_horovod import FakeHorovod
from torch import Tensor, nn

from largebatch import accelerator
from largebatch.distributed.backend import Backend
from largebatch.distributed.horovod import Horovod, open_horovod
from largebatch.errors import BackendError, MissingPackageError, PeerLostError


@pytest.fixture
def hvd() -> FakeHorovod:
    return FakeHorovod()


@pytest.fixture
def backend(hvd: FakeHorovod) -> Backend:
    return Horovod(hvd, torch.device("cpu"), is_own=True)


def test_the_real_module_can_be_called_like_the_fake() -> None:
    real = pytest.importorskip(
        "horovod.torch", reason="horovod is not installed; run launch/install_horovod.sh"
    )
    assert issubclass(real.HorovodInternalError, RuntimeError)
    assert isinstance(real.Sum, int)
    for name, function in inspect.getmembers(FakeHorovod, inspect.isfunction):
        if name in vars(ModuleType) or (name.startswith("_")):
            continue
        asked = list(inspect.signature(function).parameters.values())[1:]
        keywords = {p.name: None for p in asked if p.kind is inspect.Parameter.KEYWORD_ONLY}
        positions = [None] * (len(asked) - len(keywords))
        inspect.signature(getattr(real, name)).bind(*positions, **keywords)


awkward_tensors = pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.tensor([1.0, 2.0]), id="float32"),
        pytest.param(torch.tensor([1, 2]), id="int64"),
        pytest.param(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.tensor(3.0), id="scalar"),
        pytest.param(
            torch.ones(2, 3, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
            id="bfloat16 strided",
        ),
        pytest.param(nn.Parameter(torch.ones(2, 3).t()), id="strided parameter"),
    ],
)


@awkward_tensors
def test_a_sum_is_in_place(backend: Backend, tensor: Tensor) -> None:
    summed = tensor.clone().detach()
    backend.all_reduce(summed).wait()
    torch.testing.assert_close(summed, 2 * tensor.detach())
    assert summed.stride() == tensor.stride()


@awkward_tensors
def test_a_broadcast_is_in_place(backend: Backend, tensor: Tensor) -> None:
    received = tensor.clone().detach().requires_grad_(tensor.requires_grad)
    backend.broadcast(received)
    torch.testing.assert_close(received.detach(), torch.full_like(tensor, 7).detach())


@awkward_tensors
def test_a_gathered_tensor_has_one_more_dimension(backend: Backend, tensor: Tensor) -> None:
    gathered = backend.all_gather(tensor)
    torch.testing.assert_close(gathered, torch.stack([tensor.detach(), tensor.detach()]))


def test_booleans_are_gathered(backend: Backend) -> None:
    assert backend.all_gather(torch.tensor([True, False])).tolist() == [[True, False]] * 2


def test_a_part_of_the_workers_is_a_group(hvd: FakeHorovod, backend: Backend) -> None:
    alone, both = backend.split([[0], [1]]), backend.split([[0, 1]])
    assert (alone.rank, alone.world_size, both.rank, both.world_size) == (0, 1, 1, 2)
    for group, workers in ((alone, 1), (both, 2), (backend, 2)):
        tensor = torch.ones(3)
        group.all_reduce(tensor).wait()
        assert tensor.tolist() == [workers] * 3
        assert group.all_gather(tensor).shape == (workers, 3)
    assert hvd.process_sets == {(0,), (1,), (0, 1)}  # all of them, on every worker


def test_groups_of_the_same_workers_do_not_share_names(hvd: FakeHorovod, backend: Backend) -> None:
    """Each counts its own operations, so that two threads cannot mix them up."""
    groups = [backend, backend.split([[0, 1]]), backend.split([[0, 1]])]
    works = [group.all_reduce(torch.ones(3)) for group in groups]
    assert len(set(hvd.names)) == 3
    for work in works:
        work.wait()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param([[0]], "exactly one", id="one left out"),
        pytest.param([[0, 1], [1]], "exactly one", id="one twice"),
        pytest.param([[1, 0]], "rise", id="order"),
    ],
)
def test_an_invalid_partition_is_refused(
    hvd: FakeHorovod, backend: Backend, parts: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        backend.split(parts)
    assert hvd.process_sets == {(0, 1)}


def test_equal_sums_can_be_in_progress_together(backend: Backend) -> None:
    tensors = [torch.full((3,), float(value)) for value in range(3)]
    works = [backend.all_reduce(tensor) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [0.0, 2.0, 4.0]


def test_every_step_repeats_the_names_of_the_first(hvd: FakeHorovod, backend: Backend) -> None:
    """Horovod negotiates a name it has not seen, and remembers a thousand of them."""
    steps = []
    for _ in range(3):
        hvd.names.clear()
        sums = [backend.all_reduce(torch.ones(size)) for size in (5, 5, 9)]
        for work in sums:
            work.wait()
        backend.all_gather(torch.ones(5))
        steps.append(list(hvd.names))
    assert len(set(steps[0])) == 4
    assert steps[1:] == [steps[0], steps[0]]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda backend: backend.all_reduce(torch.ones(2)), id="all_reduce"),
        pytest.param(lambda backend: backend.broadcast(torch.ones(2)), id="broadcast"),
        pytest.param(lambda backend: backend.all_gather(torch.ones(2)), id="all_gather"),
        pytest.param(lambda backend: backend.split([[0], [1]]), id="split"),
        pytest.param(lambda backend: backend.barrier(), id="barrier"),
    ],
)
def test_a_lost_worker_is_a_one_line_error(
    hvd: FakeHorovod, backend: Backend, operation: Callable[[Backend], object]
) -> None:
    hvd.failure = "Horovod has been shut down. This was caused by\nan exception."
    with pytest.raises(PeerLostError) as caught:
        operation(backend)
    text = str(caught.value)
    assert text.startswith("worker 1 ")
    assert "Horovod has been shut down" in text
    assert "\n" not in text


def test_mismatched_operations_are_not_reported_as_lost_workers(
    hvd: FakeHorovod, backend: Backend
) -> None:
    hvd.failure = "Mismatched ALLREDUCE tensor shapes: One rank sent [2], another rank sent [3]."
    with pytest.raises(FakeHorovod.HorovodInternalError, match="Mismatched"):
        backend.all_reduce(torch.ones(2))


def without_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next import of Horovod search for it; the test's end restores the module."""
    there = {key for key in sys.modules if key.startswith("horovod.")}
    for name in there | {"horovod", "horovod.torch"}:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]


def test_without_horovod_the_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_horovod(monkeypatch)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(MissingPackageError, match=r"/install_horovod\.sh"):
        open_horovod()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "raise ImportError('undefined symbol')", "install_horovod", id="for another torch"
        ),
        pytest.param(
            "def init(**_): raise ValueError('no peers')",
            "no peers",
            id="no connection",
        ),
    ],
)
def test_a_horovod_that_does_not_start_is_an_error_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    (tmp_path / "horovod" / "torch.py").write_text(source)
    without_horovod(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=message):
        open_horovod()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, hvd: FakeHorovod) -> list[torch.device]:
    """The fake is what is installed, there is a GPU, and the devices taken are listed."""
    monkeypatch.setitem(sys.modules, "horovod", ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.torch", hvd)
    taken: list[torch.device] = []

    def choose(number: int) -> torch.device:
        taken.append(torch.device("cuda", number))
        return taken[-1]

    monkeypatch.setattr(accelerator, "count", lambda: 1)
    monkeypatch.setattr(accelerator, "choose", choose)
    return taken


def test_a_worker_takes_the_gpu_of_its_local_rank(
    hvd: FakeHorovod, gpu: list[torch.device]
) -> None:
    hvd.built_for_gpu = True
    backend = open_horovod()
    assert hvd.running
    assert gpu == [backend.device] == [torch.device("cuda", 0)]


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_horovod_cannot_use_is_refused() -> None:
    with pytest.raises(BackendError, match="GPU"):
        open_horovod()
