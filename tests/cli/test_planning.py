"""`plan --cluster`: text, JSON and picture, and one line for what cannot be predicted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from largebatch.cli.main import DONE, USER, main

FUJITSU = "resnet50_86016_fujitsu"
ABCI = ["plan", FUJITSU, "--cluster", "abci-v100", "--workers", "2048"]


def test_a_prediction_fits_a_screen_and_names_what_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(ABCI) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    rows = {line[:15].strip(): line[17:] for line in lines}
    assert rows["time"].startswith("69.7 s, 90% of such runs within 62.8 s to 77.4 s")
    assert (
        rows["included"] == "getting up to speed, updates, waits for input, evaluations, statistics"
    )
    assert "the job's own start" in rows["not included"]
    assert rows["limited by"] == "compute"
    assert rows["what helps"].startswith("against launch, 18%")
    assert "efficiency" in rows["throughput"]
    assert rows["2,048"].split()[0] == "49,152"  # the best batch there


def test_the_same_prediction_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ABCI, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["low"] < 70.42 < found["high"]
    assert found["steps"] == 1350
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert {point["workers"] for point in found["best_batches"]} >= {1, 2048, 4352}


def test_the_chart_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "abci.png"
    assert main([*ABCI, "--out", str(picture)]) == DONE
    assert str(picture) in capsys.readouterr().out
    with Image.open(picture) as image:
        assert image.size == (1920, 800)
        assert len(image.convert("RGB").getcolors(2**20) or []) > 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--cluster", "abci"], "did you mean 'abci-v100'", id="unknown cluster"),
        pytest.param(["--cluster", "abci-v100", "--workers", "9000"], "4,352", id="too many"),
        pytest.param(
            ["--cluster", "abci-v100", "--workers", "2000"], "cannot be divided", id="no division"
        ),
        pytest.param(["--json"], "give --cluster NAME", id="JSON of nothing"),
        pytest.param(["--out", "a.png"], "give --cluster NAME", id="chart of nothing"),
        pytest.param(["--calibrate"], "give --out FILE.yaml", id="calibrated to nowhere"),
        pytest.param(["--calibrate", "--out", "a.txt"], "ends in .yaml", id="no cluster file"),
        pytest.param(
            ["--calibrate", "--out", "a.yaml", "--set", "optimizer={kind: muon}"],
            "its workers share an update",
            id="Muon on one worker",
        ),
        pytest.param(["--data", "there"], "give --calibrate", id="images for nothing"),
        pytest.param(
            ["--cluster", "abci-v100", "--data", "there"], "give --calibrate", id="images there"
        ),
        pytest.param(
            ["--calibrate", "--out", "a.yaml", "--json"], "--json is for", id="measured JSON"
        ),
        pytest.param(
            ["--calibrate", "--out", "a.yaml", "--workers", "2"], "--workers is", id="two measured"
        ),
        pytest.param(
            ["--calibrate", "--out", "/nowhere/a.yaml"], "no folder", id="measured to nowhere"
        ),
        pytest.param(["--calibrate", "--cluster", "dgx-a100"], "one of the two", id="both"),
        pytest.param(
            ["--cluster", "abci-v100", "--out", "a.pdf"], "ends in .png", id="another chart"
        ),
        pytest.param(
            ["--cluster", "abci-v100", "--out", "a.png", "--set", "data.classes=10"],
            "has 10 classes; leave --out out",
            id="no epoch law",
        ),
    ],
)
def test_mistakes_are_one_clear_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", FUJITSU, *words]) == USER
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_run_that_exceeds_the_memory_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--set", "batch.global_batch=4096", "--set", "batch.bn_span=512"]
    assert main(["plan", FUJITSU, "--cluster", "abci-v100", "--workers", "8", *batch]) == DONE
    shown = capsys.readouterr().out
    assert "limited by  memory: a device batch does not fit" in shown
    assert "kWh, GPUs alone" in shown


def test_predicting_needs_no_torch() -> None:
    program = (
        "import sys; from largebatch.cli.main import main; "
        f"main({[*ABCI, '--json']!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)
