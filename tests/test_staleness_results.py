"""The results of a study of staleness, as benchmarks/studies_on_hosts.py writes them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
from studies_on_hosts import _staleness  # noqa: E402

from largebatch.lab.studies.staleness.run import runs_of  # noqa: E402
from largebatch.lab.studies.staleness.study import cells_of, load_study  # noqa: E402

STUDY = "rudra-small"


def recorded(out: Path, *, fails: str = "") -> None:
    """Write a record of every run; late cells have 4 points less, one of them fails with seed 2."""
    study = load_study(STUDY)
    for run in runs_of(cells_of(study, ROOT), seeds=study.seeds, out=out):
        is_late = bool(run.cell.sigma)
        top1 = 0.6 - 0.04 * is_late + 0.01 * ((run.seed * (1 + is_late)) % 3)
        if (run.cell.name, run.seed) == (fails, 2):
            top1 = 0.1
        content = {
            "seed": run.seed, "top1": top1, "diverged": None, "simulated_seconds": 2.0,
            "tau": [10, 5], "tau_mean": 1.0, "updates": 15,
        }  # fmt: skip
        definition = {"recipe": run.cell.recipe_of(run.seed), "cluster": run.cell.machines}
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.write_text(json.dumps({**content, **definition}), encoding="utf-8")


def test_late_cells_are_held_against_hardsync_of_the_same_recipe(tmp_path: Path) -> None:
    recorded(tmp_path)
    found = _staleness(STUDY, tmp_path)
    assert found["runs"] == found["runs that the study has"] == 27
    assert len(found["rows"]) == 9
    points = found["points above hardsync"]
    assert len(points) == 5, "three of SGD, one of LARS and one of BatchNorm"
    for one in points.values():
        assert one["mean"] == pytest.approx(-4)
        assert one["low"] < -4 < one["high"] < 0
    json.dumps(found, allow_nan=False)


def test_a_cell_of_which_a_run_fails_has_no_difference(tmp_path: Path) -> None:
    recorded(tmp_path)
    name = next(iter(_staleness(STUDY, tmp_path)["points above hardsync"]))
    other = tmp_path / "failed"
    recorded(other, fails=name)
    points = _staleness(STUDY, other)["points above hardsync"]
    assert len(points) == 4
    assert name not in points
