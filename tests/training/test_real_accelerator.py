"""Updates on the accelerator of this machine: the numbers of the CPU, and what they ask of it.

`make bench-gpu` runs these before it measures anything.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_accelerator
import test_graph
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from short_runs import WHOLE, apart, with_and_without_graphs
from test_accelerator import (
    CPU,
    HALF,
    OVERFLOWS,
    Case,
    difference,
    plain_counts,
    sgd,
    small,
    updates,
)
from torch import nn
from torch.profiler import profile, supported_activities

from largebatch import accelerator
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.distributed.torch_distributed import RunningTorch
from largebatch.models import build
from largebatch.models.batchnorm import with_span
from largebatch.models.compiled import compile_model
from largebatch.optim import kernels as lars_kernels

DEVICE = accelerator.current()

needs_accelerator = pytest.mark.skipif(
    not accelerator.is_remote(DEVICE),
    reason="torch sees no accelerator; make bench-gpu runs these on one",
)

needs_graphs = pytest.mark.skipif(
    DEVICE.type not in accelerator.GRAPHS, reason="torch sees no accelerator with graphs"
)


class Counted:
    """Launches of an update on the real device, in place of the counts of the simulated one.

    Raises RuntimeError at a host sync of CUDA in any update but the first, which copies tables.
    """

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._updates = 0

    def clear(self) -> None:
        """Start to count an update."""
        self.totals()
        self._profile = profile(activities=supported_activities(), acc_events=True)
        self._profile.start()
        self._updates += 1
        if self._updates > 1:
            watch_syncs("error")

    def totals(self) -> dict[str, int]:
        """Return the kernels, copies and fills of the update."""
        watch_syncs("default")
        if self._profile is None:
            return {}
        accelerator.synchronize(DEVICE)  # the record must hold the whole update
        self._profile.stop()
        events, self._profile = self._profile.events() or [], None
        return {
            "launches": sum(
                event.device_type.name != "CPU" and not event.is_user_annotation for event in events
            )
        }


def watch_syncs(mode: str) -> None:
    if DEVICE.type == "cuda":  # no other has such a mode
        torch.cuda.set_sync_debug_mode(mode)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count on the device of this machine, and compute fp32 as fp32."""
    monkeypatch.setattr(test_accelerator, "COUNTS", Counted())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def deviation(ours: nn.Module, theirs: nn.Module) -> float:
    """Return how far two networks are apart, as a part of how far training has moved one."""
    states = [network.cpu().double().state_dict() for network in (ours, theirs, small())]
    worst = 0.0
    for kind in ("running_var", "running_mean", "weight", "bias"):
        a, b, start = (
            torch.cat([value.flatten() for name, value in state.items() if name.endswith(kind)])
            for state in states
        )
        worst = max(worst, float((a - b).norm() / (b - start).norm()))
    return worst


@needs_accelerator
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        pytest.param(Case(), 1e-3, id="one span"),
        pytest.param(Case(span=4), 1e-3, id="two spans"),
        pytest.param(Case(span=4, accumulation=2), 1e-3, id="accumulated"),
        pytest.param(Case(precision=torch.bfloat16), 0.05, id="bf16"),
        pytest.param(Case(precision=torch.float16), 0.01, id="fp16"),
    ],
)
def test_an_update_has_the_numbers_of_the_cpu_and_waits_for_nothing(
    case: Case, tolerance: float
) -> None:
    network, ours, counts = updates(Serial(DEVICE), case)
    expected, theirs, _ = updates(Serial(CPU), case)
    assert counts["launches"] > 0
    assert ours == pytest.approx(theirs, rel=tolerance)
    assert deviation(network, expected) < tolerance


NOT = {"note": "parts of an update without a CUDA graph: forward and backward"}
FAILED = {"note": "parts of an update without a CUDA graph: optimizer (recording failed"}


def compiled() -> nn.Module:
    network = with_span(test_graph.dropped(), test_graph.TABLED.span).to(DEVICE)
    compile_model(network, True, DEVICE, shares_spans=False)
    return network


