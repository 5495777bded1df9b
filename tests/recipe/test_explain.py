"""`largebatch explain`: the text of every key, and the figure of a recipe's rates."""

import re
from pathlib import Path

import pytest
from PIL import Image
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
        ("optimizer.momentum", "(kind: lars, sgd"),
        ("schedule.decay.at", "list of sections, required"),
    ],
)
def test_an_explanation_says(key: str, shown: str) -> None:
    assert shown in explain(key)


def test_an_unknown_key_is_explained_by_the_nearest() -> None:
    with pytest.raises(RecipeError, match="'optimizer.eta"):
        explain("optimizer.etta")
    with pytest.raises(RecipeError, match="largebatch explain"):
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


def test_each_recipe_has_the_rates_that_were_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FACTS section 3: MLPerf's points, 21.2 after 16 epochs and 24.699 after 31, from step 1."""
    figure = tmp_path / "rates.png"
    names = ["resnet50_32768_mlperf", "resnet50_65536_mlperf", "resnet50_32768_nesterov"]
    assert main(["explain", "--schedule", *names, "--out", str(figure)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if "batch" in line]
    assert heads[0] == "resnet50-32768-mlperf: batch 32,768, lars, eta 0.001"
    assert heads[2].endswith(", sgd")
    peaks = [line for line in lines if line.split()[0] == "peak"]
    found = [re.findall("peak lr +([^ ]+) .*epoch ([^)]+)", line)[0] for line in peaks[:2]]
    assert found == [("21.2", "15.99"), ("24.699", "30.95")]
    assert lines[-1] == f"drawn: {figure}"
    with Image.open(figure) as image:
        assert image.width == 1920
        assert len(image.convert("RGB").getcolors(2**20) or []) > 50


def test_recipes_of_one_name_are_told_apart_by_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder is drawn by its recipe.yaml."""
    text = Path(DIGITS).read_text()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(text.replace("peak_lr: 0.5", "peak_lr: 0.25"))
    words = ["explain", "--schedule", "digits_96", str(folder), "--out", str(tmp_path / "a.png")]
    assert main([*words, "--by", "samples"]) == DONE
    shown = capsys.readouterr().out
    assert re.findall(r"(.*): batch", shown) == ["digits_96", str(folder)]
    assert re.findall(r"peak lr +([^ ]+) at step 75", shown) == ["0.5", "0.25"]
