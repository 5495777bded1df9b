"""`doctor --replay` compares the devices of any number of workers, and names a wrong one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.cli.doctor import changes_for
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 77, 2048])
def test_workers_without_a_recipe_compute_passes_alone_and_meet_all_others(workers: int) -> None:
    recipe = load_recipe(Path("digits_96"), changes_for(workers))
    plan = make_plan(recipe, workers=workers)
    assert plan.sync_workers == 1
    assert plan.train_steps >= workers - 1


@pytest.mark.long
def test_the_wrong_one_of_three_workers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)
    words = ["doctor", "--replay", "--workers", "3", "--minutes", "0.01"]
    command = [sys.executable, "-m", "largebatch", *words, "--import", "faulty_worker"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:4]]
    wrong = {row[0]: (int(row[-2]), int(row[-1])) for row in rows}
    assert wrong["0"] == wrong["2"] == (0, 0)
    assert wrong["1"][0] > 0
    assert wrong["1"][1] == 0
