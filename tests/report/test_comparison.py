"""Several runs side by side: what is compared with what, by the records of their folders."""

from pathlib import Path

import fake_runs
import numpy as np
import pytest
from fake_runs import RECIPE, FakeRun, give_recipe, trained
from html_pages import Parsed
from scipy import stats
from short_runs import log

from largebatch.cli.main import DONE, main
from largebatch.errors import LargebatchError
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.optimizers import LARS
from largebatch.report import write_comparison
from largebatch.report.comparison import compare_runs, describe, make_comparison_page
from largebatch.report.course import updates_of
from largebatch.report.run import change_from
from largebatch.report.seeds import leads, student


def ended_at(folder: Path, *top1: float) -> Path:
    """A run that was evaluated after every 100 updates."""
    run = FakeRun(folder, clean_steps=0, steps=100 * len(top1))
    for place, value in enumerate(top1):
        run.train(100 * place, 100 * (place + 1))
        if place < len(top1) - 1:
            run.evaluate("train", 100 * (place + 1), value)
    run.end("train", 100 * len(top1), top1[-1])
    return run.write()


def test_times_are_the_sums_of_the_log_by_hand(tmp_path: Path) -> None:
    folder = fake_runs.full_run(tmp_path / "run")
    (compared,) = compare_runs([folder]).runs
    steps = [record["step_seconds"] for record in log(folder, "step")]
    spent, by_hand = 0.0, []
    for found in log(folder, "evaluation"):
        spent += 3.2 if found["stage"] == "statistics" else found["seconds"]
        by_hand.append(sum(steps[: int(found["step"])]) + spent)
    np.testing.assert_allclose(compared.evaluated.seconds, by_hand)
    reached = [found["top1"] >= 0.9 for found in log(folder, "evaluation")].index(True)
    assert compared.seconds_to(90) == pytest.approx(by_hand[reached])
    assert np.isnan(compared.seconds_to(98.7))
    assert updates_of(compared.run).seconds[0] == pytest.approx(0.12)


def test_what_is_only_monitored_takes_no_time_to_an_accuracy(tmp_path: Path) -> None:
    """The statistics took 3.2 s by the summary, 1.5 s of it on the loss of all training images."""
    ends = []
    for name, monitored in (("plain", 0.0), ("monitored", 1.5)):
        run = FakeRun(tmp_path / name, clean_steps=0, steps=4)
        run.train(0, 4)
        run.end("train", 4, 0.5)
        run.end("statistics", 0, 0.6)
        if monitored:
            gap = {"samples": 1437, "top1": 1.0, "loss": 0.1, "gap": 0.1, "seconds": monitored}
            run.add("generalization_gap", stage="statistics", step=4, **gap)
        (compared,) = compare_runs([run.write()]).runs
        ends.append(compared.seconds_to(60))
    assert ends == pytest.approx([4 * 0.12 + 0.2 + 3.2, 4 * 0.12 + 0.2 + 3.2 - 1.5])


def test_what_a_resumed_run_did_again_is_counted_once(tmp_path: Path) -> None:
    (compared,) = compare_runs([fake_runs.resumed(tmp_path / "run")]).runs
    np.testing.assert_allclose(compared.evaluated.seconds, [300 * 0.12 + 0.2, 600 * 0.12 + 0.4])


def test_a_discarded_stage_is_in_no_curve_and_a_polished_checkpoint_has_no_time(
    tmp_path: Path,
) -> None:
    decided, polished = compare_runs(
        [fake_runs.decided(tmp_path / "a"), fake_runs.polished_checkpoint(tmp_path / "b")]
    ).runs
    assert not {96.11, 96.39} & set(decided.evaluated.top1.round(2))
    assert polished.best == pytest.approx(96)
    assert np.isnan(polished.seconds_to(50))


@pytest.mark.parametrize("second", [0.80, 0.94, 0.95])
def test_a_difference_is_beyond_noise_by_two_standard_errors(tmp_path: Path, second: float) -> None:
    folders = [ended_at(tmp_path / "a", 0.5, 0.95), ended_at(tmp_path / "b", 0.5, second)]
    ((best, other),) = compare_runs(folders).groups
    assert (best.label, other.label) == ("a", "b")
    assert other.top1 - best.top1 == pytest.approx(100 * (second - 0.95))
    # two standard errors of two independent samples, by hand
    noise = 2 * np.sqrt((0.95 * 0.05 + second * (1 - second)) / 360)
    assert change_from(best.last, other.last).beyond_noise == (0.95 - second > noise)


def test_images_that_both_runs_get_wrong_make_no_noise(tmp_path: Path) -> None:
    for name, wrong in (("a", range(30)), ("b", range(36))):
        trained(tmp_path / name, 1 - len(wrong) / 360, wrong=wrong).write()
    # McNemar's test: 6 images changed, all of them one way, and 6 > 2 * sqrt(6)
    ((best, other),) = compare_runs([tmp_path / "a", tmp_path / "b"]).groups
    assert change_from(best.last, other.last).noise == pytest.approx(2 * np.sqrt(6))
    assert change_from(best.last, other.last).beyond_noise


