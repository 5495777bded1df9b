"""The crown test: any division of a global batch gives the weights of plain PyTorch.

The reference is written by hand (plain.py), with nothing of ours in it; optimizers of libraries are
used there as they come. SGD stands beside LARS because LARS divides by the gradient's norm and
cannot see a wrong scale.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, cast

import crown
import pytest
import torch
import torch.nn.functional as F
from crown import GLOBAL_BATCH, NETS, OPTIMIZERS, SPAN, State
from on_forked_workers import on_forked_workers
from on_workers import has_horovod
from plain import library_optimizer, move, plain_pytorch
from threads import Thread, on_threads
from torch import nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.serial import Serial
from largebatch.recipe import optimizers
from largebatch.recipe.section import alternatives

Start = Callable[[int, Path, Sequence[str]], None]
SHARED = ("sgd", "reference", "shampoo", "muon", "schedule-free")
"""One of each way in which an optimizer sees other workers; LARS has one."""
CONSTANT = (GLOBAL_BATCH,) * crown.STEPS
every_net = pytest.mark.parametrize("net", NETS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def assert_equal(
    ours: State,
    net: str,
    optimizer: str,
    *,
    chunk: int,
    sizes: Sequence[int] = CONSTANT,
    mixes: bool = False,
) -> None:
    expected = plain_pytorch(net, optimizer, chunk=chunk, sizes=sizes, mixes=mixes)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10, check_dtype=True)


def assert_measured(found: dict[str, Any], model: nn.Module) -> None:
    """Compare an evaluation with that of plain PyTorch."""
    images, labels = (part[:GLOBAL_BATCH] for part in crown.data())
    with torch.no_grad():
        logits = model.eval()(images)
    assert found["samples"] == GLOBAL_BATCH
    assert found["top1"] == (logits.argmax(1) == labels).double().mean()
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-9)


def test_every_kind_of_optimizer_has_a_formula_or_library_to_match_and_a_row_of_docs() -> None:
    """A kind that is added to a recipe is compared with something that is not ours."""
    kinds = {*alternatives(optimizers.Optimizer)}
    named = (re.search(r"kind: ([\w-]+)", text) for text in crown.SECTIONS.values())
    compared = {found[1] for found in named if found}
    assert compared | {"lars"} == kinds  # LARS has a case for each convention, without a section
    for case in OPTIMIZERS:
        model = crown.net("plain")
        if library_optimizer(case, model) is None:
            weight = torch.ones(2, 2)
            move(case, weight, torch.ones(2, 2), torch.zeros(2, 2), lr=0.1)
            assert (weight != 1).all()
    with pytest.raises(ValueError, match="unknown"):
        move("unknown", torch.ones(2, 2), torch.ones(2, 2), torch.zeros(2, 2), lr=0.1)
    page = Path(__file__).parents[1] / "docs" / "optimizers.md"
    rows = re.findall(r"^\| `([\w-]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(kinds)


@every_net
@every_optimizer
def test_four_micro_batches_on_one_worker_match_plain_pytorch(net: str, optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), net, optimizer, accumulation=4)
    assert_equal(ours.state_dict(), net, optimizer, chunk=SPAN)


@every_optimizer
def test_one_whole_batch_on_one_worker_matches_plain_pytorch(optimizer: str) -> None:
    ours = crown.solve(Serial(torch.device("cpu")), "plain", optimizer, accumulation=1)
    assert_equal(ours.state_dict(), "plain", optimizer, chunk=GLOBAL_BATCH)


@every_optimizer
@pytest.mark.parametrize("accumulation", [1, 8], ids=["8 spans at once", "one by one"])
def test_spans_on_one_worker_match_plain_pytorch(optimizer: str, accumulation: int) -> None:
    backend = Serial(torch.device("cpu"))
    ours = crown.solve(backend, "batchnorm", optimizer, accumulation=accumulation)
    assert_equal(ours.state_dict(), "batchnorm", optimizer, chunk=SPAN)
    assert_measured(asdict(crown.evaluate_each(ours, backend)), ours)


@every_net
@every_optimizer
@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_a_batch_schedule_matches_plain_pytorch_for_any_division(
    net: str, optimizer: str, accumulation: int
) -> None:
    """Two updates of 64 samples, two of 96: the loss is divided by the batch of each update."""
    backend = Serial(torch.device("cpu"))
    ours = crown.solve(backend, net, optimizer, accumulation=accumulation, changes=crown.LARGER)
    assert_equal(ours.state_dict(), net, optimizer, chunk=SPAN, sizes=crown.SIZES)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_mixed_images_match_plain_pytorch_which_computes_both_losses(accumulation: int) -> None:
    serial = Serial(torch.device("cpu"))
    ours = crown.solve(serial, "batchnorm", "sgd", accumulation=accumulation, mixes=True)
    assert_equal(ours.state_dict(), "batchnorm", "sgd", chunk=SPAN, mixes=True)


@every_net
def test_two_threads_as_workers_match_plain_pytorch(
    net: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second; the processes of the tests below take many to start."""
    nets = [crown.net(net) for _ in range(2)]  # drawn one after the other: threads share a seed

    def work(worker: Thread) -> State:
        model = crown.solve(cast("Backend", worker), net, "sgd", accumulation=2)
        return dict(model.state_dict())

    with monkeypatch.context() as patched:
        patched.setattr(crown, "net", lambda _: nets.pop())
        found = on_threads(work, workers=2)
    for ours in found:
        assert_equal(ours, net, "sgd", chunk=SPAN)


