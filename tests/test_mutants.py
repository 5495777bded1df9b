from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant, survives


def test_the_four_modules_of_the_core_are_mutated() -> None:
    modules = {mutant.module for mutant in MUTANTS}
    assert modules >= {"lars.py", "norm.py", "train.py", "backends/reducer.py"}
    assert len(MUTANTS) >= 10


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS])
def test_a_planted_fault_is_caught_by_its_test(mutant: Mutant, tmp_path: Path) -> None:
    assert not survives(mutant, tmp_path / "project")