def test_times_are_measured_to_round_accuracies_that_runs_reached(tmp_path: Path) -> None:
    early = ended_at(tmp_path / "early", 0.3, 0.901, 0.902)
    late = ended_at(tmp_path / "late", 0.3, 0.5, 0.96)
    comparison = compare_runs([late, early])
    assert comparison.targets == (90, 96)
    assert [one.seconds_to(90) for one in comparison.runs] == pytest.approx([36.6, 24.4])


def test_an_accuracy_that_is_exactly_a_target_reaches_it(tmp_path: Path) -> None:
    assert 100 * 0.57 < 57  # in binary
    comparison = compare_runs([ended_at(tmp_path / name, 0.3, 0.57) for name in ("a", "b")])
    assert comparison.targets == (57,)
    assert comparison.runs[0].seconds_to(57) == pytest.approx(200 * 0.12 + 2 * 0.2)


def test_runs_of_other_validation_data_are_not_compared(tmp_path: Path) -> None:
    digits = [give_recipe(ended_at(tmp_path / name, 0.9)) for name in ("a", "b")]
    other = give_recipe(ended_at(tmp_path / "c", 0.99), "data.classes=11")
    comparison = compare_runs([*digits, other])
    assert [runs[0].data() for runs in comparison.groups] == [
        "digits, 10 classes, 360 validation images",
        "digits, 11 classes, 360 validation images",
    ]
    assert not make_comparison_page(comparison).is_sound
    assert [len(runs) for runs in comparison.groups] == [2, 1]


def test_held_out_images_are_other_ones_than_the_validation_images(tmp_path: Path) -> None:
    held_out = "data.held_out={samples: 360, seed: %d}"
    folders = [
        give_recipe(ended_at(tmp_path / name, 0.9), *changes)
        for name, changes in {
            "a": (),
            "b": (held_out % 0, "polish=null"),
            "c": (held_out % 7, "polish=null"),
        }.items()
    ]
    data = [runs[0].data() for runs in compare_runs(folders).groups]
    assert [text.partition("classes, ")[2] for text in data] == [
        "360 validation images",
        "360 held-out training images, seed 0",
        "360 held-out training images, seed 7",
    ]


def test_a_stage_has_ended_where_its_end_was_recorded(tmp_path: Path) -> None:
    paused = FakeRun(tmp_path / "paused", steps=600)
    paused.train(0, 100)
    paused.evaluate("train", 100, 0.4)
    paused.write(status="paused")
    trained(tmp_path / "killed", 0.9, wrong=range(36)).write()
    (tmp_path / "killed" / "summary.json").unlink()
    runs = compare_runs([tmp_path / "paused", tmp_path / "killed"]).runs
    assert [[stage.name for stage in one.ended] for one in runs] == [[], ["train"]]
    assert [one.best for one in runs] == [40, 90]


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    first = give_recipe(ended_at(tmp_path / "a", 0.9))
    second = give_recipe(ended_at(tmp_path / "b", 0.9), "optimizer.eta=0.020000001")
    unreadable = ended_at(tmp_path / "c", 0.9)
    (unreadable / "recipe.yaml").write_bytes(b"\xff{")
    (unreadable / "summary.json").unlink()
    found = compare_runs([first, second, unreadable]).differences
    optimizer = load_recipe(RECIPE).optimizer
    assert isinstance(optimizer, LARS)
    eta = str(optimizer.eta)
    assert found == {"optimizer.eta": (eta, "0.020000001", None)}


def test_a_commit_with_changes_is_not_the_commit(tmp_path: Path) -> None:
    commit, names = "4f2a9c1d5e6b7a8091827364554637281900abcd", ("clean", "changed", "none")
    for name, value in zip(names, (commit, f"{commit}+", None), strict=True):
        trained(tmp_path / name, 0.9).write(commit=value)
    found = compare_runs([tmp_path / name for name in names]).differences
    assert found == {"(commit)": ("4f2a9c1d5e6b", "4f2a9c1d5e6b+", "–")}


def test_a_damaged_run_is_left_out_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [fake_runs.failed_at_once(tmp_path / "a")]
    bad = ended_at(tmp_path / "bad", 0.9)
    (bad / "log.jsonl").write_text("{}\n{}\n")
    out = tmp_path / "pages" / "c.html"
    assert main(["report", *map(str, [*good, bad]), "--out", str(out)]) == DONE
    printed = capsys.readouterr()
    assert printed.out == f"{out}\n"
    assert f"{bad}/log.jsonl:1" in printed.err
    page = out.read_text(encoding="utf-8")
    assert "Left out" in Parsed(page).headings
    assert "bad/log.jsonl:1" in page


