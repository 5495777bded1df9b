"""A short soak: runs disturbed a few times end like undisturbed ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed.measuring import ROOT


@pytest.mark.long
def test_randomly_disturbed_runs_end_like_undisturbed_ones(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.studies.soak.soak"]
    options = ["--faults", "12", "--seed", "3", "--out", str(out)]
    subprocess.run([*command, *options], check=True, timeout=3600, cwd=ROOT)
    result = json.loads(out.read_text())
    assert result["faults"] >= 12
    assert (result["lost"], result["orphans"]) == ([], 0)
    assert 0 < result["effective_training_time_ratio"] < 1
