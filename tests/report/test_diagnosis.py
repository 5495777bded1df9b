"""The causes that are found in recorded runs, in columns made for one rule each, and in pairs."""

import math
from dataclasses import replace
from pathlib import Path

import fake_runs
import numpy as np
import pytest
from fake_runs import FakeRun

from benchmarks.studies.diagnosis.cases import CASES, Case
from benchmarks.studies.diagnosis.diagnosis import unpack
from largebatch.errors import CheckpointError, LargebatchError
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.report.diagnosis import Cause, find_causes
from largebatch.report.logs import read_record
from largebatch.report.pair import epochs_factor, order
from largebatch.report.record import RISE, Record, read_edge, record_of
from largebatch.report.repair import repair
from largebatch.report.run import read_run
from largebatch.report.verdict import verdict


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    unpack(folder)
    return folder


def test_there_are_twenty_faults_and_ten_healthy_runs_half_of_them_held_out() -> None:
    faults = [case for case in CASES if case.cause]
    assert (len(faults), len(CASES) - len(faults)) == (20, 10)
    assert sum(case.held_out for case in faults) == 10
    assert len({case.cause for case in faults}) == 9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_cause_of_a_recorded_run_is_its_fault_and_healthy_ones_have_none(
    case: Case, recorded: Path
) -> None:
    small = read_record(recorded / case.small) if case.small else None
    causes = find_causes(read_record(recorded / case.name), small)
    if case.cause:
        assert causes[0].kind == case.cause
    else:
        assert not [cause for cause in causes if cause.harms]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_verdict_has_the_causes_that_harm(case: Case, recorded: Path) -> None:
    run = read_run(recorded / case.name)
    harmful = [cause for cause in find_causes(record_of(run)) if cause.harms]
    found = verdict(run)
    assert found.good == (run.finished and not harmful)
    assert not run.finished or not harmful or harmful[0].figure in found.words


