"""The study of benchmarks/polishing_optimizers.py: its recipes, its search and its differences."""

import sys
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_1samp

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import polishing_optimizers as study  # noqa: E402
from polishing_cells import Cell  # noqa: E402


@pytest.mark.parametrize("optimizer", study.OPTIMIZERS)
def test_recipes_differ_in_optimizer_and_rate_alone(optimizer: str) -> None:
    ours, sgd = (
        study.recipe_of(study.cell(it, seed=1, rate=0.02)).model_dump() for it in (optimizer, "sgd")
    )
    assert ours["optimizer"]["kind"] == optimizer
    assert ours["schedule"]["peak_lr"] == 0.02
    assert ours | {"optimizer": None} == sgd | {"optimizer": None}


def test_the_search_goes_on_until_the_best_rate_has_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def carry_out(of: Cell, _: Path) -> dict[str, Any]:
        asked.append(of.rate)
        assert of.seed == study.SEARCH_SEED
        assert not of.clean
        return {"arms": {"control": {"top1": -abs(of.rate - 0.9)}}}

    monkeypatch.setattr(study, "carry_out", carry_out)
    assert study.search("sgd", tmp_path) == 0.9
    assert asked == [0.0333, 0.1, 0.3, 0.9, 2.7]


def test_gains_are_paired_by_seed_and_held_against_those_of_lars() -> None:
    gains = {"lars": (1.0, 2.0, 3.0), "muon": (3.0, 3.0, 6.0)}
    cells = {
        f"{name} {seed}": {
            "group": study.cell(name, seed=seed, rate=1.0).group,
            "seed": seed,
            "rate": 1.0,
            "arms": {
                "control": {"top1": 0.8 + seed / 100, "loss": 1.0},
                "clean 2": {"top1": 0.8 + (seed + gain) / 100, "loss": 1.0},
            },
        }
        for name, each in gains.items()
        for seed, gain in enumerate(each, start=1)
    }
    tried = {"group": "digits", "seed": study.SEARCH_SEED, "rate": 1.0}
    found = study.result(cells | {"search": tried | {"arms": {"control": {"top1": 0.5}}}})
    (row,) = found["against lars"]
    low, high = ttest_1samp([2.0, 1.0, 3.0], 0).confidence_interval(0.95)
    assert (row["optimizer"], row["arm"]) == ("muon", "clean 2")
    assert row["difference"] == pytest.approx({"mean": 2.0, "low": low, "high": high, "n": 3})
    assert found["cells"].keys() == cells.keys()
    assert found["search"] == [{"group": "digits", "rate": 1.0, "top1": 0.5}]


def test_a_recorded_cell_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train_logged(of: Cell, *_: object, **__: object) -> dict[str, Any]:
        trained.append(of.key)
        return {"arms": {"control": {"top1": 0.9, "loss": 0.3}}, "seconds": 1.0}

    monkeypatch.setattr(study, "train_logged", train_logged)
    cell = study.cell("muon", seed=1, rate=0.01)
    first, again = (study.carry_out(cell, tmp_path) for _ in range(2))
    assert first == again
    assert len(trained) == 1
    assert list(study.read(tmp_path).values()) == [first]
