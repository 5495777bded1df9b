"""The command `explain --schedule`: rates of several recipes in one figure."""

import re
from pathlib import Path

import pytest
from PIL import Image

from largebatch.cli.main import DONE, main


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
    text = Path("recipes/quickstart/digits_96.yaml").read_text()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(text.replace("peak_lr: 0.5", "peak_lr: 0.25"))
    words = ["explain", "--schedule", "digits_96", str(folder), "--out", str(tmp_path / "a.png")]
    assert main([*words, "--by", "samples"]) == DONE
    shown = capsys.readouterr().out
    assert re.findall(r"(.*): batch", shown) == ["digits_96", str(folder)]
    assert re.findall(r"peak lr +([^ ]+) at step 75", shown) == ["0.5", "0.25"]
