"""A short soak: runs disturbed a few times end like undisturbed ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.long
def test_randomly_disturbed_runs_end_like_undisturbed_ones(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, str(SOAK), "--faults", "12", "--seed", "3", "--out", str(out)]
    subprocess.run(command, check=True, timeout=3600)
    result = json.loads(out.read_text())
    assert result["faults"] >= 12
    assert (result["lost"], result["orphans"]) == ([], 0)
    assert 0 < result["effective_training_time_ratio"] < 1
