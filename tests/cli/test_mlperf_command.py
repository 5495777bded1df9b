"""`report mlperf`: its verdicts and exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest
from mlperf_logs import run_folders, seeds

from largebatch.cli.main import USER, main


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five runs that keep every rule."""
    root = tmp_path_factory.mktemp("runs")
    return [str(path) for path in run_folders(root, seeds("32768_mlperf"), [55.5, 56, 56, 57, 57])]


def test_five_good_runs_pass_without_torch(folders: list[str]) -> None:
    program = (
        "import sys; from largebatch.cli.main import main; "
        f"code = main({['report', 'mlperf', *folders]!r}); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert [line.split()[:2] for line in done.stdout.splitlines()[:3]] == [
        ["compliance", "passed"],
        ["seeds", "passed"],
        ["convergence", "passed"],
    ]


def test_what_cannot_be_checked_is_one_line_and_code_2(
    folders: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for words, name in (([str(tmp_path)], str(tmp_path)), ([str(tmp_path / "none")], "none")):
        assert main(["report", "mlperf", *words]) == USER
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "mlperf_logging.compliance_checker.mlp_parser", None)
    monkeypatch.delitem(sys.modules, "mlperf_logging.compliance_checker", raising=False)
    assert main(["report", "mlperf", *folders]) == USER
    assert "mlperf-logging" in capsys.readouterr().err
