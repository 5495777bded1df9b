"""The command `lab study` on folders of studies."""

from pathlib import Path

import pytest
from short_studies import SERVERS, Policy, measured, write_study

from largebatch.cli.main import DONE, USER, main

QUICK = Policy(reached=[4, 5, 6], top1=[0.91, 0.92, 0.93])
SLOW = Policy(reached=[9, 10, 11], top1=[0.95, 0.96, 0.96])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "runs" / "tiny").mkdir(parents=True)
    measured(folder / "runs" / "tiny", {"quick": QUICK, "slow": SLOW}, recorded=True, targets=[0.9])
    return folder


def test_a_finished_study_is_drawn_and_recommended_from(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(filled)
    assert main(["lab", "study", "runs/tiny/study.yaml", "--jobs", "2"]) == DONE
    text = capsys.readouterr().out
    assert "page: runs/tiny/study.html" in text
    assert "recommended by cost to 90.00%: quick" in text
    assert "by accuracy: slow" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study", "rudr"], "rudra"),
        (["study", "lrbench", "--data", "/images"], "/images would not be read"),
        (["study", "study.yaml", "--page"], "no run of the study has finished"),
        (["study", "jaeger", "--data", "no=x", "--out", "a"], "--data no="),
    ],
)
def test_a_mistake_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path)
    assert main(["lab", *words]) == USER
    assert message in capsys.readouterr().err


def test_the_runs_that_are_left_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_study(tmp_path, SERVERS, seeds=2))
    assert main(["lab", "study", path, "--dry-run", "--out", str(tmp_path / "out")]) == DONE
    *lines, total = capsys.readouterr().out.splitlines()
    assert "lenet5/central-2 seed-1" in lines
    assert total.startswith(f"{len(lines)} of ")
    assert [each.name for each in tmp_path.iterdir()] == ["study.yaml"]
