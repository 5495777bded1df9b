"""Kinds of loops of public threads that the audit did not name at first sight, and their page."""

import contextlib
import gc
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from planted_audit import findings_of
from planted_parts import Arguments, perceptron, shuffled
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.speed.measuring import newest
from benchmarks.studies.audit.strangers.run import rows
from benchmarks.studies.audit.strangers.threads import THREADS
from largebatch.audit import Findings, audit

ROOT = Path(__file__).parents[2]


def couples_samples(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores - scores.mean(0), labels)


def parts_called() -> Arguments:
    """The loss couples samples, and the step calls the module in the wrapper (e2eAIOK 198)."""
    model = DistributedDataParallel(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        couples_samples(model.module(batch[0]), batch[1]).backward()
        optimizer.step()

    words = {"model": model, "loss_fn": couples_samples, "optimizer": optimizer, "step": step}
    return {**words, **shuffled()}


def wrapper_called() -> Arguments:
    """The same loop calls the wrapper, which reduces."""
    model = DistributedDataParallel(perceptron())
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        couples_samples(model(batch[0]), batch[1]).backward()
        optimizer.step()

    words = {"model": model, "loss_fn": couples_samples, "optimizer": optimizer, "step": step}
    return {**words, **shuffled()}


def unfrozen_later() -> Arguments:
    """A layer is frozen at the wrapping, and the optimizer has it (detectron2 2486)."""
    network = perceptron()
    network[0].requires_grad_(False)
    model = DistributedDataParallel(network)
    optimizer = SGD(model.parameters(), lr=0.1)
    return {"model": model, "loss_fn": cross_entropy, "optimizer": optimizer, **shuffled()}


@pytest.fixture(scope="module", name="audited")
def of_strangers() -> dict[str, Findings | str]:
    return findings_of([parts_called, wrapper_called, unfrozen_later])


def test_workers_are_compared_without_an_exact_gradient(
    audited: dict[str, Findings | str],
) -> None:
    findings = audited["parts_called"]
    assert isinstance(findings, Findings), findings
    assert "gradient direction" in {it.check for it in findings.faults}
    assert [it.level for it in findings.named("gradient scale")] == ["unknown"]


def test_equal_gradients_of_a_loss_that_couples_samples_are_no_fault(
    audited: dict[str, Findings | str],
) -> None:
    findings = audited["wrapper_called"]
    assert isinstance(findings, Findings), findings
    assert not findings.faults
    assert not findings.is_compared


def test_a_frozen_layer_of_the_optimizer_is_noted(audited: dict[str, Findings | str]) -> None:
    findings = audited["unfrozen_later"]
    assert isinstance(findings, Findings), findings
    (note,) = [it for it in findings.named("updates") if it.level == "note"]
    assert note.figure == 2
    assert findings.ok


class _SlowOutput(io.StringIO):
    """Touches a file half a second after the output is flushed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def flush(self) -> None:
        time.sleep(0.5)
        self._path.touch()


def print_slowly(path: Path) -> list[bool]:
    """Return on which workers the audit ended after worker 0 had printed."""
    dist.init_process_group("gloo")
    with contextlib.redirect_stdout(_SlowOutput(path)):
        audit(**wrapper_called())
    is_printed = [False, False]
    dist.all_gather_object(is_printed, path.exists())
    gc.collect()  # models must not outlive their process group
    dist.destroy_process_group()
    return is_printed


def test_no_worker_ends_an_audit_before_its_table_is_printed(tmp_path: Path) -> None:
    # A launcher ends all workers when one has exited.
    assert on_forked_workers(print_slowly, tmp_path / "printed", workers=2) == [True, True]


def test_rows_of_a_printed_table_are_read() -> None:
    findings = rows("audit: 1 fault\nfault    samples             text\n" + " " * 29 + "-> do\n")
    assert findings == [{"level": "fault", "check": "samples", "text": "text -> do"}]


def results(name: str) -> dict[str, Any]:
    path = newest(name, ROOT / "benchmarks" / "results", machine="*")
    assert path is not None
    loops: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["loops"]
    return loops


def test_the_page_has_the_verdicts_of_the_results() -> None:
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8").splitlines()
    first = results("audit_strangers")
    last = results("audit_strangers_mended") | results("audit_strangers_held")
    for thread in THREADS:
        (row,) = [line for line in page if line.startswith("|") and f"]({thread.link})" in line]
        before = "held back" if thread.held_back else first[thread.script]["named"]
        assert row.endswith(f"| {before} | {last[thread.script]['named']} |"), row
