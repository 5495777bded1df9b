"""`plan --cluster`: text and JSON, and one line for what cannot be predicted."""

import json
import subprocess
import sys

import pytest

from largebatch.cli.main import DONE, USER, main

FUJITSU = "resnet50_86016_fujitsu"
ABCI = ["plan", FUJITSU, "--cluster", "abci-v100", "--workers", "2048"]


def test_a_prediction_fits_a_screen_and_names_what_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(ABCI) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    rows = {line[:15].strip(): line[17:] for line in lines}
    assert rows["time"].startswith("69.7 s, 90% of such runs within 62.8 s to 77.4 s")
    assert rows["limited by"] == "compute"
    assert rows["what helps"].startswith("against launch, 18%")


def test_the_same_prediction_as_json_needs_no_torch() -> None:
    program = (
        "import sys; from largebatch.cli.main import main; "
        f"main({[*ABCI, '--json']!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    found = json.loads(done.stdout)
    assert found["low"] < 70.42 < found["high"]
    assert found["steps"] == 1350
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        pytest.param(["--cluster", "abci"], "'abci-v100'", id="unknown cluster"),
        pytest.param(["--cluster", "abci-v100", "--workers", "6144"], "4,352", id="too many"),
        pytest.param(["--cluster", "abci-v100", "--workers", "2000"], "2,000", id="no division"),
        pytest.param(["--json"], "--cluster", id="JSON of nothing"),
        pytest.param(["--out", "a.yaml"], "--calibrate", id="file of nothing"),
        pytest.param(["--calibrate"], "--out", id="calibrated to nowhere"),
        pytest.param(["--calibrate", "--out", "a.txt"], ".yaml", id="other than a cluster file"),
        pytest.param(
            ["--calibrate", "--out", "a.yaml", "--set", "optimizer={kind: muon}"],
            "optimizer.kind",
            id="Muon on one worker",
        ),
        pytest.param(["--data", "there"], "--calibrate", id="images for nothing"),
        pytest.param(["--calibrate", "--cluster", "dgx-a100"], "--cluster", id="both"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", FUJITSU, *words]) == USER
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert name in error


def test_a_run_that_exceeds_the_memory_is_limited_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--set", "batch.global_batch=4096", "--set", "batch.bn_span=512"]
    assert main(["plan", FUJITSU, "--cluster", "abci-v100", "--workers", "8", *batch]) == DONE
    shown = capsys.readouterr().out
    assert "limited by  memory" in shown
