"""A run on mixed images: which records are of them, where they end, and how it is resumed."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from short_runs import CLEAN, a_recipe, apart, log

from largebatch import run
from largebatch.report.charts import draw_loss
from largebatch.report.page import charts_of
from largebatch.report.record import record_of, smoothing_floor
from largebatch.report.run import read_run
from largebatch.tracking.console import Console
from largebatch.tracking.events import Start, StepEvent
from largebatch.tracking.scalars import Scalars, logged

MIX = "data.mix={mixup: 0.4, cutmix: 1, until: {steps: 4}}"
CHANGES = (MIX, "monitor=[generalization_gap]", "model.arguments.drop_rate=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight updates: four on mixed images, two on others, two on clean ones."""
    path = tmp_path_factory.mktemp("mixed") / "run"
    run(a_recipe(CLEAN, changes=CHANGES), out=path)
    return path


def test_log_and_trackers_have_which_losses_are_of_mixed_images(folder: Path) -> None:
    steps = log(folder, "step")
    assert [step.get("mixed", False) for step in steps] == [True] * 4 + [False] * 4
    scalars = Scalars()
    given = [scalars.take(event) for event in logged(folder / "log.jsonl")]
    of_updates = [numbers for numbers in given if "train/loss" in numbers]
    assert ["train/mixed" in numbers for numbers in of_updates] == [True] * 4 + [False] * 4


def test_the_console_and_the_report_say_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("largebatch.tracking.console.LINE_SECONDS", 0.0)  # a line for each update
    lines = []
    console = Console()
    for event in logged(folder / "log.jsonl"):
        if isinstance(event, Start | StepEvent):
            console.record(event)
            lines.append("mixed" in capsys.readouterr().out)
    assert lines == [False] + [True] * 4 + [False] * 4
    trained = read_run(folder)
    assert "data.mix" in charts_of(trained)["loss"].caption
    figure = Figure()
    draw_loss(figure, trained)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert any("mixed" in text for text in texts)
    record = record_of(trained)
    assert not record.mixed  # at the end
    assert record.floor == smoothing_floor(a_recipe(CLEAN).loss, 10)


def test_a_run_resumed_before_and_after_the_end_of_mixing_ends_with_identical_bits(
    folder: Path, tmp_path: Path
) -> None:
    recipe = a_recipe(CLEAN, changes=CHANGES)
    run(recipe, out=tmp_path / "parts", max_steps=3)
    run(recipe, out=tmp_path / "parts", max_steps=5, resume=True)
    run(recipe, out=tmp_path / "parts", resume=True)
    assert apart(folder, tmp_path / "parts", 0.0) == {}


@pytest.mark.long
def test_half_of_a_device_batch_has_the_same_weights(folder: Path, tmp_path: Path) -> None:
    run(a_recipe(CLEAN, changes=(*CHANGES, "execution.device_batch=48")), out=tmp_path / "halves")
    assert apart(folder, tmp_path / "halves", 1e-4) == {}
