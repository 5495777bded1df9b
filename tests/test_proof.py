"""What makes a GPU fast is used where a trial, in a process of its own, showed that it works."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_trials  # noqa: F401 -- the process of trials imports it by name
import pytest
import torch

from largebatch import accelerator, proof
from largebatch.distributed.serial import Serial
from largebatch.optim import agree_on_kernels, kernels
from largebatch.proof import BATCHNORM, CROPS, GRAPH, OPTIMIZER, PARTS, Finding

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep results in a folder of the test, and find the planted trials there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "support"), prepend=":")
    monkeypatch.setattr(proof, "DECISIONS", {})
    return tmp_path / "largebatch" / "proofs"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Count the processes of trials by the parts that each was given."""
    jobs: list[list[str]] = []
    real: Callable[..., Any] = proof.run_apart

    def run_apart(job: dict[str, Any]) -> Any:  # noqa: ANN401 -- as the original
        jobs.append(job["parts"])
        return real(job)

    monkeypatch.setattr(proof, "run_apart", run_apart)
    return jobs


def test_what_is_wrong_slow_or_ends_its_process_is_refused_and_the_rest_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = counted(monkeypatch)
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
    monkeypatch.setattr(proof, "run_apart", lambda job: ([], "SIGKILL"))
    assert proof.prove("planted_trials", PARTS, CPU, settings) != found


def test_what_the_next_run_may_find_mended_is_tried_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A want of memory or of a compiler; the process ends, for CUDA's context may be broken."""
    jobs = []

    def run_here(job: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
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

    def run_apart(job: dict[str, Any]) -> tuple[list[dict[str, Any]], None]:
        jobs.append(job["parts"])
        return [{"part": part, "finding": {"variants": 1}} for part in job["parts"]], None

    monkeypatch.setattr(proof, "run_apart", run_apart)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(accelerator, "kind", lambda: device)
    monkeypatch.setattr(proof, "_facts_of", lambda _: {"device": "a GPU"})
    assert proof.uses(BATCHNORM, device)
    assert proof.uses(BATCHNORM, device)
    assert proof.uses(GRAPH, device)  # only runs try it
    monkeypatch.setattr(proof, "_num_workers", lambda: 2)
    assert not proof.uses(OPTIMIZER, device)
    assert jobs == [[BATCHNORM]]
    assert len([*cache.iterdir()]) == 1
    monkeypatch.setattr(proof, "DECISIONS", {})
    monkeypatch.setenv(proof.VARIABLE, "torch")
    assert not any(proof.uses(part, device) for part in PARTS)
    assert len(jobs) == 1


@pytest.mark.parametrize("reason", [None, "Failed to find C compiler"])
def test_an_optimizer_of_a_loop_uses_kernels_if_all_its_workers_can(
    reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "DECISIONS", {})
    monkeypatch.setattr(proof, "prove", lambda *_: {OPTIMIZER: Finding(refused=reason)})
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    assert agree_on_kernels(Serial(CPU)) == reason
    assert kernels.works(CPU) == (reason is None)
    monkeypatch.setenv(proof.VARIABLE, "torch")
    assert proof.VARIABLE in str(agree_on_kernels(Serial(CPU)))
    assert not kernels.works(CPU)