def course(*losses: float, updates: int = 400, **known: object) -> Record:
    """Return a record whose training loss goes through these values in straight lines."""
    step = np.arange(1.0, updates + 1)
    places = np.linspace(1, updates, len(losses))
    made = Record(
        name="made",
        step=step,
        epoch=step / 40,
        loss=np.interp(step, places, losses),
        lr=np.minimum(step / 40, 1.0),
        by_update=True,
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
    return [cause.kind for cause in find_causes(record, small)]


@pytest.mark.parametrize(("share", "found"), [(0.9, []), (1.1, ["rate beyond the edge"])])
def test_a_rise_by_a_quarter_of_guessing_is_beyond_the_edge(share: float, found: list[str]) -> None:
    high = 0.2 + share * RISE * math.log(10)
    assert kinds(course(2.3, 0.2, high, 0.2, 0.1)) == found


def test_a_peak_above_the_bound_of_a_range_test_is_beyond_the_edge(tmp_path: Path) -> None:
    (tmp_path / "range.json").write_text('{"upper": {"value": 0.8, "low": 0.7, "high": 0.9}}')
    edge = read_edge(tmp_path)
    assert kinds(course(2.3, 0.1, edge=edge)) == ["rate beyond the edge"]
    assert kinds(course(2.3, 0.1, edge=1.25 * edge)) == []
    (tmp_path / "range.json").write_text('{"upper": null}')
    with pytest.raises(CheckpointError, match="the range test found no upper bound"):
        read_edge(tmp_path)
    (tmp_path / "range.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no upper bound of the rate"):
        read_edge(tmp_path)


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
    assert find_causes(lost)[0].figure == (
        "the training loss was not finite at step 300 (learning rate 1)"
    )
    risen = course(2.3, 0.1)
    risen.loss[280:300] = 5.0
    risen.loss[300:] = math.nan
    assert find_causes(risen)[0].figure.startswith("the training loss rose from 0.")
    assert " and was not finite at step 300" in find_causes(risen)[0].figure
    skipped = course(2.3, 0.1)
    skipped.loss[300] = math.nan
    assert kinds(skipped) == []


def test_statistics_are_suspected_where_only_training_data_is_ever_fitted() -> None:
    record = course(2.3, 0.2, 0.1)
    off = validated(record, [2.2, 2.1, 1.9], [0.2, 0.3, 0.4])
    assert kinds(off) == ["statistics off"]
    recipe = load_recipe("digits_96", ["model={name: lenet5}", "batch.bn_span=null", "polish=null"])
    assert kinds(replace(off, recipe=recipe)) == ["generalisation gap"]


def test_overfitting_that_stays_above_half_of_guessing_is_a_gap_and_not_statistics() -> None:
    record = course(2.2, 0.2, 0.02)
    overfit = validated(record, [2.1, 1.3, 1.2, 1.5, 2.0], [0.4, 0.5, 0.6, 0.6, 0.61])
    assert kinds(overfit) == ["generalisation gap"]


def test_where_one_batch_and_number_of_updates_is_unknown_the_first_is_judged() -> None:
    run = replace(course(2.3, 0.1), batch=96)
    log = replace(course(2.3, 0.1), step=np.full(400, math.nan))
    assert [it.batch for it in order(run, log)] == [96, None]
    assert [it.batch for it in order(log, run)] == [None, 96]


def test_a_network_that_learned_nothing_has_no_statistics_to_suspect() -> None:
    level = validated(course(2.28, 2.28), [2.31, 2.31], [0.1, 0.1])
    assert kinds(level) == ["fewer updates"]


def test_classes_are_not_lost_in_a_run_that_is_underfit(tmp_path: Path) -> None:
    record = record_of(read_run(fake_runs.learned_nothing(tmp_path / "run")))
    lost = replace(record, loss=np.full_like(record.loss, 2.0), val_loss=record.val_loss * 0 + 2.0)
    assert not {"class lost", "weak classes"} & set(kinds(lost))


def test_a_validation_loss_without_an_epoch_is_judged_too() -> None:
    record = replace(course(2.3, 0.1), val_epoch=np.array([math.nan]))
    lost = replace(record, val_loss=np.array([math.inf]), top1=np.array([0.1]))
    assert find_causes(lost)[0].figure == "the validation loss was not finite in one evaluation"


def test_a_run_that_did_not_finish_is_not_said_to_need_more_updates(tmp_path: Path) -> None:
    folder = fake_runs.give_recipe(fake_runs.paused(tmp_path / "run"), "polish=null")
    record = record_of(read_run(folder))
    level = replace(record, loss=np.full_like(record.loss, 2.2), val_loss=np.array([]))
    assert not record.is_complete
    assert kinds(replace(level, run=None)) == ["fewer updates"]
    assert kinds(level) == []


def test_a_validation_loss_that_rises_while_training_falls_is_a_gap_and_not_statistics() -> None:
    record = course(2.3, 0.2, 0.01)
    overfit = validated(record, [0.9, 0.7, 1.2, 2.5], [0.7, 0.8, 0.8, 0.8])
    assert kinds(overfit) == ["generalisation gap"]
    assert "rose from 0.7 at epoch 5 to 2.5" in find_causes(overfit)[0].figure
    assert kinds(validated(record, [0.9, 0.5, 0.4, 0.4], [0.7, 0.8, 0.9, 0.9])) == []


def test_exact_statistics_that_raise_top1_are_named_and_do_no_harm(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", clean_steps=0)
    run.train(0, 600)
    run.end("train", 600, 0.5)
    run.drift(["bn1", "bn2"])
    run.end("statistics", 0, 0.95)
    causes = find_causes(record_of(read_run(run.write())))
    (found,) = (cause for cause in causes if cause.kind == "statistics off")
    assert not found.harms
    assert found.figure.startswith(
        "top-1 was 50.00 % with BatchNorm's running statistics and is 95.00 % with exact ones; the "
        "variance of bn"
    )


SMALL = course(2.3, 1.2, 0.6, 0.3, 0.1, batch=96)


def large(*losses: float, top1: float) -> Record:
    record = course(*losses, updates=40, batch=960, epoch=np.arange(1.0, 41) / 4)
    return validated(record, [0.5], [top1])


def test_a_run_level_by_updates_has_too_few_of_them() -> None:
    small = validated(SMALL, [0.5], [0.9])
    causes = find_causes(large(2.3, 1.0, top1=0.7), small)
    assert [cause.kind for cause in causes] == ["fewer updates"]
    assert causes[0].figure.startswith("40 updates against 400: the training loss ends at 1.02")
    assert "times the epochs, by the epoch law" in causes[0].remedy
    behind = find_causes(large(2.3, 2.2, top1=0.3), small)
    assert behind[0].remedy.startswith("an update does less than one of the small run")


def test_runs_with_the_same_training_loss_and_another_top1_have_a_gap() -> None:
    small = validated(SMALL, [0.5], [0.9])
    assert kinds(large(2.3, 0.5, 0.1, top1=0.8), small) == ["generalisation gap"]
    assert kinds(large(2.3, 0.5, 0.1, top1=0.89), small) == []


def test_a_run_with_as_many_updates_or_without_their_number_is_compared_by_its_loss() -> None:
    small, run = course(2.3, 0.2, 0.1), course(2.3, 1.5, 1.0)
    ends = [validated(small, [0.2], [0.9]), validated(run, [1.0], [0.6])]
    (cause,) = find_causes(ends[1], ends[0])
    assert cause.kind == "underfit"
    assert cause.figure.startswith("after as many updates the training loss ends at 1")
    unknown = [replace(it, step=np.full_like(it.step, math.nan)) for it in ends]
    (cause,) = find_causes(unknown[1], unknown[0])
    assert cause.figure.startswith("the training loss ends at 1")


def test_the_epochs_of_a_large_batch_are_those_of_the_small_run_to_the_same_loss() -> None:
    """The small run has the large one's last loss after a quarter of its epochs."""
    run = large(2.3, 1.25, top1=0.7)
    reached = float(SMALL.epoch[np.flatnonzero(SMALL.trend <= run.end)[0]])
    assert epochs_factor(run, SMALL) == pytest.approx(SMALL.epochs / reached)
    assert epochs_factor(run, course(2.3, 2.2)) is None
    in_first_epoch = replace(SMALL, epoch=np.floor(SMALL.epoch / 100))
    assert epochs_factor(run, in_first_epoch) == pytest.approx(SMALL.epochs / reached)


def test_the_larger_batch_is_judged_in_either_order_and_other_data_is_refused(
    tmp_path: Path,
) -> None:
    run = large(2.3, 1.0, top1=0.7)
    assert order(run, SMALL) == order(SMALL, run) == (run, SMALL)
    with pytest.raises(LargebatchError, match="has 10 classes and other 12; diagnose compares two"):
        order(SMALL, replace(SMALL, name="other", classes=12))
    records = []
    for name, number in (("a", 360), ("b", 720)):
        made = FakeRun(tmp_path / name, val_samples=number)
        made.train(0, 600)
        records.append(record_of(read_run(made.write())))
    with pytest.raises(LargebatchError, match="a and b have other data"):
        order(*records)


def repaired(folder: Path, *changes: str, causes: list[Cause], lr: float = 1.0) -> dict[str, str]:
    """Return the reasons of the changes; the repaired text is a recipe with them."""
    run = record_of(read_run(fake_runs.give_recipe(fake_runs.diverged(folder), *changes)))
    found = repair(replace(run, lr=np.full(len(run.lr), lr)), causes)
    recipe = parse_recipe(found.text)
    assert recipe.name == "digits-96-repaired"
    for key, (value, reason) in found.changes.items():
        top, _, below = key.partition(".")
        section = recipe.model_dump(mode="json", exclude_defaults=True)[top]
        assert (section[below] if below else section) == value
        assert f"# {reason}" in found.text
    return {key: reason for key, (_, reason) in found.changes.items()}


DIVERGED = [Cause("diverged", "the training loss was not finite", "")]
STATISTICS = [Cause("statistics off", "the validation loss was 114", "")]


def test_a_diverged_run_gets_half_of_its_rate_and_a_warm_up(tmp_path: Path) -> None:
    changed = repaired(tmp_path / "a", "schedule.warmup=null", causes=DIVERGED, lr=0.4)
    assert changed == {
        "schedule.peak_lr": "was 0.5; half of the rate at which the loss rose",
        "schedule.warmup": "there was none; Goyal et al. have 5 epochs, at most an eighth of the "
        "run",
    }


def test_statistics_are_added_only_where_the_recipe_has_none(tmp_path: Path) -> None:
    assert list(repaired(tmp_path / "a", "polish=null", causes=STATISTICS)) == ["polish.statistics"]
    with pytest.raises(LargebatchError, match="no cause found changes a key"):
        repaired(tmp_path / "b", causes=STATISTICS)


def test_a_cause_without_a_defended_key_and_a_log_without_recipe_change_nothing(
    tmp_path: Path,
) -> None:
    lost = [Cause("class lost", "class 3 has only 5 of 36 images right", "")]
    with pytest.raises(LargebatchError, match="no cause found changes a key"):
        repaired(tmp_path / "a", causes=lost)
    with pytest.raises(LargebatchError, match="has no recipe that can be read"):
        repair(SMALL, DIVERGED)
