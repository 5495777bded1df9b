"""Whole runs on a short text, what they record, and what is refused of it in one line."""

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from short_text import text_recipe, words_of, write_text

from largebatch import run
from largebatch.cli.main import main
from largebatch.data.text.pipeline import VOCABULARY, read_corpus
from largebatch.errors import CheckpointError
from largebatch.recipe.loading import parse_yaml
from largebatch.recipe.writing import dump_recipe
from largebatch.report import write_comparison, write_report
from largebatch.report.page import describe_waits
from largebatch.report.run import Run, read_run
from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.options import Options
from largebatch.tracking.events import Summary
from largebatch.tracking.scalars import Scalars
from largebatch.training.checkpoint import load_checkpoint

EVALUATED = ("evaluation={every_epochs: 0.5}", "monitor=generalization_gap")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    out = tmp_path_factory.mktemp("runs") / "run"
    changes = ("duration={steps: 12}", *EVALUATED)
    return out, run(text_recipe(folder, *changes), data=folder, out=out)


@pytest.fixture(scope="module")
def read(trained: tuple[Path, Summary]) -> Run:
    return read_run(trained[0])


def test_a_run_records_the_perplexity_of_every_evaluation(
    trained: tuple[Path, Summary], read: Run, folder: Path
) -> None:
    assert len(read.evaluations) == 3
    for found in read.evaluations:
        assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-12)
        assert found.samples == len(words_of(folder, "val"))
        assert math.isnan(found.average_confidence)
        assert Scalars().take(found)["val/perplexity"] == found.perplexity
    summary = trained[1]
    assert summary.perplexity == read.evaluations[-1].perplexity == summary.stages[-1].perplexity
    assert not read.mistakes
    assert summary.loss is not None
    assert read.gaps[0].gap == pytest.approx(summary.loss - read.gaps[0].loss, rel=1e-12)


def test_the_checkpoint_of_the_lowest_perplexity_is_the_best(
    trained: tuple[Path, Summary], read: Run
) -> None:
    newest = load_checkpoint(max((trained[0] / "checkpoints").iterdir()))
    lowest = min(read.evaluations, key=lambda found: found.loss)
    progress = newest.progress
    assert (progress.best, progress.best_step) == (lowest.perplexity, lowest.step)


def test_the_run_folder_has_the_vocabulary_and_evaluating_gives_the_same_numbers(
    trained: tuple[Path, Summary], folder: Path
) -> None:
    out, summary = trained
    words = (out / VOCABULARY).read_text(encoding="utf-8").splitlines()
    assert tuple(words) == read_corpus(folder).vocabulary
    options = Options(out=out, data=folder)
    found = evaluate_checkpoint(out, options, training=True, test=True)
    assert (found.metrics.loss, found.metrics.top1) == (summary.loss, summary.top1)
    assert found.test is not None
    assert found.test.samples == len(words_of(folder, "test"))


