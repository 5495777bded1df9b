"""The causes that are found in recorded runs, in columns made for one rule each, and in pairs."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fake_runs
import numpy as np
import pytest
import torch
from fake_runs import FakeRun, trained
from scipy.special import digamma

from benchmarks.studies.diagnosis.cases import CASES, Case
from benchmarks.studies.diagnosis.diagnosis import unpack
from largebatch.cli.main import DONE, main
from largebatch.errors import LargebatchError
from largebatch.recipe.keys import BinaryCrossEntropy, CrossEntropy
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.report.diagnosis import (
    epochs_factor,
    find_causes,
    measure_classes,
    measure_corrected,
    measure_images,
    measure_pair,
    require_comparable,
)
from largebatch.report.logs import read_record
from largebatch.report.page import make_page
from largebatch.report.record import (
    RISE,
    Record,
    labels_per_image,
    mixing_floor,
    record_of,
    running_median,
    smoothing_floor,
)
from largebatch.report.run import read_run
from largebatch.report.verdict import verdict
from largebatch.rules import Finding
from largebatch.runs.state import build_criterion


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    unpack(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_cause_of_a_recorded_run_is_its_fault_and_healthy_ones_have_none(
    case: Case, recorded: Path
) -> None:
    small = read_record(recorded / case.small) if case.small else None
    record = read_record(recorded / case.name)
    causes = find_causes(record, small)
    if case.cause:
        assert causes[0].check == case.cause
    else:
        assert all(cause.level == "note" for cause in causes)
    run = read_run(recorded / case.name)
    parse_recipe(run.recipe or "")  # today's keys read it, so that all rules see it
    alone = [cause for cause in find_causes(record_of(run)) if cause.level == "fault"]
    assert verdict(run).good == (run.finished and not alone)


def course(*losses: float, updates: int = 400, **known: object) -> Record:
    """Return a record whose training loss goes through these values in straight lines."""
    step = np.arange(0.0, updates)
    places = np.linspace(0, updates - 1, len(losses))
    made = Record(
        name="made",
        step=step,
        epoch=(step + 1) / 40,
        loss=np.interp(step, places, losses),
        lr=np.minimum((step + 1) / 40, 1.0),
        by_update=True,
        updates=updates,
        epochs=updates / 40,
        val_epoch=np.empty(0),
        val_loss=np.empty(0),
        top1=np.empty(0),
        classes=10,
        warmup=40,
    )
    return replace(made, **known)  # type: ignore[arg-type]


def validated(record: Record, losses: list[float], top1: list[float]) -> Record:
    epochs = np.linspace(0, record.epochs, len(losses) + 1)[1:]
    return replace(
        record, val_epoch=epochs, val_loss=np.array(losses), top1=np.array(top1), val_samples=1000
    )


def kinds(record: Record, small: Record | None = None) -> list[str]:
    return [cause.check for cause in find_causes(record, small)]


@pytest.mark.parametrize(("share", "found"), [(0.9, []), (1.1, ["rate beyond the edge"])])
def test_a_rise_by_a_quarter_of_guessing_is_beyond_the_edge(share: float, found: list[str]) -> None:
    high = 0.2 + share * RISE * math.log(10)
    assert kinds(course(2.3, 0.2, high, 0.2, 0.1)) == found


def test_a_rise_of_few_updates_is_no_spike() -> None:
    record = course(2.3, 0.2, 0.1)
    record.loss[200:204] = 9.0
    assert kinds(record) == []


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.5])
def test_noise_of_single_updates_is_no_spike_and_hides_none_that_is_larger(noise: float) -> None:
    added = np.random.default_rng(1).normal(0, noise, (20, 1000))
    noisy = [
        replace(record, loss=np.maximum(record.loss + each, 0.01))
        for each in added
        for record in (course(2.3, 1.2, 0.6, 0.3, updates=1000), course(2.3, 0.5, updates=1000))
    ]
    assert not [kind for record in noisy for kind in kinds(record)]
    height = 4.5 * (np.abs(np.arange(1000) - 67) < 8)
    spiked = [replace(record, loss=record.loss + height) for record in noisy]
    assert {tuple(kinds(record)) for record in spiked} == {("spiked in warm-up",)}


def test_a_rise_at_the_start_is_of_the_warm_up_and_one_that_stays_up_is_a_divergence() -> None:
    loss = [2.3, 6.0, *(2.0 - 0.15 * place for place in range(13))]
    assert kinds(course(*loss)) == ["spiked in warm-up"]
    assert kinds(course(2.3, 6.0, 2.3, 2.3)) == ["diverged"]


def test_a_loss_that_ends_as_no_number_is_a_divergence_and_one_skipped_update_is_none() -> None:
    lost = course(2.3, 0.1)
    lost.loss[300:] = math.nan
    assert kinds(lost) == ["diverged"]
    assert find_causes(lost)[0].text.endswith("at step 300 (learning rate 1)")
    risen = course(2.3, 0.1)
    risen.loss[280:300] = 5.0
    risen.loss[300:] = math.nan
    assert find_causes(risen)[0].text.startswith("the training loss rose from 0.")
    assert " and was not finite at step 300" in find_causes(risen)[0].text
    skipped = course(2.3, 0.1)
    skipped.loss[300] = math.nan
    assert kinds(skipped) == []


def test_a_network_that_learned_nothing_has_no_statistics_to_suspect() -> None:
    level = validated(course(2.28, 2.28), [2.31, 2.31], [0.1, 0.1])
    assert kinds(level) == ["underfit"]


def test_classes_are_not_lost_in_a_run_that_is_underfit(tmp_path: Path) -> None:
    record = record_of(read_run(fake_runs.learned_nothing(tmp_path / "run")))
    lost = replace(record, loss=np.full_like(record.loss, 2.0), val_loss=record.val_loss * 0 + 2.0)
    assert "class lost" not in kinds(lost)


def test_a_run_that_did_not_finish_is_not_said_to_need_more_updates(tmp_path: Path) -> None:
    folder = fake_runs.give_recipe(fake_runs.paused(tmp_path / "run"), "polish=null")
    record = record_of(read_run(folder))
    level = replace(record, loss=np.full_like(record.loss, 2.2), val_loss=np.array([]))
    assert kinds(replace(level, run=None)) == ["underfit"]
    assert kinds(level) == []


def test_a_validation_loss_that_rises_while_training_falls_is_a_gap_and_not_statistics() -> None:
    record = course(2.3, 0.2, 0.01)
    overfit = validated(record, [0.9, 0.7, 1.2, 2.5], [0.7, 0.8, 0.8, 0.8])
    assert kinds(overfit) == ["generalisation gap"]
    assert "rose from 0.7 at epoch 5 to 2.5" in find_causes(overfit)[0].text
    assert kinds(validated(record, [0.9, 0.5, 0.4, 0.4], [0.7, 0.8, 0.9, 0.9])) == []


def test_exact_statistics_that_raise_top1_are_named_and_do_no_harm(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 0.5)
    run.drift(["bn1", "bn2"])
    run.end("statistics", 0, 0.95)
    record = record_of(read_run(run.write()))
    (found,) = (cause for cause in find_causes(record) if cause.check == "statistics off")
    assert found.level == "note"
    corrected = measure_corrected(record)
    assert corrected is not None
    assert (corrected.before, corrected.after) == (0.5, 0.95)
    assert "variance of bn" in found.text


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        pytest.param(fake_runs.full_run, ["2.09 to 0.552", "98.61 %"], id="finished"),
        pytest.param(
            fake_runs.statistics_that_hurt, ["94.72 %", "noise", "96.39 %"], id="within the noise"
        ),
        pytest.param(
            fake_runs.ended_below_its_best, ["80.00 %", "96.39 %", "600 steps"], id="below its best"
        ),
        pytest.param(
            fake_runs.learned_nothing, ["11.00 %", "10.00 %", "1.98"], id="nothing learned"
        ),
        pytest.param(fake_runs.paused, ["40 of 600 steps", "--resume"], id="paused"),
        pytest.param(fake_runs.diverged, ["40 of 600 steps", "at step 39"], id="diverged"),
        pytest.param(fake_runs.killed, ["killed", "600 of 600 steps"], id="killed"),
    ],
)
def test_a_verdict_has_the_numbers_of_how_the_run_ended(
    make: Callable[[Path], Path], shown: list[str], tmp_path: Path
) -> None:
    found = verdict(read_run(make(tmp_path / "run")))
    assert not found.good
    for words in shown:
        assert words in found.words


@pytest.mark.parametrize("recorded", [True, False])
def test_a_verdict_is_good_only_if_everything_was_examined(recorded: bool, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 0.95, wrong=range(18) if recorded else None)
    found = verdict(read_run(fake_runs.give_recipe(run.write())))
    assert found.good == recorded
    assert ("accuracy by class" in found.words) != recorded


@pytest.mark.parametrize("concentration", [0.2, 1.0, 4.0])
def test_the_floor_of_mixed_labels_is_their_entropy(concentration: float) -> None:
    """For a share from Beta(a, a): digamma(2a + 1) - digamma(a + 1)."""
    mix = f"data.mix={{mixup: {concentration}, probability: 0.5}}"
    recipe = load_recipe("digits_96", [mix, "loss.label_smoothing=0"])
    entropy = digamma(2 * concentration + 1) - digamma(concentration + 1)
    expected = 0.5 * 0.9 * entropy  # one partner in ten has the same class
    assert mixing_floor(recipe) == pytest.approx(expected, rel=0.03)
    smoothed = load_recipe("digits_96", [mix, "loss.label_smoothing=0.1"])
    assert mixing_floor(smoothed) > smoothing_floor(smoothed.loss, 10)


@pytest.mark.parametrize(
    "loss",
    [
        "{label_smoothing: 0.2}",
        "{label_smoothing: 0.2, off_target: others}",
        "{kind: bce, label_smoothing: 0.2}",
        "{kind: bce, label_smoothing: 0.2, classes: sum}",
    ],
)
def test_the_floor_is_the_loss_of_scores_that_give_every_target(loss: str) -> None:
    section = load_recipe("digits_96", [f"loss={loss}"]).loss
    criterion = build_criterion(section)
    shares = np.array([1.0, 0.7, 0.5, 0.1])
    labels = torch.zeros(4, 5, dtype=torch.float64)
    labels[:, 2] = torch.from_numpy(shares)
    labels[:, 0] = 1 - labels[:, 2]
    targets = 0.8 * labels + 0.2 / 5
    scores = targets.logit()
    if isinstance(section, CrossEntropy):
        if section.off_target == "others":
            targets = 0.75 * labels + 0.05
        scores = targets.log()
    reached = [criterion(*row).item() for row in zip(scores[:, None], labels[:, None], strict=True)]
    np.testing.assert_allclose(smoothing_floor(section, 5, shares), reached, rtol=1e-9)


@pytest.mark.parametrize("classes", ["mean", "sum"])
def test_the_guess_of_thresholded_labels_counts_both_of_a_mixed_image(classes: str) -> None:
    """As many 1s as in 40,000 images with partners from anywhere; the best guess is their share."""
    loss = f"loss={{kind: bce, target_threshold: 0.2, classes: {classes}, label_smoothing: 0.1}}"
    recipe = load_recipe("digits_96", ["data.mix={mixup: 1}", loss])
    generator = np.random.default_rng(1)
    shares = generator.beta(1, 1, 20_000)
    partners = generator.integers(10, size=(20_000, 2))
    labels = torch.zeros(20_000, 10, dtype=torch.float64)
    rows = torch.arange(20_000)
    labels[rows, partners[:, 0]] += torch.from_numpy(shares)
    labels[rows, partners[:, 1]] += torch.from_numpy(1 - shares)
    number = (0.9 * labels + 0.01 > 0.2).sum(1).double().mean().item()
    assert labels_per_image(recipe) == pytest.approx(number, rel=0.01)
    guess = torch.full((20_000, 10), number / 10, dtype=torch.float64).logit()
    lowest = build_criterion(recipe.loss)(guess, labels).item() / 20_000
    record = replace(SMALL, classes=10, objective=recipe.loss, labels_per_image=number)
    assert record.training_chance == pytest.approx(lowest, rel=1e-9)


def finished(
    folder: Path,
    *,
    wrong: list[int],
    validation: float = 0.4,
    training: float = 1.0,
    end: float = 0.5,
) -> list[Finding]:
    """Return the harmful causes in a run with these images of 360 wrong, of ten classes.

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
    return list(verdict(read_run(run.write())).causes)


