"""The planted faults of mutants.py are caught by their tests."""

import os
import subprocess
import sys

import pytest
from mutants import ROOT
from planted import MUTANTS, Mutant

CORE = ("optim/lars.py", "models/batchnorm.py", "training/loop.py", "distributed/reducer.py")
POLISHING = (
    "polish/moments.py",
    "polish/statistics.py",
    "training/averages.py",
    "training/state.py",
)


def on_its_own(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code beside mutants.py in a process that has loaded nothing of ours."""
    return subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        cwd=ROOT / "tests" / "support",
        env={key: value for key, value in os.environ.items() if not key.startswith("COV")},
        capture_output=True,
        text=True,
    )


def test_the_modules_of_the_core_and_of_polishing_are_mutated() -> None:
    assert {mutant.module for mutant in MUTANTS} >= {*CORE, *POLISHING}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_every_replaced_text_occurs_once() -> None:
    package = ROOT / "largebatch"
    gone = [
        mutant.name
        for mutant in MUTANTS
        if (package / mutant.module).read_text(encoding="utf-8").count(mutant.find) != 1
    ]
    assert not gone


@pytest.fixture(scope="module")
def report() -> str:
    """What is said of all of them; in one process, since starting one takes longer than a test."""
    done = on_its_own("import mutants; mutants.main()")
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS])
def test_a_planted_fault_is_caught_by_its_test(mutant: Mutant, report: str) -> None:
    assert f"  caught  {mutant.module}: {mutant.name}\n" in report, report


@pytest.mark.long
def test_a_broken_copy_does_not_count_as_caught() -> None:
    """Broken code is reported as missed, and so is a fault without an effect."""
    first = MUTANTS[0]
    for put in ("absent", f"({first.find})"):
        fault = Mutant("another name", first.module, first.find, put, first.test)
        code = f"import mutants; mutants.MUTANTS = (mutants.{fault!r},); mutants.main()"
        done = on_its_own(code)
        assert "  MISSED  training/loop.py: another name" in done.stdout, done.stdout + done.stderr