def test_words_with_other_numbers_are_refused(
    trained: tuple[Path, Summary], folder: Path, tmp_path: Path
) -> None:
    """As many words, one of them another: nothing but the vocabulary could tell."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for file in other.glob("*.txt"):
        file.write_text(re.sub(r"\bw7\b", "seven", file.read_text()))
    with pytest.raises(CheckpointError, match="another vocabulary than that of the text here"):
        evaluate_checkpoint(trained[0], Options(out=tmp_path, data=other))
    recipe = text_recipe(folder, "duration={steps: 12}", *EVALUATED)
    with pytest.raises(CheckpointError, match=r"data\.index\.vocabulary\.digest is"):
        run(recipe, data=other, out=trained[0], resume=True)


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_was_not_stopped(
    trained: tuple[Path, Summary], folder: Path, tmp_path: Path
) -> None:
    recipe = text_recipe(folder, "duration={steps: 12}", *EVALUATED)
    paused = run(recipe, data=folder, out=tmp_path / "run", max_steps=7, report=False)
    assert paused.status == "paused"
    resumed = run(recipe, data=folder, out=tmp_path / "run", resume=True, report=False)
    assert resumed.perplexity == trained[1].perplexity
    ours, theirs = (
        load_checkpoint(max((out / "checkpoints").iterdir())).state["model"]
        for out in (tmp_path / "run", trained[0])
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_the_report_shows_perplexity_and_no_images(trained: tuple[Path, Summary]) -> None:
    out, summary = trained
    page = write_report(out).read_text(encoding="utf-8")
    assert (out / "perplexity.png").exists()
    assert not (out / "accuracy.png").exists()
    hidden = r"<style.*?</style>|<pre.*?</pre>|<[^>]+>"
    text = " ".join(re.sub(hidden, " ", page, flags=re.DOTALL).split())
    assert f"Perplexity {summary.perplexity:.2f}" in text
    assert "windows/s" in text
    assert "image" not in text.lower()


def test_a_run_that_waited_is_told_nothing_about_images(read: Run) -> None:
    waited = tuple(replace(step, data_seconds=step.step_seconds / 2) for step in read.steps)
    assert describe_waits(replace(read, steps=waited)) == (
        "Input bound: updates spent 50 % of the time waiting for windows. Without waiting for "
        "windows, training would be 2 times as fast (give each worker more cores)."
    )


@pytest.mark.long
def test_a_comparison_shows_the_perplexity_of_each_run(
    trained: tuple[Path, Summary], folder: Path, tmp_path: Path
) -> None:
    other = run(text_recipe(folder), data=folder, out=tmp_path / "other", report=False)
    page, comparison = write_comparison([trained[0], tmp_path / "other"], tmp_path)
    assert [group.data.rpartition(", ")[2] for group in comparison.groups] == [
        f"{len(words_of(folder, 'val'))} validation words"
    ]
    ends = [one.evaluated.values["perplexity"][-1] for one in comparison.runs]
    assert ends == [trained[1].perplexity, other.perplexity]
    text = page.read_text(encoding="utf-8")
    assert '<figure class="part chart" id="perplexity"' in text
    assert ">Perplexity<" in text


def test_the_console_and_evaluate_print_the_perplexity(
    trained: tuple[Path, Summary], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained[0]), "--data", str(folder), "--test"]) == 0
    first, test = capsys.readouterr().out.splitlines()
    top1 = trained[1].top1
    assert first.startswith(f"perplexity {trained[1].perplexity:.2f}  next word {top1:.2%}  loss ")
    assert re.search(r"  \(\d+ words\)  ", first)
    assert test.startswith("test text: perplexity ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        pytest.param("check R --set execution.cache=memory", "execution.cache is for", id="cache"),
        pytest.param("check R --set tracking=[mlperf]", "tracking: mlperf is for", id="mlperf"),
        pytest.param("check R --set data.flip=true", "data.flip: unknown key", id="augmentation"),
        pytest.param("check R --set data.mean=[0,0,0]", "data.mean: unknown", id="normalisation"),
        pytest.param("check R --mlperf-closed", "has windows of 5 words, no images", id="rules"),
        pytest.param("check digits_96 --set model.name=lstm", "lstm reads words", id="images"),
        pytest.param(
            "check R --set polish={ema:0.5}", "BatchNorm, and lstm has none", id="polishing"
        ),
        pytest.param(
            "check R --set batch.bn_span=4", "batch.bn_span: lstm has no BatchNorm", id="span"
        ),
        pytest.param(
            "train R --data D --out O --set model={name:lenet5}",
            "lenet5 does not take windows of 5 words",
            id="model",
        ),
        pytest.param("train R --out O", "reads a text from a folder", id="no folder"),
        pytest.param("polish RUN --data D --out O", "lstm has no BatchNorm", id="pass"),
        pytest.param(
            "export RUN --out O",
            "image classifiers, and data.source is text",
            id="export",
        ),
        pytest.param("data show R --data D", "has windows of 5 words, no images", id="show"),
        pytest.param("plan R --cluster dgx-a100", "windows of 5 words, no images", id="cluster"),
        pytest.param("evaluate RUN --data D --set data.window=3", "only execution", id="window"),
    ],
)
def test_what_does_not_go_with_words_is_refused_in_one_message(
    command: str,
    message: str,
    trained: tuple[Path, Summary],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(text_recipe(folder)), encoding="utf-8")
    places = {"R": recipe, "D": folder, "O": tmp_path / "out", "RUN": trained[0]}
    words = [str(places.get(word, word)).replace(":", ": ") for word in command.split()]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("model.arguments={embedding: 6, hidden: 6, tied: true}",), id="tied"),
        pytest.param(
            ("optimizer={kind: lars, convention: reference}", "schedule.peak_lr=4.0"), id="LARS"
        ),
        pytest.param(("optimizer={kind: lamb}",), id="LAMB"),
        pytest.param(("optimizer={kind: muon}", "schedule.peak_lr=0.01"), id="Muon"),
        pytest.param(("data.held_out={samples: 12}",), id="held out"),
        pytest.param(
            (
                "schedule.plateau={metric: loss, levels: [1.0, 0.5], threshold: 0.0}",
                "evaluation={every_epochs: 0.2}",
            ),
            id="plateau",
        ),
    ],
)
def test_a_language_model_trains_with_other_settings_too(
    changes: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    recipe = text_recipe(folder, "monitor=noise_scale", *changes)
    summary = run(recipe, data=folder, out=tmp_path / "run", report=False)
    assert summary.status == "finished"
    assert summary.perplexity is not None
    assert 1 < summary.perplexity < 60
    found = evaluate_checkpoint(tmp_path / "run", Options(out=tmp_path, data=folder))
    assert found.metrics.loss == summary.loss


def test_a_sweep_over_a_language_model_seeks_the_lowest_perplexity(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(text_recipe(folder)), encoding="utf-8")
    assert main(["sweep", str(recipe), "--key", "schedule.peak_lr=0.1..1"]) == 0
    found = parse_yaml(capsys.readouterr().out, source="sweep")
    assert found["metric"] == {"name": "val/perplexity", "goal": "minimize"}


def test_the_estimate_of_a_plan_is_made_with_words(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(text_recipe(folder)), encoding="utf-8")
    assert main(["plan", str(recipe)]) == 0
    assert "windows of 5 words" in capsys.readouterr().out
