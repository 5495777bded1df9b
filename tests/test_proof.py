"""What makes a GPU fast is used where a trial, in a process of its own, showed that it works."""

import io
import json
import os
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import planted_trials
import pytest
import torch

from largebatch import accelerator, proof
from largebatch.distributed.serial import Serial
from largebatch.optim import agree_on_kernels, kernels
from largebatch.proof import BATCHNORM, CROPS, GRAPH, OPTIMIZER, PARTS, Trial, TrialsResult

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep results in a folder of the test, and find the planted trials there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(proof, "DECISIONS", {})
    return tmp_path / "largebatch" / "proofs"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Count the processes of trials by the parts that each was given."""
    jobs: list[list[str]] = []
    real: Callable[..., Any] = proof.run_apart

    def run_apart(job: dict[str, Any], seconds: float) -> Any:  # noqa: ANN401 -- as the original
        jobs.append(job["parts"])
        return real(job, seconds)

    monkeypatch.setattr(proof, "run_apart", run_apart)
    return jobs


def test_what_is_wrong_slow_or_ends_its_process_is_refused_and_the_rest_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = counted(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # of the worker, but not of its trials
    settings = {BATCHNORM: "wrong", OPTIMIZER: "crashes", GRAPH: "slow"}
    found = proof.prove("planted_trials", PARTS, CPU, settings)
    refusals = {part: finding.refused for part, finding in found.items()}
    assert refusals[CROPS] is None
    assert "wrong" in str(refusals[BATCHNORM])
    assert "SIGABRT" in str(refusals[OPTIMIZER])
    assert "crashes" in str(refusals[OPTIMIZER])  # the variant
    assert "not faster" in str(refusals[GRAPH])
    assert found[CROPS].variants == 2
    assert 0 < found[CROPS].error < 1e-5
    assert found[CROPS].seconds < found[CROPS].seconds_of_torch
    assert found[BATCHNORM].error == pytest.approx(1e-3, rel=0.01)
    assert jobs == [[*PARTS], [CROPS, GRAPH]]  # a new process after the crash
    # A later run pays nothing.
    assert proof.prove("planted_trials", PARTS, CPU, settings) == found
    assert len(jobs) == 2
    (record,) = (json.loads(file.read_text()) for file in cache.iterdir())
    assert record["facts"].keys() >= {"device", "driver", "torch", "triton", "source"}
    monkeypatch.setattr(proof, "_source", lambda: "changed")
    monkeypatch.setattr(proof, "run_apart", lambda *_: ([], "SIGKILL"))
    assert proof.prove("planted_trials", PARTS, CPU, settings) != found


def test_what_the_next_run_may_find_mended_is_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A want of memory or of a compiler; the process ends, for CUDA's context may be broken."""
    jobs = []

    def run_here(job: dict[str, Any], _: float) -> tuple[list[dict[str, Any]], str | None]:
        lines: list[dict[str, Any]] = []
        jobs.append(job["parts"])
        try:
            code = proof.make_trials(job, CPU, lambda **line: lines.append(line))
        except ModuleNotFoundError as error:
            return lines, str(error)
        return lines, f"exit code {code}" if code else None

    monkeypatch.setattr(proof, "run_apart", run_here)
    for _ in range(2):
        found = proof.prove("planted_trials", [CROPS, GRAPH], CPU, {CROPS: "fails"})
        assert "C compiler" in str(found[CROPS].refused)
        assert found[GRAPH].refused is None
    assert jobs == [[CROPS, GRAPH], [GRAPH]] * 2
    assert not cache.exists()
    found = proof.prove("no_such_module", [CROPS, GRAPH], CPU)
    assert all("no_such_module" in str(finding.refused) for finding in found.values())