@needs_graphs
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        pytest.param(replace(test_graph.TABLED, optimizer=sgd), {}, id="SGD"),
        pytest.param(replace(test_graph.TABLED, span=4, accumulation=3), {}, id="accumulated"),
        pytest.param(replace(test_graph.TABLED, optimizer=test_graph.muon), {}, id="Muon"),
        pytest.param(
            replace(HALF, init_scale=OVERFLOWS, steps=6, optimizer=test_graph.adamw),
            {},
            id="AdamW, skipped",
        ),
        pytest.param(replace(HALF, init_scale=OVERFLOWS, steps=6), {}, id="fp16, skipped"),
        pytest.param(
            Case(span=4, steps=len(test_graph.SIZES)),
            {"sizes": test_graph.SIZES, "skip_nonfinite": True},
            id="sizes change",
        ),
        pytest.param(test_graph.TABLED, {"network": compiled}, id="compiled"),
        pytest.param(test_graph.FAILS, FAILED, id="recording fails"),
        pytest.param(Case(steps=4, optimizer=test_graph.hooked_weight), NOT, id="a hook"),
        *(
            pytest.param(Case(steps=4), {**NOT, "network": partial(test_graph.planted, it)}, id=it)
            for it in test_graph.PLANTED
        ),
    ],
)
def test_updates_in_graphs_have_the_bits_of_updates_without(
    case: Case, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, drop path and an EMA, and where Triton works with one graph for an update.

    Parts that cannot be recorded run without a graph, also after a recording that failed.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    settings = settings.copy()
    network = settings.pop("network", test_graph.dropped)
    note = settings.pop("note", "an update is one CUDA graph")
    checks = "check_input_liveness" in signature(torch.cuda.graph.__init__).parameters
    if checks and network is not compiled:  # a replay then refuses memory that was freed
        monkeypatch.setattr(
            torch.cuda, "graph", partial(torch.cuda.graph, check_input_liveness=True)
        )
    eager, found = test_graph.without_and_with(Serial(DEVICE), case, network, **settings)
    test_graph.assert_same_bits(found, eager)
    assert len(found.notes) == 1
    if lars_kernels.works(DEVICE):
        assert found.notes[0].startswith(note)
    kept = torch.cuda.memory_stats()["active_bytes.all.current"]
    batch = torch.empty(2**20, device=DEVICE)
    batch.record_stream(torch.cuda.Stream())
    del batch
    torch.cuda.synchronize()
    torch.empty(1, device=DEVICE)  # after an invalid recording, allocations freed nothing
    assert torch.cuda.memory_stats()["active_bytes.all.current"] <= kept


@needs_accelerator
@pytest.mark.parametrize("case", WHOLE)
def test_whole_runs_in_graphs_have_the_bits_of_runs_without(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a resume in the middle, EMA, SWA, clean images and an affine stage.

    Only the float64 sums of losses in an evaluation may differ: CUDA adds them in any order.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with_and_without_graphs(case, tmp_path)
    assert apart(tmp_path / "eager", tmp_path / "parts", 1e-12) == {}


@needs_accelerator
def test_evaluation_and_polishing_in_graphs_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    (metrics, state, _), (expected, plain, _) = (
        test_graph.measured(DEVICE, graph=graph) for graph in (True, False)
    )
    assert metrics == expected
    torch.testing.assert_close(state, plain, rtol=0, atol=0)


@needs_graphs
def test_only_waits_of_this_thread_and_of_autograd_count() -> None:
    test_graph.watch_threads(DEVICE)


@needs_accelerator
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("case", "budget"),
    [
        (Case(), 1.25),
        (Case(span=4), 2.1),
        (Case(kernels=True), 1.25),
        (Case(span=4, kernels=True), 1.25),
    ],
)
def test_launches_of_an_update_are_within_a_budget(case: Case, budget: float) -> None:
    """In kernels, of which an operation may be several: 449 of two spans beside 222 on an H100."""
    network = build("resnet18", num_classes=10)
    ours = updates(Serial(DEVICE), case, network)[2]["launches"]
    plain = plain_counts(DEVICE)["launches"]
    assert ours <= budget * plain, f"{ours} launches, a plain loop {plain}"


def over_its_library(work: Callable[[RunningTorch], dict[str, float]]) -> dict[str, float]:
    """Work over NCCL on CUDA, Gloo on a CPU, or what else torch has for the device."""
    torch.backends.cudnn.allow_tf32 = False
    device = DEVICE
    if accelerator.is_remote(device):
        device = accelerator.choose(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        return work(RunningTorch(device))
    finally:
        dist.destroy_process_group()


def apart_from_one_process(backend: RunningTorch) -> dict[str, float]:
    """Return how far apart the workers and one process that accumulates are."""
    network, own, _ = updates(backend, Case())
    losses = torch.tensor(own).to(backend.device)
    backend.all_reduce(losses).wait()
    expected, whole, _ = updates(Serial(CPU), Case(accumulation=backend.world_size))
    apart = (losses.cpu() - torch.tensor(whole)).abs().max().item()
    return {"weights": difference(network, expected), "losses": apart}


def recorded_sums(backend: RunningTorch) -> dict[str, float]:
    """Update in graphs with the sums of one worker: those of gradients are sent in bf16."""
    torch.backends.cudnn.deterministic = True
    with mock.patch.object(test_accelerator, "Reducer", partial(Reducer, dtype=torch.bfloat16)):
        eager, found = test_graph.without_and_with(backend, test_graph.OVER_WORKERS, small)
    test_graph.assert_same_bits(found, eager)
    return dict.fromkeys(found.notes, 1.0)


@needs_graphs
def test_sums_of_the_library_are_recorded() -> None:
    found = on_forked_workers(over_its_library, recorded_sums, workers=1)
    assert [*found] == ["an update is one CUDA graph"]


@pytest.mark.skipif(accelerator.count() == 1, reason="needs two accelerators, or none")
def test_two_workers_train_as_one_process() -> None:
    found = on_forked_workers(over_its_library, apart_from_one_process, workers=2)
    assert found["losses"] < 1e-4
    assert found["weights"] < 1e-4


def after_a_barrier(backend: RunningTorch) -> dict[str, float]:
    """Return whether what was asked of the device before a barrier was done after it."""
    tensor = torch.ones(4096, 4096, device=backend.device)
    for _ in range(100):  # tenths of a second
        tensor = tensor @ tensor
    last = accelerator.event(backend.device)
    begun = not last.query()
    backend.barrier()
    return {"busy before": begun, "done after": last.query()}


@needs_accelerator
def test_a_barrier_holds_the_host_until_the_device_is_done() -> None:
    found = on_forked_workers(over_its_library, after_a_barrier, workers=1)
    assert found == {"busy before": True, "done after": True}
