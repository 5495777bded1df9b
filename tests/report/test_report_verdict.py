"""What a page says first of a run: how it ended, and what stands out in one that finished."""

import math
from collections.abc import Callable
from pathlib import Path

import fake_runs
import pytest
import torch
from fake_runs import FakeRun

from largebatch.recipe.choices import OffTarget
from largebatch.recipe.keys import Loss
from largebatch.report.page import make_page
from largebatch.report.record import smoothing_floor
from largebatch.report.run import read_run
from largebatch.report.verdict import Verdict, verdict
from largebatch.training.loss import cross_entropy


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(
            fake_runs.full_run,
            "The run finished and nothing stands out: the training loss fell from 2.09 to 0.552 "
            "and the final top-1 is 98.61 %, the best of the run. "
            "Not checked, for lack of a record: losses against guessing, accuracy by class.",
            id="finished",
        ),
        pytest.param(
            fake_runs.statistics_that_hurt,
            "The run finished and nothing stands out: the training loss fell from 2.09 to 0.552 "
            "and the final top-1 is 94.72 %, within the noise of its best, 96.39 %. "
            "Not checked, for lack of a record: losses against guessing, accuracy by class.",
            id="within the noise",
        ),
        pytest.param(
            fake_runs.ended_below_its_best,
            "The run finished, but the final top-1, 80.00 %, is below the 96.39 % after 600 steps "
            "(train).",
            id="below its best",
        ),
        pytest.param(
            fake_runs.learned_nothing,
            "The run finished, but the final top-1 is 11.00 %; always predicting the most "
            "frequent class gives 10.00 %. Likely cause: the validation loss is never below 1.98, "
            "while the training loss ends at 0.552 (equal probabilities for all 10 classes give "
            "2.3).",
            id="nothing learned",
        ),
        pytest.param(
            fake_runs.polished_checkpoint,
            "Polishing finished: the final top-1 is 96.00 %, the best of the run. "
            "Not checked, for lack of a record: losses against guessing, accuracy by class.",
            id="polished",
        ),
        pytest.param(
            fake_runs.paused,
            "The run paused at --max-steps, after 40 of 600 steps. Resume it with --resume. "
            "Accuracy was not measured.",
            id="paused",
        ),
        pytest.param(
            fake_runs.interrupted_after_one_step,
            "The run was interrupted after 1 of 600 steps. Resume it with --resume. "
            "Accuracy was not measured.",
            id="interrupted",
        ),
        pytest.param(
            fake_runs.diverged,
            "The run failed after 40 of 600 steps. Its training loss was not finite at step 39. "
            "Accuracy was not measured.",
            id="diverged",
        ),
        pytest.param(
            fake_runs.interrupted_after_a_skipped_step,
            "The run was interrupted after 40 of 600 steps. Resume it with --resume. "
            "Accuracy was not measured.",
            id="skipped",
        ),
        pytest.param(
            fake_runs.stopped_at_once,
            "The run was stopped after 40 of 600 steps. --resume continues from the last "
            "checkpoint. Accuracy was not measured.",
            id="stopped",
        ),
        pytest.param(
            fake_runs.killed,
            "The run has no summary: it was killed or is under way. Its log ends after 600 of 600 "
            "steps. "
            "The figures are from that point.",
            id="killed",
        ),
    ],
)
def test_a_page_begins_with_how_the_run_went(
    make: Callable[[Path], Path],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("largebatch.report.page.make_svg", lambda *_, **__: "<svg></svg>")
    run = read_run(make(tmp_path / "run"))
    assert verdict(run) == Verdict(words, good=False)
    assert f'<p class="verdict">{words}</p>' in make_page(run)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_page_is_green_only_where_everything_was_examined(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("largebatch.report.page.make_svg", lambda *_, **__: "<svg></svg>")
    run = FakeRun(tmp_path / "run", clean_steps=0)
    run.train(0, 600)
    run.end("train", 600, 0.95, wrong=range(18) if recorded else None)
    fake_runs.give_recipe(run.write())
    found = verdict(read_run(run.folder))
    assert found.good == recorded
    assert (
        found.words.endswith(" Not checked, for lack of a record: accuracy by class.") != recorded
    )
    assert f'<p class="verdict{" good" * recorded}">' in make_page(read_run(run.folder))


def test_a_loss_that_is_no_number_stands_out_where_classes_were_not_recorded(
    tmp_path: Path,
) -> None:
    run = FakeRun(tmp_path / "run", clean_steps=0)
    run.train(0, 600)
    run.evaluate("train", 15, 0.2)
    run.records[-1]["loss"] = None
    run.end("train", 600, 0.95)
    found = verdict(read_run(run.write()))
    assert "What stands out: the validation loss was not finite at epoch 1." in found.words


@pytest.mark.parametrize(("factor", "stands_out"), [(2.2, False), (3.2, True)])
def test_what_label_smoothing_leaves_of_a_training_loss_does_not_stand_out(
    factor: float, stands_out: bool, tmp_path: Path
) -> None:
    finished(tmp_path / "run", wrong=evenly(20), training=factor)
    fake_runs.give_recipe(tmp_path / "run", "loss.label_smoothing=0.1")
    found = verdict(read_run(tmp_path / "run"))
    assert found.good != stands_out
    words = "the final training loss is 1.77, 0.5 of it from label smoothing (equal"
    assert (words in found.words) == stands_out


@pytest.mark.parametrize("off_target", ["all", "others"])
def test_the_floor_of_label_smoothing_is_the_lowest_loss_that_the_criterion_reaches(
    off_target: OffTarget,
) -> None:
    criterion = cross_entropy(smoothing=0.2, off_target=off_target)
    floor = smoothing_floor(Loss(label_smoothing=0.2, off_target=off_target), 5)
    logits = torch.zeros(1001, 5)
    logits[:, 2] = torch.linspace(1.5, 4.0, 1001)
    reached = min(criterion(row[None], torch.tensor([2])).item() for row in logits)
    assert reached == pytest.approx(floor, abs=1e-5)


def finished(
    folder: Path,
    *,
    wrong: list[int],
    validation: float = 0.4,
    training: float = 1.0,
    end: float = 0.5,
) -> Verdict:
    """Return the verdict on a run with these images of 360 wrong, of ten classes.

    `validation` is the loss of the evaluation after an epoch, `end` that of the last one, and
    `training` a factor of the training losses, which end at 0.55.
    """
    run = FakeRun(folder, clean_steps=0)
    run.train(0, 600)
    for record in run.records:
        if record["event"] == "step":
            record["loss"] *= training
    run.evaluate("train", 15, 0.2)
    run.records[-1]["loss"] = None if math.isnan(validation) else validation
    run.end("train", 600, 1 - len(wrong) / 360, wrong=wrong)
    next(found for found in reversed(run.records) if found["event"] == "evaluation")["loss"] = end
    return verdict(read_run(run.write()))


def evenly(number: int) -> list[int]:
    """Return `number` images, as many of each class."""
    return list(range(number))


def of_class(label: int, number: int) -> list[int]:
    return list(range(label, 360, 10))[:number]


def test_a_finished_run_is_held_against_guessing_and_what_stands_out_is_named(
    tmp_path: Path,
) -> None:
    """As MNIST at 74 %: a wild validation loss after an epoch, and a class that is hardly right."""
    wrong = sorted({*of_class(5, 31), *(n for n in range(70) if n % 10 != 5)})
    assert finished(tmp_path / "run", wrong=wrong, validation=114.2) == Verdict(
        "The run finished: the training loss fell from 2.09 to 0.552 and the final top-1 is 73.89 "
        "%, "
        "the best of the run. What stands out: the validation loss was 114 at epoch 1 (equal "
        "probabilities for all 10 classes give 2.3); class 5 has only 5 of 36 images right.",
        good=False,
    )


@pytest.mark.parametrize(
    ("validation", "end", "words"),
    [
        pytest.param(22.0, 1.1, None, id="a few times that of guessing, early"),
        pytest.param(24.0, 0.5, "the validation loss was 24 at epoch 1", id="ten times"),
        pytest.param(0.4, 2.4, "the final validation loss is 2.4", id="above it at the end"),
        pytest.param(math.nan, 0.5, "the validation loss was not finite at epoch 1", id="NaN"),
    ],
)
def test_a_validation_loss_far_above_that_of_guessing_stands_out(
    validation: float, end: float, words: str | None, tmp_path: Path
) -> None:
    found = finished(tmp_path / "run", wrong=evenly(20), validation=validation, end=end)
    assert found.good == (words is None)
    assert f"What stands out: {words}" in found.words or words is None


@pytest.mark.parametrize(("factor", "good"), [(2.0, True), (2.2, False)])
def test_a_training_loss_that_ends_above_half_of_that_of_guessing_stands_out(
    factor: float, good: bool, tmp_path: Path
) -> None:
    found = finished(tmp_path / "run", wrong=evenly(20), training=factor)
    assert found.good is good
    words = "the final training loss is 1.21 (equal probabilities for all 10 classes give 2.3)"
    assert (words in found.words) is not good


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param(of_class(3, 36), "class 3 has only 0 of 36 images right", id="one class"),
        pytest.param(
            of_class(3, 36) + of_class(7, 30),
            "2 of 10 classes have less than a third of this top-1, the lowest 3 with 0 of 36 "
            "images right",
            id="two classes",
        ),
        pytest.param(of_class(3, 20), None, id="less than half, more than a third"),
        pytest.param(evenly(240), None, id="all alike"),
    ],
)
def test_a_class_with_less_than_a_third_of_the_accuracy_stands_out(
    wrong: list[int], words: str | None, tmp_path: Path
) -> None:
    found = finished(tmp_path / "run", wrong=sorted(wrong))
    assert found.good == (words is None)
    assert f"What stands out: {words}." in found.words or words is None


def test_one_hard_class_among_many_and_a_class_of_few_images_do_not_stand_out(
    tmp_path: Path,
) -> None:
    for number in (100, 30):
        run = FakeRun(tmp_path / f"{number}", clean_steps=0)
        run.classes = [f"class {label}" for label in range(number)]
        run.train(0, 600)
        wrong = list(range(7, 360, number))[:-1] if number == 100 else [7, 37, 8, 38]
        run.end("train", 600, 1 - len(wrong) / 360, wrong=wrong)
        assert verdict(read_run(run.write())).good