def test_a_loop_without_a_run_tries_its_kernels_once_and_optimizers_of_several_workers_never(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[list[str]] = []

    def run_apart(job: dict[str, Any], _: float) -> tuple[list[dict[str, Any]], None]:
        jobs.append(job["parts"])
        return [{"part": part, "finding": {"variants": 1}} for part in job["parts"]], None

    monkeypatch.setattr(proof, "run_apart", run_apart)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(accelerator, "kind", lambda: device)
    monkeypatch.setattr(proof, "_facts_of", lambda _: {"device": "a GPU"})
    assert proof.uses(BATCHNORM, device)
    assert proof.uses(BATCHNORM, device)
    assert proof.uses(GRAPH, device)  # only runs try it
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")  # a launcher's, which are not connected yet
    assert not proof.uses(OPTIMIZER, device)
    assert jobs == [[BATCHNORM]]
    assert len([*cache.iterdir()]) == 1
    monkeypatch.setattr(proof, "DECISIONS", {})
    monkeypatch.setenv(proof.VARIABLE, "torch")
    assert not any(proof.uses(part, device) for part in PARTS)
    assert len(jobs) == 1


@pytest.mark.parametrize(
    ("ours", "is_repeated", "is_right"),
    [
        pytest.param([1e-3, 1e-3, 1e-3], True, True, id="the noise of two runs"),
        pytest.param([1e-3, 1e-2, 1e-3], True, False, id="more than noise"),
        pytest.param([1e-3, 1e-3, 1e-3], False, False, id="an error where PyTorch has none"),
    ],
)
def test_an_order_of_sums_that_changes_between_two_runs_is_no_error(
    ours: list[float], is_repeated: bool, is_right: bool
) -> None:
    """Their third tensors are equal by chance."""

    def off_by(errors: list[float]) -> list[torch.Tensor]:
        return [torch.full((8,), 1 + error, dtype=torch.float64) for error in errors]

    trial = Trial(
        name="planted",
        ours=partial(off_by, ours),
        theirs=partial(off_by, [1e-3, 1e-3, 0.0]),
        exact=partial(off_by, [0.0, 0.0, 0.0]),
        is_repeated=is_repeated,
        seconds=lambda: (2.0, 1.0),
        remark=lambda: "the host waits",
    )
    found: list[TrialsResult] = []

    def write(**line: Any) -> None:  # noqa: ANN401 -- any JSON
        found.extend(TrialsResult(**line["finding"]) for _ in {*line} & {"finding"})

    job = {"module": "planted_trials", "parts": [GRAPH], "known": {}, "settings": {}}
    with (
        mock.patch.dict(proof.DECISIONS),
        mock.patch.object(planted_trials, "trials", return_value={GRAPH: lambda: [trial]}),
    ):
        proof.make_trials(job, CPU, write)
    (finding,) = found
    assert finding.is_slow == is_right
    assert ("the host waits" in str(finding.refused)) == is_right


@pytest.mark.parametrize(
    ("ended_by", "is_kept"),
    [("SIGSEGV", True), ("SIGINT", False), ("SIGTERM", False), ("SIGKILL", False)],
)
def test_trials_that_were_stopped_from_outside_are_made_again(
    ended_by: str, is_kept: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches them too, a batch system's signal, and the system's where memory ends."""
    monkeypatch.setattr(proof, "run_apart", lambda *_: ([], ended_by))
    found = proof.prove("planted_trials", [GRAPH], CPU)
    assert ended_by in str(found[GRAPH].refused)
    assert cache.exists() == is_kept


def test_all_trials_together_end_in_the_time_that_other_workers_wait(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 30))
    given: list[float] = []

    def run_apart(job: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str]:
        given.append(seconds)
        return [{"part": job["parts"][0]}], "no end"

    monkeypatch.setattr(proof, "run_apart", run_apart)
    monkeypatch.setattr("largebatch.proof.time.monotonic", lambda: next(clock))
    proof.prove("planted_trials", PARTS, CPU, seconds=100)
    assert given == [70, 40, 10, 1]
    assert not cache.exists()


def test_a_process_of_trials_ends_in_time_and_with_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parents: list[int] = []
    job = {"module": "planted_trials", "parts": [], "known": {}, "settings": {}, "device": "cpu"}
    monkeypatch.setattr(proof, "leave_with", parents.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({**job, "parent": 12})))
    monkeypatch.setattr(proof, "DECISIONS", {})
    with pytest.raises(SystemExit, match="0"):
        proof.main()
    assert parents == [12]
    _, end = proof.run_apart({**job, "parent": os.getpid()}, 0.01)
    assert "no end" in str(end)


@pytest.mark.parametrize("name", ["host", "device"])
def test_a_cache_on_a_shared_disk_has_a_result_for_each_host_and_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host may have no compiler, or another GPU."""
    before = proof.facts_of_trials("planted_trials", PARTS, CPU, {})
    monkeypatch.setattr(platform, "node", lambda: "another")
    monkeypatch.setattr(accelerator, "identity", lambda _: {"device": "another"})
    after = proof.facts_of_trials("planted_trials", PARTS, CPU, {})
    assert json.loads(after)[name] == "another"
    assert json.loads(before)[name] != "another"


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    lines = [{"part": GRAPH, "finding": {"variants": 1}}]
    monkeypatch.setattr(proof, "run_apart", lambda *_: (lines, None))
    assert proof.prove("planted_trials", [GRAPH], CPU, announces=True)[GRAPH].variants == 1
    assert "XDG_CACHE_HOME" in caplog.text


def test_without_a_home_each_run_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError))
    monkeypatch.setattr(proof, "run_apart", lambda *_: ([], "no end"))
    assert "no end" in str(proof.prove("planted_trials", [GRAPH], CPU)[GRAPH].refused)


@pytest.mark.parametrize("reason", [None, "Failed to find C compiler"])
def test_an_optimizer_of_a_loop_uses_kernels_if_all_its_workers_can(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "DECISIONS", {})
    monkeypatch.setattr(proof, "prove", lambda *_, **__: {OPTIMIZER: TrialsResult(refused=reason)})
    monkeypatch.setitem(proof.KERNEL_DEVICES, proof.OPTIMIZER, {"cpu"})
    assert agree_on_kernels(Serial(CPU)) == reason
    assert kernels.works(CPU) == (reason is None)
    monkeypatch.setenv(proof.VARIABLE, "torch")
    assert proof.VARIABLE in str(agree_on_kernels(Serial(CPU)))
    assert not kernels.works(CPU)
