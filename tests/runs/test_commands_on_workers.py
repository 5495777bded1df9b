"""`evaluate` and `polish` on several local workers, started by --workers as `train` starts them."""

import os
import re
from pathlib import Path

import pytest
import torch
from short_runs import CLEAN, STATISTICS, a_recipe

from largebatch import run
from largebatch.cli.main import DONE, main
from largebatch.runs import build
from largebatch.runs.options import Options


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


@pytest.mark.parametrize(
    ("chosen", "cores", "warned"),
    [
        pytest.param({}, 2, True, id="too late"),
        pytest.param({"OMP_WAIT_POLICY": "PASSIVE"}, 2, False, id="chosen in time"),
        pytest.param({"OMP_NUM_THREADS": "1"}, 2, False, id="one thread chosen"),
    ],
)
def test_a_program_whose_threads_spin_is_told_what_to_import_first(
    chosen: dict[str, str],
    cores: int,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(build, "available_cores", lambda: cores)
    threads = [int(chosen.get("OMP_NUM_THREADS", 1))]
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    with build.join(Options(out=tmp_path), {}):
        pass
    assert ("import run from largebatch before torch" in caplog.text) == warned
