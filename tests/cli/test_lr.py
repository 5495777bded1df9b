"""The command `explain --schedule`: rates of several recipes in a table and in one figure."""

import re
from pathlib import Path

import pytest
from PIL import Image
from schedules_of import course_of

from largebatch.cli.main import DONE, main
from largebatch.recipe.loading import load_recipe
from largebatch.report.rates import Rates


def rates_of(name: str, *changes: str) -> Rates:
    recipe = load_recipe(name, changes)
    return Rates(recipe.name, recipe, course_of(recipe))


def test_a_table_has_the_rates_of_the_published_recipes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FACTS section 3: MLPerf's points, 21.2 after 16 epochs and 24.699 after 31, from step 1."""
    figure = tmp_path / "rates.png"
    names = ["resnet50_32768_mlperf", "resnet50_65536_mlperf", "resnet50_32768_nesterov"]
    assert main(["explain", "--schedule", *names, "--out", str(figure)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(r"  +", line) for line in lines[:4]]
    assert rows[0] == ["recipe", "optimizer", "batch", "steps", "epochs", "peak", "at", "last",
                       "mean"]  # fmt: skip
    assert rows[1][1:3] == ["LARS, eta 0.001", "32,768"]
    assert [row[5:7] for row in rows[1:3]] == [["21.2", "epoch 15.99"], ["24.7", "epoch 30.95"]]
    assert rows[3][1] == "SGD"
    assert lines[4].startswith("Rates of different optimizers do not compare by height")
    assert lines[-1] == f"drawn: {figure}"
    with Image.open(figure) as image:
        assert image.width == 1920
        assert len(image.convert("RGB").getcolors(2**20) or []) > 50


def test_the_mean_is_the_area_below_the_curve_over_the_samples() -> None:
    """A square of the line from 1 to 0 has the mean 1/3; half the ramp before it has 1/2."""
    words = ("schedule.peak_lr=1", "duration={steps: 3000}", "schedule.warmup={steps: 1500}",
             "schedule.decay.end_lr=0")  # fmt: skip
    assert rates_of("digits_96", *words).mean == pytest.approx((1 / 2 + 1 / 3) / 2, rel=1e-3)


def test_the_mean_of_a_run_whose_batch_grows_counts_samples() -> None:
    words = ("duration={steps: 30}", "schedule={peak_lr: 1, warmup: null, decay: {kind: constant}}",
             "polish=null", "evaluation={}",
             "batch.schedule=[{after: {steps: 10}, global_batch: 192, lr_factor: 2}]")  # fmt: skip
    each = rates_of("digits_96", *words)
    assert len(each.course.rates) == 30
    assert each.mean == pytest.approx((10 * 96 * 1 + 20 * 192 * 2) / (10 * 96 + 20 * 192))


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
    rows = capsys.readouterr().out.splitlines()[1:3]
    assert [row.split()[0] for row in rows] == ["digits_96", str(folder)]
    assert re.search(r" 0.5 +samples 7,200 ", rows[0])
    assert re.search(r" 0.25 +samples 7,200 ", rows[1])