def test_commands_in_a_remedy_are_code_and_top5_of_five_classes_is_left_out(
    tmp_path: Path,
) -> None:
    (cause,) = photographs(tmp_path / "run", 0.393)
    assert "`largebatch init" in cause.remedy
    page = make_page(read_run(tmp_path / "run"))
    assert "<code>largebatch init" in page
    assert "`" not in page.partition("<h1>")[2].partition("<details>")[0]
    assert "Top-5" not in page
    finished(tmp_path / "ten", wrong=evenly(20))
    assert "Top-5" in make_page(read_run(tmp_path / "ten"))


def evenly(number: int) -> list[int]:
    """Return `number` images, as many of each class."""
    return list(range(number))


def of_class(label: int, number: int) -> list[int]:
    return list(range(label, 360, 10))[:number]


@pytest.mark.parametrize(
    ("validation", "end", "figure"),
    [
        pytest.param(22.0, 1.1, None, id="a few times that of guessing, early"),
        pytest.param(24.0, 0.5, "24 at epoch 1", id="ten times"),
        pytest.param(0.4, 2.4, "2.4 ", id="above it at the end"),
        pytest.param(math.nan, 0.5, "epoch 1", id="NaN"),
    ],
)
def test_a_validation_loss_far_above_that_of_guessing_is_of_the_statistics(
    validation: float, end: float, figure: str | None, tmp_path: Path
) -> None:
    found = finished(tmp_path / "run", wrong=evenly(20), validation=validation, end=end)
    assert [cause.check for cause in found] == ["statistics off"] * (figure is not None)
    assert figure is None or figure in found[0].text


