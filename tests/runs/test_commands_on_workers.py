"""`evaluate` and `polish` on several local workers, started by --workers as `train` starts them."""

import os
import re
from pathlib import Path

import pytest
from short_runs import CLEAN, STATISTICS, a_recipe

from largebatch import run
from largebatch.cli.main import DONE, main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(a_recipe(CLEAN, STATISTICS), out=folder)
    return folder


def numbers(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", printed.partition("(")[0])]


def test_evaluate_measures_on_two_workers_what_one_measures(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained)]) == DONE
    alone = capfd.readouterr().out
    assert main(["evaluate", str(trained), "--workers", "2"]) == DONE
    together = capfd.readouterr().out
    assert numbers(together) == pytest.approx(numbers(alone), abs=1e-4)
    assert together.count("top-1") == 1
    assert "(360 images)" in together


def test_threads_sleep_while_they_wait_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for before, after in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if before:
            monkeypatch.setenv("OMP_WAIT_POLICY", before)
        assert main(["recipes"]) == DONE
        assert os.environ["OMP_WAIT_POLICY"] == after