def on_torch(workers: int, path: Path, optimizers: Sequence[str]) -> None:
    on_forked_workers(crown.solve_all, "torch", path, optimizers, workers=workers)


def on_horovod(workers: int, path: Path, optimizers: Sequence[str]) -> None:
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    assert horovodrun is not None
    command = [horovodrun, "-np", str(workers), "--gloo", sys.executable, crown.__file__]
    subprocess.run([*command, "horovod", str(path), *optimizers], check=True, timeout=600)


@pytest.mark.parametrize(
    ("start", "workers", "optimizers"),
    [
        pytest.param(on_torch, 2, OPTIMIZERS, id="2 torch workers", marks=pytest.mark.long),
        pytest.param(on_torch, 4, OPTIMIZERS, id="4 torch workers, all", marks=pytest.mark.long),
        pytest.param(on_torch, 4, SHARED, id="4 torch workers"),
        # four or eight of them share each span; some have no sample to evaluate
        pytest.param(on_torch, 32, OPTIMIZERS[:2], id="32 torch workers", marks=pytest.mark.long),
        pytest.param(on_horovod, 2, OPTIMIZERS[:2], id="2 Horovod workers", marks=has_horovod),
        pytest.param(
            on_horovod,
            4,
            OPTIMIZERS,
            id="4 Horovod workers",
            marks=[has_horovod, pytest.mark.long],
        ),
    ],
)
def test_workers_and_micro_batches_train_and_evaluate_like_plain_pytorch(
    start: Start, workers: int, optimizers: Sequence[str], tmp_path: Path
) -> None:
    """Every case, solved in one start of the workers, which takes longer than the cases."""
    start(workers, tmp_path / "solved.pt", optimizers)
    solved: dict[str, dict[str, Any]] = torch.load(tmp_path / "solved.pt")
    assert len(solved) == len(crown.CASES) * len(optimizers)
    for case, optimizer in product(crown.CASES, optimizers):
        sizes = crown.SIZES if case == "batch schedule" else CONSTANT
        ours, net = solved[f"{case} {optimizer}"], crown.CASES[case]
        mixes = case == "mixed images"
        assert_equal(ours["state"], net, optimizer, chunk=SPAN, sizes=sizes, mixes=mixes)
        model = crown.net(net)
        model.load_state_dict(ours["state"])
        assert_measured(ours["evaluation"], model)