@pytest.mark.parametrize(("factor", "smoothing", "good"), [
    (2.0, "0", True), (2.2, "0", False), (2.2, "0.1", True), (3.2, "0.1", False),
])  # fmt: skip
def test_a_training_loss_that_ends_above_half_of_guessing_is_underfit(
    factor: float, smoothing: str, good: bool, tmp_path: Path
) -> None:
    """Without the part that label smoothing leaves."""
    finished(tmp_path / "run", wrong=evenly(20), training=factor)
    fake_runs.give_recipe(tmp_path / "run", f"loss.label_smoothing={smoothing}")
    found = verdict(read_run(tmp_path / "run")).causes
    assert [cause.check for cause in found] == ["underfit"] * (not good)


@pytest.mark.parametrize(
    ("wrong", "numbers"),
    [
        pytest.param(of_class(3, 36), (1, 0, 36), id="one class"),
        pytest.param(of_class(3, 36) + of_class(7, 30), (2, 0, 36), id="two classes"),
        pytest.param(of_class(3, 30), None, id="more often than by guessing"),
        pytest.param(evenly(240), None, id="all equal"),
    ],
)
def test_a_class_that_is_right_no_more_often_than_by_guessing_is_lost(
    wrong: list[int], numbers: tuple[int, int, int] | None, tmp_path: Path
) -> None:
    found = finished(tmp_path / "run", wrong=sorted(wrong))
    assert [cause.check for cause in found] == ["class lost"] * (numbers is not None)
    weak = measure_classes(record_of(read_run(tmp_path / "run")))
    if numbers is not None:
        assert weak is not None
        assert (weak.number, weak.correct, weak.size) == numbers


