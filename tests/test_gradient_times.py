"""The program that times the gradients of a study of servers: what `compute` states."""

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import gradient_times  # noqa: E402


def test_times_are_of_one_sample_and_around_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    study = ROOT / "docs" / "examples" / "digits_servers.yaml"
    written: dict[str, Any] = {}
    monkeypatch.setattr(gradient_times, "GRADIENTS", 3)
    monkeypatch.setattr(gradient_times, "write", lambda *args: written.update(args[2]))
    monkeypatch.setattr(sys, "argv", ["gradient_times.py", str(study)])
    threads = torch.get_num_threads()
    try:
        gradient_times.main()
    finally:
        torch.set_num_threads(threads)
    (found,) = written["recipes"].values()
    assert found["mini_batch"] == 64
    assert found["sample"] > 0
    assert len(found["factor"]) == 3
    assert fmean(found["factor"]) == pytest.approx(1, abs=1e-3)
