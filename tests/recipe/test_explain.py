"""`largebatch explain`: the text of every key, and the figure of a recipe's rates."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_hostile import KEYS

from largebatch.cli.main import DONE, main
from largebatch.errors import RecipeError
from largebatch.recipe.explain import explain

DIGITS = str(Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml")


def test_every_key_can_be_explained() -> None:
    for key in KEYS:
        assert explain(key).startswith(key)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("optimizer.convention", "scaled-momentum"),
        ("polish.statistics.samples", "integer > 0 and <= 33,554,432, required"),
        ("optimizer.momentum", "(kind: lars, sgd): number >= 0 and < 1, default 0.9"),
        ("schedule.decay.at", "list of sections, required"),
    ],
)
def test_an_explanation_says(key: str, shown: str) -> None:
    assert shown in explain(key)


def test_an_unknown_key_is_explained_by_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'optimizer.eta"):
        explain("optimizer.etta")
    with pytest.raises(RecipeError, match="`largebatch explain` lists them"):
        explain("xyzzy")


def test_the_facts_of_a_schedule_are_printed_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", DIGITS, "--schedule"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == (
        "digits-96: batch 96, lars, eta 0.02",
        "drawn: learning-rates.png",
    )
    assert dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines[1:-1]) == {
        "run": "599 steps, 57,504 samples, 40.02 epochs",
        "first lr": "0 at step 0 (epoch 0.00)",
        "peak lr": "0.5 at step 75 (epoch 5.01)",
        "last lr": "0.00100182 at step 598 (epoch 39.95)",
        "warm-up": "before step 75 (epoch 5.01)",
        "clean": "from 0.0112226 at step 524 (epoch 35.01)",
    }
    assert (tmp_path / "learning-rates.png").exists()


def test_drawing_a_schedule_never_imports_torch(tmp_path: Path) -> None:
    picture = str(tmp_path / "x.png")
    program = (
        "import sys; from largebatch.cli.main import main; "
        f"code = main(['explain', '--schedule', 'digits_96', '--out', {picture!r}]);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