def test_one_hard_class_among_many_and_a_class_of_few_images_are_usual(tmp_path: Path) -> None:
    for number in (100, 30):
        run = FakeRun(tmp_path / f"{number}", clean_steps=0)
        run.classes = [f"class {label}" for label in range(number)]
        run.train(0, 600)
        wrong = list(range(7, 360, number))[:-1] if number == 100 else [7, 37, 8, 38]
        run.end("train", 600, 1 - len(wrong) / 360, wrong=wrong)
        assert verdict(read_run(run.write())).good


def photographs(folder: Path, top1: float, *overrides: str) -> list[Finding]:
    """Return the harmful causes in a run of 242 photographs in five classes."""
    run = FakeRun(folder, clean_steps=0, train_samples=242)
    run.classes = list("abcde")
    run.train(0, 600)
    for record in run.records:
        if record["event"] == "step":  # falls up to the end, from 1.6
            record["loss"] = 1.6 - 0.4 * record["step"] / 600
    run.end("train", 600, top1, wrong=range(round(360 * (1 - top1))))
    run.write()
    data = "classes=5 train_samples=242 source=folder image_size=64 mean=[.5,.5,.5] std=[.5,.5,.5]"
    batch = ("batch.global_batch=16", "batch.bn_span=16", "polish=null")
    fake_runs.give_recipe(folder, *(f"data.{it}" for it in data.split()), *batch, *overrides)
    return list(verdict(read_run(folder)).causes)


