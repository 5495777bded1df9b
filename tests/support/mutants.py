"""Planted faults in the numerical core, each of which a named test must catch.

    python tests/support/mutants.py    plant every fault in a copy, run its test, say what happened

`test_mutants.py` runs this. First the same tests must pass in a copy without a fault; then a test
catches a fault by failing an assertion. A missed fault means that its test no longer checks it; a
text that is not found means that the code has changed and the fault must be updated.
"""

import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

import hypothesis
import numpy as np
import pydantic
import pytest
import torch
from planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]

LOADED = (hypothesis, np, pydantic, pytest, torch)
"""What tests load and forks of this process need not."""

SECONDS = 300
"""Seconds after which a hanging test is killed."""

SEEN = ("AssertionError", "ValueError", "DID NOT RAISE")
"""Output of a test that detected a wrong number or an error of the package."""

BROKEN = ("NameError", "ImportError", "SyntaxError")
"""What Python says of code that no test had to look at."""


def broken_before(folder: Path) -> str:
    """Return the tests' output in a copy without any fault; an empty string if they pass."""
    copy(folder)
    code, said = _run(folder, *dict.fromkeys(mutant.test for mutant in MUTANTS))
    return f"exit code {code}\n{said}" if code else ""


def caught(mutant: Mutant, folder: Path) -> bool:
    """Plant one fault in a copy of the project; return True if its test catches it.

    The copy is restored afterwards. A copy that does not run is broken, not caught: the test's
    output is printed.
    """
    module = folder / "largebatch" / mutant.module
    source = module.read_text(encoding="utf-8")
    assert source.count(mutant.find) == 1, f"{mutant.module} must hold once: {mutant.find}"
    module.write_text(source.replace(mutant.find, mutant.put), encoding="utf-8")
    try:
        code, said = _run(folder, mutant.test)
    finally:
        module.write_text(source, encoding="utf-8")
    seen = any(word in said for word in SEEN) and not any(word in said for word in BROKEN)
    if code == 1 and seen:
        return True
    print(said)
    return False


def copy(folder: Path) -> None:
    """Copy the project."""
    for part in ("largebatch", "tests", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", folder)


def _run(folder: Path, *tests: str) -> tuple[int, str]:
    """Run tests in a copy and return the exit code and the output.

    They run in a fork of this process, which has loaded their dependencies and nothing of this
    package: starting Python and loading PyTorch for every fault takes longer than the tests.
    """
    assert not any(name.partition(".")[0] == "largebatch" for name in sys.modules)
    said = folder / "said"
    child = os.fork()
    if child == 0:
        _be_pytest(folder, said, tests)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), said.read_text(encoding="utf-8", errors="replace")


def _be_pytest(folder: Path, said: Path, tests: tuple[str, ...]) -> NoReturn:
    """Never return to what the fork was in the middle of. A long traceback names every error."""
    code = 70
    try:
        signal.alarm(SECONDS)
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(folder)
        sys.path.insert(0, str(folder))  # before the installed package
        options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--no-showlocals"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is loaded
        code = pytest.main([*options, "--tb=long", *(f"tests/{test}" for test in tests)])
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def main() -> int:
    """Print the result of every fault; return exit code 1 if one was not caught."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "project"
        said = broken_before(folder)
        if said:
            print(said, "the tests fail without a fault", sep="\n")
            return 1
        missed = 0
        for mutant in MUTANTS:
            found = caught(mutant, folder)
            missed += not found
            print(f"{'caught' if found else 'MISSED':>8}  {mutant.module}: {mutant.name}")
            sys.stdout.flush()
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
