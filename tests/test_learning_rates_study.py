"""What benchmarks/learning_rates.py carries out, and what its tables say of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import learning_rates_tables as tables  # noqa: E402
from learning_rates import CONFIGURATIONS, Configuration, policies  # noqa: E402

from largebatch.recipe.loading import validate_tree  # noqa: E402
from largebatch.recipe.plan import make_plan  # noqa: E402
from largebatch.schedules.build import build_schedule  # noqa: E402
from largebatch.studies.cells import cells_of  # noqa: E402
from largebatch.studies.study import Study  # noqa: E402


@pytest.mark.parametrize("one", CONFIGURATIONS, ids=lambda one: one.key)
def test_every_configuration_can_be_planned(one: Configuration) -> None:
    study = validate_tree(Study, one.study(), source=one.name)
    cells = cells_of(study, ROOT)
    assert [cell.variant for cell in cells] == list(policies(peak=1.0, epochs=1, steps=100))
    for cell in cells:
        plan = make_plan(cell.recipe, workers=1)
        rates = build_schedule(cell.recipe)
        assert max(rates(step) for step in range(plan.steps)) <= cell.recipe.schedule.peak_lr


def fake(top1: float, *, sooner: int) -> dict[str, Any]:
    seeds = {
        str(seed): {
            "top1": top1 + 0.001 * seed,
            "curve": [[100 // sooner, top1 + 0.001 * seed], [100, top1 + 0.001 * seed]],
        }
        for seed in range(1, 6)
    }
    scaled = {scale: [top1 - 0.1, top1 - 0.1] for scale in ("0.1", "0.5", "5", "10")}
    trials = [[0.1, 0.5, None], [0.2, 0.6, 40]]
    return {"rate": 0.1, "edge": None, "trials": trials, "seeds": seeds, "scaled": scaled}


def test_tables_have_every_claim_with_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(policies(peak=1.0, epochs=1, steps=100))
    small = {name: fake(0.8 + 0.01 * at, sooner=1) for at, name in enumerate(names)}
    small["tri"] = fake(0.85, sooner=4)
    large = {name: fake(0.9 - 0.01 * at, sooner=1) for at, name in enumerate(names)}
    found = {"digits, small, sgd": small, "digits, large, sgd": large}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"configurations": found}))
    monkeypatch.setattr(tables, "newest", lambda *_: path)
    tables.main()
    text = capsys.readouterr().out
    assert "### digits, small, sgd: updates to 80%" in text
    assert "| tri | 0.1 | 85.30 (85.10 to 85.50) | +5.00 (+5.00 to +5.00) | 4.00 (4.00 to" in text
    assert "tri 4.00 (4.00 to 4.00) | 1 | 0 | none |" in text
    assert "| digits, small, sgd | digits, large, sgd | -1.00 (" in text
    assert "fix 72." in text