def test_few_photographs_need_weights_and_not_more_epochs(tmp_path: Path) -> None:
    """242 in five classes are 48.4 of a class, far below the 250 that `init` has as a limit."""
    (cause,) = photographs(tmp_path / "random", 0.393)
    assert cause.check == "few images"
    images = measure_images(record_of(read_run(tmp_path / "random")))
    assert images is not None
    assert images.of_class == pytest.approx(48.4)
    assert "weights" in cause.remedy
    assert "epochs" not in cause.remedy
    assert photographs(tmp_path / "good", 0.95)[0].check == "underfit"
    begun = photographs(tmp_path / "weights", 0.393, "model.weights=w.safetensors")
    assert [cause.check for cause in begun] == ["underfit"]


@pytest.mark.parametrize(
    ("losses", "top1", "longer"),
    [
        pytest.param(
            [2.3, 2.1, 1.9, 1.7, 1.5], [0.2, 0.3, 0.4, 0.5], True, id="both still improve"
        ),
        pytest.param([2.3, 1.5, 1.5, 1.5], [0.2, 0.3, 0.4, 0.5], False, id="training is level"),
        pytest.param([2.3, 2.1, 1.9, 1.7, 1.5], [0.4, 0.4, 0.4, 0.4], False, id="top-1 is level"),
        pytest.param([2.3, 2.1, 1.9, 1.7, 1.5], [], True, id="not validated"),
        pytest.param([2.3, 2.25], [], False, id="hardly falls"),
    ],
)
def test_more_epochs_are_advised_only_where_the_curves_still_improve(
    losses: list[float], top1: list[float], longer: bool, tmp_path: Path
) -> None:
    record = course(*losses)
    record = validated(record, [2.0] * len(top1), top1) if top1 else record
    (cause,) = find_causes(record)
    assert cause.check == "underfit"
    assert cause.remedy.startswith("train for more epochs") == longer


SMALL = course(2.3, 1.2, 0.6, 0.3, 0.1, batch=96)


def large(*losses: float, top1: float) -> Record:
    record = course(*losses, updates=40, batch=960, epoch=np.arange(1.0, 41) / 4)
    return validated(record, [0.5], [top1])


def test_a_run_level_by_updates_has_too_few_of_them() -> None:
    small = validated(SMALL, [0.5], [0.9])
    causes = find_causes(large(2.3, 1.0, top1=0.7), small)
    assert [cause.check for cause in causes] == ["fewer updates"]
    assert causes[0].text.startswith("40 updates against 400: the training loss ends at 1.02")
    assert "times the epochs" in causes[0].remedy
    behind = find_causes(large(2.3, 2.2, top1=0.3), small)
    assert behind[0].remedy != causes[0].remedy
    assert behind[0].check == "fewer updates"


def test_losses_of_mixed_images_are_not_compared_with_others() -> None:
    run, small = large(2.0, 0.5, 0.5, top1=0.80), large(2.0, 0.5, 0.5, top1=0.90)
    assert measure_pair(run, small) is not None
    assert measure_pair(replace(run, mixed=True), small) is None
    both = replace(run, mixed=True, objective=CrossEntropy(), floor=0.3)
    assert measure_pair(both, replace(both, floor=0.31)) is not None
    assert measure_pair(both, replace(both, floor=0.6)) is None


def test_other_losses_are_not_compared_but_unknown_ones_are() -> None:
    run, small = large(2.0, 0.5, 0.5, top1=0.80), large(2.0, 0.5, 0.5, top1=0.90)
    run = replace(run, objective=BinaryCrossEntropy(kind="bce"))
    assert measure_pair(run, small) is not None
    assert measure_pair(run, replace(small, objective=CrossEntropy())) is None
    assert measure_pair(run, replace(small, objective=run.objective)) is not None


def test_runs_with_the_same_training_loss_and_another_top1_have_a_gap() -> None:
    small = validated(SMALL, [0.5], [0.9])
    assert kinds(large(2.3, 0.5, 0.1, top1=0.8), small) == ["generalisation gap"]
    assert kinds(large(2.3, 0.5, 0.1, top1=0.89), small) == []


