from pathlib import Path

import pytest
from mutants import MUTANTS, Mutant, broken_before, caught


def test_the_four_modules_of_the_core_are_mutated() -> None:
    modules = {mutant.module for mutant in MUTANTS}
    assert modules >= {"lars.py", "norm.py", "train.py", "backends/reducer.py"}
    assert len(MUTANTS) >= 10


def test_without_a_fault_the_same_tests_pass(tmp_path: Path) -> None:
    assert broken_before(tmp_path / "project") == ""


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS])
def test_a_planted_fault_is_caught_by_its_test(mutant: Mutant, tmp_path: Path) -> None:
    assert caught(mutant, tmp_path / "project")


def test_a_copy_that_does_not_run_does_not_count_as_caught(tmp_path: Path) -> None:
    first = MUTANTS[0]
    broken = Mutant("a name that is not there", first.module, first.find, "absent", first.test)
    assert not caught(broken, tmp_path / "project")