@pytest.mark.parametrize(
    ("names", "named"),
    [
        pytest.param(["a", "b", "a"], "a", id="twice"),
        pytest.param(["empty", "missing"], "empty", id="no run"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, names: list[str], named: str) -> None:
    for name in ("a", "b"):
        ended_at(tmp_path / name, 0.9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LargebatchError, match=str(tmp_path / named)):
        compare_runs([tmp_path / name for name in names])


def of_seeds(folder: Path, name: str, *top1: float, first: int = 1, **change: str) -> list[Path]:
    """Return runs of one setting with the seeds from `first` on."""
    changes = [f"{key.replace('__', '.')}={value}" for key, value in change.items()]
    return [
        give_recipe(ended_at(folder / f"{name}-{seed}", value), f"seed={seed}", *changes)
        for seed, value in enumerate(top1, start=first)
    ]


def test_runs_that_differ_in_their_seeds_have_a_mean_and_none_of_them_wins(tmp_path: Path) -> None:
    values = [0.90, 0.92, 0.91, 0.93, 0.90, 0.91, 0.92, 0.90, 0.97]
    comparison = compare_runs(of_seeds(tmp_path, "digits", *values))
    (group,) = comparison.groups
    (setting,) = comparison.settings_of(group)
    assert setting.label == "digits"
    low, high = stats.t.interval(0.95, 8, 100 * np.mean(values), 100 * stats.sem(values))
    assert setting.mean is not None
    assert setting.mean[:3] == pytest.approx((100 * np.mean(values), low, high))
    page = make_comparison_page(comparison)
    assert not [words for words in page.findings if "digits-9" in words]
    shown = Parsed(page.html())
    assert shown.tables["settings"][1][:4] == ["digits", "9", "91.78", f"{low:.2f} to {high:.2f}"]
    assert not {"To the best", "Beyond noise"} & {*shown.tables["runs"][0]}
    assert len({look.colour for look in page.legend[1]}) == 9


@pytest.mark.parametrize(
    ("others", "first", "judged"),
    [
        pytest.param([0.90, 0.91, 0.92], 1, True, id="pairs that differ by as much"),
        pytest.param([0.90, 0.91, 0.92], 4, False, id="as large a spread of other seeds"),
        pytest.param([0.88], 1, False, id="one seed"),
        pytest.param([0.70, 0.71, 0.72], 4, True, id="far below"),
    ],
)
def test_settings_are_compared_by_pairs_of_seeds_or_by_their_spread(
    others: list[float], first: int, judged: bool, tmp_path: Path
) -> None:
    folders = of_seeds(tmp_path, "a", 0.905, 0.916, 0.925)
    folders += of_seeds(tmp_path, "b", *others, first=first, optimizer__eta="0.5")
    comparison = compare_runs(folders)
    best, other = comparison.settings_of(comparison.groups[0])
    assert other.label == "optimizer.eta=0.5"
    (lead,) = leads(best.by_seed, {"other": other.by_seed}, unpaired=True)
    assert lead.is_sure == judged
    assert any("within the spread" in words for words in describe(comparison)) == (not judged)
    if len(others) > 1 and first > 1:
        welch = stats.ttest_ind([90.5, 91.6, 92.5], 100 * np.array(others), equal_var=False)
        assert judged == (welch.pvalue < 0.05)


def test_a_run_that_did_not_finish_is_in_no_mean(tmp_path: Path) -> None:
    folders = of_seeds(tmp_path, "a", 0.90, 0.92, 0.91)
    killed = folders[0] / "summary.json"
    killed.unlink()
    comparison = compare_runs(folders)
    (setting,) = comparison.settings_of(comparison.groups[0])
    assert setting.by_seed == pytest.approx({2: 92.0, 3: 91.0})


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 8, 30])
def test_students_t_is_that_of_scipy(freedom: int) -> None:
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    assert student(freedom, together=3) == pytest.approx(stats.t.ppf(1 - 0.025 / 3, freedom))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A good run with polishing, and one that ends lower and sooner, in larger batches."""
    folder = tmp_path_factory.mktemp("runs")
    good = fake_runs.full_run(folder / "good")
    short = FakeRun(folder / "short", clean_steps=0, global_batch=192, steps=300)
    short.curve(300, best=0.74)
    short.end("train", 300, 0.75)
    give_recipe(short.write(), "batch.global_batch=192")
    return [give_recipe(good), folder / "short"]


def test_the_page_has_a_row_and_a_line_for_each_run(runs: list[Path], tmp_path: Path) -> None:
    path, comparison = write_comparison(runs, tmp_path / "compare.html")
    page = Parsed(path.read_text(encoding="utf-8"))
    titles, *rows = page.tables["runs"]
    assert [row[:3] for row in rows] == [["good", "98.61", "0.00"], ["short", "75.00", "-23.61"]]
    reached = [f"{one.seconds_to(75) / 60:.2f}" for one in comparison.runs]
    assert [row[titles.index("75 % in, min")] for row in rows] == reached
    assert page.tables["differences"] == [
        ["Setting", "good", "short"],
        ["batch.global_batch", "96", "192"],
    ]
    assert page.headings == ["2 runs compared", "Runs", "Accuracy", "Loss", "What differs"]
    assert page.series_of("g") == {"0", "1"}
