"""The command `referee`: what it prints, draws and returns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlperf_logs import recipe, run_folders, seeds
from PIL import Image

from largebatch.cli.main import DONE, FAILED, USER, main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five runs that keep every rule."""
    root = tmp_path_factory.mktemp("runs")
    return [str(path) for path in run_folders(root, seeds("32768_mlperf"), [55.5, 56, 56, 57, 57])]


def test_the_verdicts_are_sentences_with_a_chart(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "epochs.png"
    assert main(["report", "mlperf", *folders, "--out", str(chart)]) == DONE
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown[:4]] == [
        ["compliance", "passed"],
        ["seeds", "passed"],
        ["convergence", "passed"],
        ["system", "unchecked"],
    ]
    assert "cache_clear is false" in shown[4]
    assert shown[-1] == f"drawn: {chart}"
    with Image.open(chart) as image:
        assert image.size == (1920, 720)
        assert len(image.convert("L").getcolors() or ()) > 20


def test_a_verdict_against_the_runs_ends_with_code_1_and_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = map(str, run_folders(tmp_path, [recipe("32768_mlperf")], 5 * [50.0]))
    assert main(["report", "mlperf", *paths]) == FAILED
    shown = capsys.readouterr().out
    assert "seeds  FAILED" in shown
    assert "convergence  FAILED" in shown
    assert "logs seed 1 on mlperf/logger.py" in shown
    assert (tmp_path / "referee.png").exists()


@pytest.mark.parametrize(("epochs", "code"), [(56.0, DONE), (50.0, FAILED)])
def test_a_chart_that_cannot_be_written_loses_no_verdict(
    epochs: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = list(map(str, run_folders(tmp_path, seeds("32768_mlperf"), 5 * [epochs])))
    (tmp_path / "folder.png").mkdir()
    words = ["report", "mlperf", *paths, "--out", str(tmp_path / "folder.png")]
    assert main(words) == code
    shown = capsys.readouterr()
    assert "convergence  " in shown.out
    assert "drawn" not in shown.out
    assert (
        shown.err == f"largebatch: {tmp_path}/folder.png: cannot write the chart: Is a directory\n"
    )
    assert main([*words, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] == (code == DONE)
    assert found["chart"] is None


def test_everything_is_there_as_json(
    folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = str(tmp_path / "epochs.png")
    assert main(["report", "mlperf", *folders, "--json", "--out", chart]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["chart"] == chart
    assert [log["epochs"] for log in found["logs"]] == [55.5, 56, 56, 57, 57]
    assert found["reference"]["batch"] == 32_768
    assert {each["name"]: each["passed"] for each in found["verdicts"]} == {
        "compliance": True, "seeds": True, "convergence": True, "system": None
    }  # fmt: skip


def test_what_cannot_be_checked_is_one_line_and_code_2(
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "no.json").write_text("{")
    for words, message in (
        ([str(tmp_path)], "holds neither mlperf.log nor result_*.txt; a run writes its log with"),
        ([str(tmp_path / "none")], "expected a run folder or one of result_*.txt"),
        ([*folders, "--out", "chart.txt"], "the chart is a PNG file"),
        ([*folders, "--system", str(tmp_path / "no.json")], "no system description in JSON"),
        ([*folders, "--system", str(tmp_path / "none.json")], "no system description in JSON"),
    ):
        assert main(["report", "mlperf", *words]) == USER
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "mlperf_logging.compliance_checker.mlp_parser", None)
    monkeypatch.delitem(sys.modules, "mlperf_logging.compliance_checker", raising=False)
    assert main(["report", "mlperf", *folders]) == USER
    assert "referee needs mlperf-logging, which is not installed" in capsys.readouterr().err


def test_checking_imports_no_torch(folders: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; from largebatch.cli.main import main; "
        f"code = main(['referee', *{folders!r}, '--out', {str(tmp_path / 'x.png')!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
