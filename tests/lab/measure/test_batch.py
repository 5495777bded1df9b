"""The command `batch`: its arithmetic by hand, a short measurement, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from short_runs import DIGITS, a_recipe

from largebatch import load_recipe
from largebatch.cli.main import DONE, USER, main
from largebatch.errors import LargebatchError
from largebatch.lab.measure import batch as module
from largebatch.lab.measure.batch import (
    Question,
    Row,
    compare,
    describe,
    draft,
    exponent,
    recommend,
)
from largebatch.lab.measure.estimate import Estimate
from largebatch.lab.planner.cluster import Measured, load_cluster
from largebatch.lab.planner.prediction import workload
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.scaling import at_batch
from largebatch.runs.options import Options
from largebatch.tracking.events import LOG
from largebatch.tracking.noise_scale import NoiseScale

STEP = 0.1
"""Seconds of an update that the tests pretend to have measured."""

ESTIMATE = Estimate("cpu", "fp32", 8, STEP, 100 * STEP, 2_000_000)

LENET = (
    *("model={name: lenet5}", "batch={global_batch: 96, bn_span: null}", "polish=null"),
    *("optimizer={kind: sgd, momentum: 0.0}", "schedule.peak_lr=0.05", "duration={steps: 200}"),
)


def noise(value: float, low: float, high: float, *, updates: int = 400) -> NoiseScale:
    return NoiseScale(value=value, low=low, high=high, noise=1.0, signal=1.0, updates=updates)


def question(tmp_path: Path, *, minutes: float = 1.0, recipe: Recipe | None = None) -> Question:
    chosen = recipe or a_recipe(changes=LENET)
    return Question(recipe=chosen, options=Options(out=tmp_path / "out"), minutes=minutes)


def elapsed(folder: Path, step_seconds: float) -> float:
    """Return the time that a clock shows which moves only with updates, those in all logs."""
    return step_seconds * sum(log.read_text().count('"event":"step"') for log in folder.rglob(LOG))


def machine(recipe: Recipe, **_: object) -> Measured:
    """Return the times that the tests pretend to have measured on this machine."""
    return Measured(
        settings=workload(recipe, workers=1).settings, device="cpu",
        seconds_per_image=1e-3, seconds_per_pass=0.01,
        seconds_per_update=0.02, gradient_bytes=1e6, messages=3, norm_layers=0,
        exchange_seconds=0.0, exchange_gigabytes_per_second=None, images_per_second_read=1e5,
    )  # fmt: skip


@pytest.fixture
def fixed_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed times in place of measured ones."""

    monkeypatch.setattr(module, "estimate", lambda *_: ESTIMATE)
    monkeypatch.setattr(module, "measure", machine)
    monkeypatch.setattr(module, "monotonic", lambda: elapsed(tmp_path, STEP))


def test_epochs_times_and_costs_follow_the_law_and_the_planner(tmp_path: Path) -> None:
    recipe = load_recipe("resnet50_8192_mlperf", ["precision=fp16"])
    cluster = load_cluster("dgx-a100").model_copy(update={"price_per_gpu_hour": 2.0})
    asked = Question(
        recipe=recipe, options=Options(out=tmp_path, workers=64), minutes=1, cluster=cluster
    )
    rows = {row.batch: row for row in compare(asked, cluster, noise(40_000, 30_000, 60_000))}
    assert rows[8192].epochs == rows[8192].low == rows[8192].high == pytest.approx(44, rel=1e-3)
    for size, row in rows.items():
        assert row.epochs == pytest.approx(44 * (1 + size / 4e4) / (1 + 8192 / 4e4), rel=1e-3)
        ends = [44 * (1 + size / end) / (1 + 8192 / end) for end in (15_000, 120_000)]
        assert (row.low, row.high) == pytest.approx(sorted(ends), rel=1e-3)
        assert row.cost == pytest.approx(2 * 64 * row.seconds / 3600)
    assert max(rows) == 131_072  # the next would be beyond four times the noise scale
    assert rows[4096].seconds < rows[2048].seconds


def test_the_smallest_batch_that_is_about_as_fast_is_recommended_unless_the_own_one_is() -> None:
    def row(batch: int, seconds: float) -> Row:
        return Row(batch, 1, 1, 1, seconds, None)

    rows = [row(32, 100), row(64, 60), row(128, 58), row(256, 30)]
    assert recommend(rows, most=128, own=32).batch == 64
    assert recommend(rows, most=128, own=128).batch == 128
    assert recommend(rows, most=64, own=128).batch == 128
    assert recommend(rows, most=256, own=128).batch == 256
    assert recommend(rows, most=10, own=64).batch == 64
    assert recommend(rows[:1], most=10, own=32).batch == 32
    assert recommend([*rows[:1], row(64, 120)], most=10, own=64).batch == 32


def test_the_rate_follows_the_edges_within_what_theory_allows() -> None:
    assert exponent(((96, 0.1), (12, 0.05))) == pytest.approx(math.log(2) / math.log(8))
    assert exponent(((96, 0.1), (12, 0.2))) == 0
    assert exponent(((96, 0.1), (192, 0.4))) == 1
    assert exponent(((96, 0.1),)) == exponent(((96, None), (192, 0.4))) == 0.5