def test_a_run_with_as_many_updates_or_without_their_number_is_compared_by_its_loss() -> None:
    small, run = course(2.3, 0.2, 0.1), course(2.3, 1.5, 1.0)
    ends = [validated(small, [0.2], [0.9]), validated(run, [1.0], [0.6])]
    (cause,) = find_causes(ends[1], ends[0])
    assert cause.check == "underfit"
    assert cause.text.startswith("the training loss ends at 1")
    unknown = [replace(it, updates=None) for it in ends]
    (cause,) = find_causes(unknown[1], unknown[0])
    assert cause.text.startswith("the training loss ends at 1")


def test_the_epochs_of_a_large_batch_are_those_of_the_small_run_to_the_same_loss() -> None:
    """The small run has the large one's last loss after a quarter of its epochs."""
    run = large(2.3, 1.25, top1=0.7)
    reached = float(SMALL.epoch[np.flatnonzero(SMALL.trend <= run.end)[0]])
    assert epochs_factor(run, SMALL) == pytest.approx(SMALL.epochs / reached)
    assert epochs_factor(run, course(2.3, 2.2)) is None
    in_first_epoch = replace(SMALL, epoch=np.floor(SMALL.epoch / 100))
    assert epochs_factor(run, in_first_epoch) == pytest.approx(SMALL.epochs / reached)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"classes": 12}, "classes.* 10 .*12"),
        ({"val_samples": 720}, "val_samples.* 1,000 .*720"),
        ({"batch": 1920}, "1,920"),
    ],
)
def test_runs_of_other_data_or_in_the_wrong_order_are_refused(
    changes: dict[str, int], named: str
) -> None:
    run = large(2.3, 1.0, top1=0.7)
    require_comparable(run, SMALL)
    with pytest.raises(LargebatchError, match=named):
        require_comparable(run, replace(SMALL, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [5, 6, 13])
def test_a_running_median_is_that_of_scipy(size: int) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    values = np.random.default_rng(0).normal(size=101)
    values[50] = np.inf
    expected = ndimage.median_filter(values, size=size, mode="nearest")
    np.testing.assert_array_equal(running_median(values, size), expected)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("first", [0, 1])
def test_a_cell_without_a_number_was_not_measured_and_nan_was(first: int, tmp_path: Path) -> None:
    """Updates are named by the numbers of the log."""
    rows = ["2.3,", "2.2,0.3", ",nan", "nan,NA", ""]
    content = "\n".join(
        ["step,loss,val_loss", *(f"{n},{row}" for n, row in enumerate(rows, first))]
    )
    (tmp_path / "log.csv").write_text(content)
    record = read_record(tmp_path / "log.csv")
    assert record.loss.tolist() == pytest.approx([2.3, 2.2, NAN], nan_ok=True)
    assert record.val_loss.tolist() == [0.3, INF]
    assert record.updates == 4
    (cause,) = find_causes(record)
    assert cause.text.endswith(f"not finite at step {3 + first}")


def test_what_a_csv_lacks_is_not_checked_and_raises_no_cause(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n1,2.3\n2,1.0\n3,0.4\n")
    record = read_record(tmp_path / "log.csv")
    assert find_causes(record) == []
    assert {"losses against guessing", "waits for samples"} <= {*record.unchecked}


CSV = "epoch,train_loss,eval_loss,eval_top1,lr\n0,{},2.2,20,0.1\n1,1.9,1.8,40,0.5\n2,{},{},{},0\n"


def test_a_run_is_shown_with_its_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fake_runs.give_recipe(fake_runs.diverged(tmp_path / "diverged"), "polish=null")
    assert main(["report", "diagnose", str(folder)]) == DONE
    shown = capsys.readouterr().out
    assert ["updates", "40"] in [line.split() for line in shown.splitlines()]
    assert "1. diverged: " in shown
    assert main(["report", "diagnose", str(folder), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["runs"][0]["updates"] == 40
    assert found["causes"][0]["kind"] == "diverged"
    assert {"figure", "remedy"} < found["causes"][0].keys()


def test_two_logs_of_another_program_are_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = tmp_path / "large.csv", tmp_path / "small.csv"
    large.write_text(CSV.format(2.3, 1.7, 1.6, 45))
    small.write_text(CSV.format(1.5, 0.3, 0.4, 90))
    assert main(["report", "diagnose", str(large), str(small), "--classes", "10"]) == DONE
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["top-1", "90.00", "%", "45.00", "%"] in rows
    assert ["peak", "learning", "rate", "0.5", "0.5"] in rows
    assert "1. underfit: " in shown
