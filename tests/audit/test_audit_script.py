"""An audit of an unchanged script, by `largebatch audit script.py`."""

import subprocess
import sys
from pathlib import Path

import pytest
from programs import output_of

from largebatch.audit.script import audit_script
from largebatch.cli.main import DONE, STOPPED, USER, main
from largebatch.errors import DataError, RequestedStopError

AHEAD = """
def ahead(loader):
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


"""
"""A loader that reads a batch before the loop has used the one before, as Accelerate's does."""

LOOP = """
import os
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

fault, several = sys.argv[-1], "LOCAL_RANK" in os.environ
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3, 6, 6), torch.arange(96) % 4)
model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4))
if fault == "method":
    model[0].forward = torch.compile(lambda images: images.flatten(1), backend="eager")
sampler = DistributedSampler(data, int(several) + 1, 0)
if several:
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data)
    model = DistributedDataParallel(model)
if fault == "compiled":
    model = torch.compile(model, backend="eager")
if fault == "function":
    cross_entropy = torch.compile(cross_entropy, backend="eager")
if fault == "keyword":
    cross_entropy = torch.compile(model=cross_entropy, backend="eager")
loader = DataLoader(data, 8, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(100):
    if fault != "order":
        sampler.set_epoch(epoch)
    for number, (images, labels) in enumerate(loader):
        if fault == "labels":
            labels = labels.roll(1)
        if fault == "leave":
            os._exit(0)
        scores = model(images)
        if number == 3 and fault in {"error in a sum", "sleep", "leaves"} and dist.get_rank():
            if fault == "sleep":
                time.sleep(1000)
            if fault == "leaves":
                sys.exit()
            raise RuntimeError("of worker 1")
        if fault == "loss":
            loss = -scores.log_softmax(1)[torch.arange(8), labels].mean()
        else:
            loss = cross_entropy(scores, labels, label_smoothing=0.1)
        micros = len(loader) % 5 if number >= len(loader) // 5 * 5 else 5
        if fault == "terms":
            loss = loss + cross_entropy(scores / 2, labels)
        if fault == "not reduced":
            loss = cross_entropy(scores, labels, reduction="none").mean()
        (loss if fault == "scale" else loss / (micros if fault == "window" else 2)).backward()
        if number == 5 and fault == "error":
            raise RuntimeError("of the script")
        if fault == "window":
            is_last = number % 5 == 4 or number + 1 == len(loader)
        else:
            is_last = number % 2 == 1
        if is_last and fault != "no update" and (fault != "one worker" or not dist.get_rank()):
            optimizer.step()
            optimizer.zero_grad()
        if number == 1 and fault in {"end", "exit"}:
            sys.exit(2 if fault == "exit" else 0)
        if fault == "evaluation" and is_last:
            with torch.no_grad():
                for images, labels in DataLoader(data, 48):
                    cross_entropy(model(images), labels)
    if fault == "no update":
        break
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["none"])
    path = tmp_path / "loop.py"
    path.write_text(LOOP, encoding="utf-8")
    return path


def test_a_scripts_own_loop_on_two_workers_is_audited_with_its_own_arguments(script: Path) -> None:
    words = [sys.executable, "-m", "largebatch", "audit", str(script), "--workers", "none"]
    printed = output_of(*words)
    assert "audit: no fault" in printed
    assert "gradients not compared" not in printed
    assert "1.0000 times that of one process with all 32 samples" in printed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("error in a sum", "worker 1 failed: loop.py, line ", id="it raises"),
        pytest.param("leaves", "worker 1 failed: loop.py", id="it exits", marks=pytest.mark.long),
        pytest.param("sleep", "time.sleep(1000)", id="it sleeps", marks=pytest.mark.long),
        pytest.param(
            "one worker", "worker 1 made no update", id="no update", marks=pytest.mark.long
        ),
    ],
)
def test_a_worker_that_others_wait_for_is_named(fault: str, words: str, script: Path) -> None:
    command = [sys.executable, "-m", "largebatch", "audit", "--timeout", "2", script.name, fault]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=script.parent)
    assert done.returncode == USER
    assert words in done.stderr
    assert "frozen runpy" not in done.stderr  # a stack begins with the script
    last = done.stderr.splitlines()[-1]
    assert "worker 1" in last  # and not worker 0, which waits


def test_an_exit_before_the_audit_is_not_a_pass(script: Path) -> None:
    command = [sys.executable, "-m", "largebatch", "audit", "--workers", "1", str(script), "leave"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == USER
    assert "os._exit" in done.stderr


def test_an_interrupted_audit_ends_as_stopped(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise RequestedStopError("stopped")

    monkeypatch.setattr("largebatch.runs.launch.start_workers", stop)
    assert main(["audit", str(script)]) == STOPPED


@pytest.mark.parametrize(
    ("words", "started"),
    [
        pytest.param([], 1, id="two by default"),
        pytest.param(["--workers", "1"], 0, id="one is one process"),
    ],
)
def test_a_script_is_audited_on_as_many_workers_as_are_given(
    words: list[str],
    started: int,
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    starts: list[int] = []
    monkeypatch.setattr(
        "largebatch.runs.launch.start_workers", lambda *_, workers, **__: starts.append(workers)
    )
    assert main(["audit", *words, str(script), "none"]) == DONE
    printed = capsys.readouterr()
    assert starts == [2] * started
    assert ("two workers were started" in printed.err) == bool(started)
    assert ("audit: no fault" in printed.out) == (not started)


@pytest.mark.parametrize(
    ("fault", "faults"),
    [
        pytest.param("none", [], id="none"),
        pytest.param("window", [], id="the last window divides by its own number"),
        pytest.param("evaluation", [], id="it evaluates between its updates"),
        pytest.param("order", ["epoch order"], id="set_epoch is not called"),
        pytest.param("scale", ["gradient scale"], id="micro-batches are added"),
    ],
)
def test_a_fault_of_a_script_is_found(fault: str, faults: list[str], script: Path) -> None:
    findings = audit_script(script, [fault])
    assert [it.check for it in findings.faults] == faults
    assert findings.is_compared


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(
    ("compiled", "level"),
    [
        pytest.param("compiled", "fine", id="a model"),
        pytest.param("method", "fine", id="a function that a layer calls"),
        pytest.param("function", "unknown", id="another function"),
        pytest.param("keyword", "unknown", id="another function, by keyword"),
    ],
)
def test_what_a_script_compiles_is_compared_or_named(
    compiled: str, level: str, script: Path
) -> None:
    findings = audit_script(script, [compiled])
    assert not findings.faults
    assert findings.is_compared
    assert [it.level for it in findings.named("compiled code")] == [level]


def test_an_epoch_that_is_set_behind_the_loop_is_no_fault(script: Path) -> None:
    script.write_text(f"{LOOP}    sampler.set_epoch(epoch + 1)\n", encoding="utf-8")
    findings = audit_script(script, ["order"])
    assert not findings.faults
    assert [it.level for it in findings.named("epoch order")] == ["unknown"]


@pytest.mark.parametrize(
    ("fault", "missing"),
    [
        pytest.param("no update", "update", id="no update"),
        pytest.param("end", "requested", id="the script ends"),
        pytest.param("exit", "with 2", id="the script fails, as of an option"),
    ],
)
def test_a_script_that_cannot_be_audited_is_refused(fault: str, missing: str, script: Path) -> None:
    with pytest.raises(DataError, match=missing):
        audit_script(script, [fault])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param("loss", "labels", id="no loss function"),
        pytest.param("labels", "labels", id="labels of another batch"),
        pytest.param("terms", "several", id="a sum of two losses"),
        pytest.param("not reduced", "reduction", id="a mean of losses that are not reduced"),
    ],
)
def test_a_script_without_a_known_loss_is_compared_between_workers(
    fault: str, reason: str, script: Path
) -> None:
    findings = audit_script(script, [fault])
    (scale,) = findings.named("gradient scale")
    assert scale.level == "unknown"
    assert reason in scale.text
    assert not findings.is_compared
    assert findings.named("weights")[0].level == "fine"


def test_a_loader_may_be_ahead_of_the_loop(script: Path) -> None:
    script.write_text(LOOP.replace("enumerate(loader)", "enumerate(ahead(loader))"))
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("for epoch in", AHEAD + "for epoch in", 1), encoding="utf-8")
    findings = audit_script(script, ["none"])
    assert findings.ok
    assert [it.check for it in audit_script(script, ["scale"]).faults] == ["gradient scale"]


def test_an_error_of_the_script_is_a_finding(script: Path) -> None:
    findings = audit_script(script, ["error"])
    assert not findings.is_compared
    (found,) = [it for it in findings if "of the script" in it.text]
    assert found.level == "unknown"