def test_a_recipe_in_another_batch_keeps_its_shares_and_sets_no_other_keys() -> None:
    recipe = load_recipe(DIGITS, ["execution.device_batch=48", "schedule.start_lr=0.1"])
    other = at_batch(recipe, 192, epochs=60, rate=1.0)
    assert other.duration.epochs == 60
    assert other.schedule.warmup is not None
    assert other.schedule.warmup.epochs == 5 * 60 / 40
    assert other.schedule.start_lr == 0.2
    assert other.polish is not None
    assert other.polish.clean is not None
    assert other.polish.clean.epochs == 5 * 60 / 40
    assert other.execution.device_batch is None
    ours, theirs = (one.model_dump(exclude_unset=True) for one in (other, recipe))
    assert ours.keys() == theirs.keys()
    assert ours["data"] == theirs["data"]
    assert at_batch(recipe, 96).mathematics == recipe.mathematics


def measure(minutes: float, out: Path, *changes: str) -> dict[str, Any]:
    """Run the command on small digits; return what it found."""
    settings = (*LENET, "data.image_size=16", *changes)
    sets = [word for change in settings for word in ("--set", change)]
    words = ["--minutes", str(minutes), "--out", str(out)]
    assert main(["batch", str(DIGITS), *sets, *words]) == DONE
    found: dict[str, Any] = json.loads((out / "batch.json").read_text())
    return found


def test_a_measurement_writes_a_recipe_with_its_sources(
    tmp_path: Path, fixed_times: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    found = measure(0.2, out)
    printed = " ".join(capsys.readouterr().out.split())
    assert found["noise"]["updates"] == 70  # in 50 / 85 of twelve seconds
    assert len((out / "noise" / LOG).read_text().split('"device_square":')) > 70
    assert found["low"] == pytest.approx(0.2 * found["noise"]["low"] / 2)
    assert found["high"] == pytest.approx(0.2 * found["noise"]["high"] * 2)
    assert not list(out.glob("range-*"))
    (path,) = out.glob("*.yaml")
    recipe = load_recipe(path)
    assert recipe.batch.global_batch == found["chosen"]
    assert recipe.schedule.peak_lr == pytest.approx(found["rate"])
    assert f"recommended: {found['chosen']:,}" in printed
    assert "# the critical batch is" in path.read_text()


def test_a_wide_noise_scale_is_remarked_on_and_one_without_a_value_is_refused(
    tmp_path: Path,
) -> None:
    asked = question(tmp_path)
    asked.judge(noise(100, 40, 300, updates=50), planned=1000)
    assert ["--minutes 4" in remark for remark in asked.remarks] == [True]
    for found in (noise(math.nan, 40, math.inf), noise(0, 0, math.inf), noise(0, 0, 31.4)):
        with pytest.raises(LargebatchError, match="--minutes 4"):
            asked.judge(found, planned=1000)


def test_an_advice_names_the_square_root_rule_where_no_edge_was_found(tmp_path: Path) -> None:
    recipe = load_recipe("resnet50_8192_mlperf", ["precision=fp16"])
    cluster = load_cluster("dgx-a100")
    asked = Question(
        recipe=recipe, options=Options(out=tmp_path, workers=64), minutes=1, cluster=cluster
    )
    rows = compare(asked, cluster, noise(80_000, 60_000, 120_000))
    other, own = (next(row for row in rows if row.batch == size) for size in (16_384, 8192))
    advice = module.Advice(
        recipe=recipe, noise=noise(80_000, 60_000, 120_000), rows=rows, chosen=other, edges=(),
    )  # fmt: skip
    assert advice.critical == pytest.approx((16_000, 6_000, 48_000))
    first, *others = describe(advice)
    assert first.startswith("recommended: 16,384")
    (line,) = (each for each in others if each.startswith("learning rate: "))
    assert f"{advice.rate:.12g}" not in line  # no range test had time
    text = "\n".join(others)
    assert "critical batch: 16,000 (6,000 to 48,000)" in text
    assert "square-root rule" in text
    written = parse_recipe(draft(advice))
    assert written.schedule.peak_lr == pytest.approx(17 * math.sqrt(2), rel=0.01)
    assert written.duration.epochs == pytest.approx(other.epochs, rel=1e-3)
    kept = replace(advice, chosen=own)
    text = "\n".join(describe(kept))
    assert "recommended: 8,192" in text
    named = recipe.model_copy(update={"name": "resnet50-8192-mlperf-8192"})
    assert parse_recipe(draft(kept)).mathematics == named.mathematics


@pytest.mark.long
@pytest.mark.parametrize("slower", [1, 3])
def test_the_minutes_suffice_on_a_machine_that_others_slow_down(
    slower: int, tmp_path: Path, fixed_times: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step time that is measured first is STEP in both cases."""
    step = slower * STEP
    monkeypatch.setattr(module, "monotonic", lambda: elapsed(tmp_path, step))
    found = measure(0.4, tmp_path / "out")
    assert found["noise"]["updates"] == {1: 141, 3: 47}[slower]
    assert elapsed(tmp_path, step) <= 0.4 * 60


BATCH = "batch.schedule=[{after: {epochs: 2}, global_batch: 192, lr_factor: 2.0}]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", "2"], "--cluster"),
        (["--cluster", "dgx-z"], "--cluster dgx-z"),
        (["--cluster", "dgx-a100"], "resnet50"),
        (["--out", "file/out"], "file/out"),
        (["--set", "batch.global_batch=1536"], "1,437"),
        (["--minutes", "0.001"], "--minutes 0.001"),
        (["--set", BATCH], "batch.schedule: "),
        (["--workers", "5"], "5 workers"),
        (["--set", "data.source=folder", "--data", "EMPTY"], "EMPTY"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    fixed_times: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "file").touch()
    sets = [word for change in LENET for word in ("--set", change)]
    out = [] if "--out" in words else ["--out", "out"]
    assert main(["batch", str(DIGITS), *sets, *words, *out]) == USER
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
