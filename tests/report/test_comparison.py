"""Several runs side by side: what is compared with what, by the records of their folders."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_runs
import numpy as np
import pytest
from fake_runs import RECIPE, FakeRun, give_recipe

from largebatch.cli.main import DONE, USER, main
from largebatch.recipe.loading import load_recipe
from largebatch.report.comparison import compare_runs, describe
from largebatch.report.comparison_page import make_comparison_page
from largebatch.report.course import POINTS


def ended_at(folder: Path, *top1: float) -> Path:
    """A run that was evaluated after every 100 updates."""
    run = FakeRun(folder, clean_steps=0, steps=100 * len(top1))
    for place, value in enumerate(top1):
        run.train(100 * place, 100 * (place + 1))
        if place < len(top1) - 1:
            run.evaluate("train", 100 * (place + 1), value)
    run.end("train", 100 * len(top1), top1[-1])
    return run.write()


def sentences(*folders: Path) -> list[str]:
    return list(describe(compare_runs(folders)))


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def test_times_are_the_sums_of_the_log_by_hand(tmp_path: Path) -> None:
    folder = fake_runs.full_run(tmp_path / "run")
    (compared,) = compare_runs([folder]).runs
    steps = [record["step_seconds"] for record in records(folder, "step")]
    spent, by_hand = 0.0, []
    for found in records(folder, "evaluation"):
        spent += 3.2 if found["stage"] == "statistics" else found["seconds"]
        by_hand.append(sum(steps[: int(found["step"])]) + spent)
    np.testing.assert_allclose(compared.evaluated.seconds, by_hand)
    reached = [found["top1"] >= 0.9 for found in records(folder, "evaluation")].index(True)
    assert compared.seconds_to(90) == pytest.approx(by_hand[reached])
    assert np.isnan(compared.seconds_to(98.7))
    images = [found["step"] * 96 for found in records(folder, "evaluation")]
    np.testing.assert_array_equal(compared.evaluated.images, images)
    assert compared.updates.step[-1] > 590
    assert compared.updates.seconds[0] == pytest.approx(0.12)


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
    assert max(compared.updates.values["rate"]) < 2_000


def test_an_older_log_without_seconds_has_them_from_its_images_per_second(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", clean_steps=0, steps=4)
    run.train(0, 4, rate=960.0)
    for record in run.records:
        if record["event"] == "step":
            del record["step_seconds"]
            record["images_per_second"] = 960.0
    run.end("train", 4, 0.5)
    (compared,) = compare_runs([run.write()]).runs
    np.testing.assert_allclose(compared.evaluated.seconds, [0.4 + 0.2])


def test_a_discarded_stage_is_in_no_curve_and_a_polished_checkpoint_has_no_time(
    tmp_path: Path,
) -> None:
    decided, polished = compare_runs(
        [fake_runs.decided(tmp_path / "a"), fake_runs.polished_checkpoint(tmp_path / "b")]
    ).runs
    assert set(decided.evaluated.stages) == {"train", "clean", "affine"}
    assert polished.best == pytest.approx(96)
    assert np.isnan(polished.seconds_to(50))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        pytest.param(
            0.80,
            "a ends with the highest top-1, 95.00 %, 15.00 points above b: more than the noise of "
            "the 360 validation images.",
            id="more than noise",
        ),
        pytest.param(
            0.94,
            "a ends with the highest top-1, 95.00 %, 1.00 points above b. Its lead is within the "
            "noise of the 360 validation images over b.",
            id="within it",
        ),
        pytest.param(
            0.95,
            "a and b end with the same top-1, 95.00 %.",
            id="a tie",
        ),
    ],
)
def test_the_first_sentence_names_the_best_run_and_how_surely_it_is(
    tmp_path: Path, second: float, words: str
) -> None:
    found = sentences(ended_at(tmp_path / "a", 0.5, 0.95), ended_at(tmp_path / "b", 0.5, second))
    assert found[0] == words
    # two standard errors of two independent samples, by hand
    assert (0.95 - second > 2 * np.sqrt((0.95 * 0.05 + second * (1 - second)) / 360)) == (
        "more than" in words
    )


def test_images_that_both_runs_get_wrong_make_no_noise(tmp_path: Path) -> None:
    for name, wrong in (("a", range(30)), ("b", range(36))):
        run = FakeRun(tmp_path / name, clean_steps=0)
        run.train(0, 600)
        run.end("train", 600, 1 - len(wrong) / 360, wrong=wrong)
        run.write()
    # McNemar's test: 6 images changed, all of them one way, and 6 > 2 * sqrt(6)
    assert sentences(tmp_path / "a", tmp_path / "b")[0].endswith(
        "1.67 points above b: more than the noise of the 360 validation images."
    )


def test_the_fastest_to_the_highest_target_that_two_runs_reached_is_named(tmp_path: Path) -> None:
    early = ended_at(tmp_path / "early", 0.3, 0.901, 0.902)
    late = ended_at(tmp_path / "late", 0.3, 0.5, 0.96)
    comparison = compare_runs([late, early])
    assert comparison.targets == (90, 96)
    assert list(describe(comparison))[1] == (
        "First to reach a top-1 of 90 % was early after 24.4 s, then late after 36.6 s; 2 of 2 "
        "runs reached it."
    )


def test_a_run_that_reached_a_target_by_its_first_evaluation_is_not_ranked(tmp_path: Path) -> None:
    early = ended_at(tmp_path / "early", 0.3, 0.901)
    coarse = ended_at(tmp_path / "coarse", 0.902, 0.903, 0.904)
    comparison = compare_runs([early, coarse])
    assert [one.reached_at_once(90) for one in comparison.runs] == [False, True]
    assert list(describe(comparison))[1] == (
        "Top-1 reached 90 % in coarse after at most 12.2 s (its first evaluation) and in early "
        "after 24.4 s; 2 of 2 runs reached it."
    )


def test_the_time_of_a_first_evaluation_stands_in_a_column_of_its_own(tmp_path: Path) -> None:
    early = ended_at(tmp_path / "early", 0.3, 0.901)
    page = make_comparison_page(
        compare_runs([early, ended_at(tmp_path / "late", 0.3, 0.4, 0.902)])
    ).html()
    assert "90 % in, s" in page
    assert "90 % in at most, s" not in page
    page = make_comparison_page(compare_runs([early, ended_at(tmp_path / "coarse", 0.902)])).html()
    assert "90 % in, s" in page
    assert "90 % in at most, s" in page


def test_an_accuracy_that_is_exactly_a_target_reaches_it(tmp_path: Path) -> None:
    assert 100 * 0.57 < 57  # in binary
    comparison = compare_runs([ended_at(tmp_path / name, 0.3, 0.57) for name in ("a", "b")])
    assert comparison.targets == (57,)
    assert comparison.runs[0].seconds_to(57) == pytest.approx(200 * 0.12 + 2 * 0.2)


def test_runs_of_other_validation_data_are_not_compared(tmp_path: Path) -> None:
    digits = [give_recipe(ended_at(tmp_path / name, 0.9)) for name in ("a", "b")]
    other = give_recipe(ended_at(tmp_path / "c", 0.99), "data.classes=11")
    comparison = compare_runs([*digits, other])
    found = list(describe(comparison))
    assert found[0] == (
        "These runs were measured on 2 sets of validation images, so their accuracies cannot be "
        "compared: digits, 10 classes, 360 validation images (a, b); digits, 11 classes, 360 "
        "validation images (c)."
    )
    assert [sentence.partition(" ")[0] for sentence in found[1:]] == ["a"]
    assert comparison.groups[0].points_to_best(comparison.runs[1]) == 0


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
    assert sentences(*folders)[0].startswith(
        "These runs were measured on 3 sets of validation images, so their accuracies cannot be "
        "compared: digits, 10 classes, 360 validation images (a); digits, 10 classes, 360 held-out "
        "training images, seed 0 (b); "
    )


def test_class_names_distinguish_data_sets_of_one_size(tmp_path: Path) -> None:
    for name, classes in (("a", "0123456789"), ("b", "ABCDEFGHIJ")):
        run = FakeRun(tmp_path / name, clean_steps=0)
        run.classes = list(classes)
        run.train(0, 600)
        run.end("train", 600, 0.9, wrong=range(36))
        run.write()
    first = sentences(tmp_path / "a", tmp_path / "b")[0]
    assert "360 validation images (0, 1, 2, ...) (a)" in first
    assert "360 validation images (A, B, C, ...) (b)" in first


def test_a_stage_has_ended_where_its_end_was_recorded(tmp_path: Path) -> None:
    paused = FakeRun(tmp_path / "paused", steps=600)
    paused.train(0, 100)
    paused.evaluate("train", 100, 0.4)
    paused.write(status="paused")
    killed = FakeRun(tmp_path / "killed", steps=600)
    killed.train(0, 600)
    killed.end("train", 600, 0.9, wrong=range(36))
    killed.write()
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
    assert optimizer.kind == "lars"
    eta = str(optimizer.eta)
    assert found == {"optimizer.eta": (eta, "0.020000001", None)}


def test_a_commit_with_changes_is_not_the_commit(tmp_path: Path) -> None:
    commit, names = "4f2a9c1d5e6b7a8091827364554637281900abcd", ("clean", "changed", "none")
    for name, value in zip(names, (commit, f"{commit}+", None), strict=True):
        run = FakeRun(tmp_path / name, clean_steps=0)
        run.train(0, 600)
        run.end("train", 600, 0.9)
        run.write(commit=value)
    found = compare_runs([tmp_path / name for name in names]).differences
    assert found == {"(commit)": ("4f2a9c1d5e6b", "4f2a9c1d5e6b+", None)}


def test_recipes_run_with_several_seeds_have_means_and_deviations(tmp_path: Path) -> None:
    tops = {"slow": [0.90, 0.93, 0.91], "fast": [0.95, 0.94]}
    folders = [
        give_recipe(
            ended_at(tmp_path / f"{name}-{seed}", top1),
            f"seed={seed}",
            f"schedule.peak_lr={len(values)}",
        )
        for name, values in tops.items()
        for seed, top1 in enumerate(values)
    ]
    slow, fast = (
        f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f} %"
        for values in tops.values()
    )
    assert sentences(*folders)[-1] == (
        f"By recipe, as mean and standard deviation over its seeds, top-1 ends at {fast} over 2 "
        f"seeds in finished runs like fast-0 and at {slow} over 3 seeds in finished runs like "
        "slow-1."
    )
    again = give_recipe(ended_at(tmp_path / "on 4 workers", 0.95), "seed=0", "schedule.peak_lr=2")
    assert f"{fast} over 2 seeds" in sentences(*folders, again)[-1]
    assert "±" not in " ".join(sentences(folders[0], folders[3]))


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [ended_at(tmp_path / name / "run", 0.9) for name in ("a", "b")]
    long = ended_at(tmp_path / ("x" * 200), 0.9)
    labels = [one.label for one in compare_runs([*folders, long]).runs]
    assert labels[:2] == ["a/run", "b/run"]
    assert len(labels[2]) <= 48


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
    assert f"left out: {bad}/log.jsonl:1: not a record of a run" in printed.err
    page = out.read_text(encoding="utf-8")
    assert "<h2>Not compared</h2>" in page
    assert "&#39;event&#39; is missing" in page


@pytest.mark.parametrize(
    ("names", "message"),
    [
        pytest.param(["a", "missing"], "missing: not found; expected the folder", id="missing"),
        pytest.param(["a", "b", "a"], "a: given twice", id="twice"),
        pytest.param(["empty", "empty2"], "none of the 2 folders holds a run", id="no run"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        ended_at(tmp_path / name, 0.9)
    for name in ("empty", "empty2"):
        (tmp_path / name).mkdir()
    out = tmp_path / "c.html"
    paths = [str(tmp_path / name) for name in names]
    assert main(["report", *paths, "--out", str(out)]) == USER
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_comparison_is_written_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("largebatch.report.interactive.Page.html", lambda _: "page")
    runs = [str(ended_at(tmp_path / name, 0.9)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    for words, path in (([], "compare.html"), (["--out", "there"], "there/compare.html")):
        assert main(["report", *runs, *words]) == DONE
        assert capsys.readouterr().out == f"{path}\n"
        assert Path(path).read_text() == "page"
    (tmp_path / "file").touch()
    assert main(["report", *runs, "--out", "file/c.html"]) == USER
    assert "file/c.html: the page cannot be written" in capsys.readouterr().err


def test_without_bokeh_the_install_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    runs = [str(ended_at(tmp_path / name, 0.9)) for name in ("a", "b")]
    assert main(["report", *runs, "--out", str(tmp_path / "c.html")]) == USER
    assert "pip install 'bokeh>=3.8'" in capsys.readouterr().err


def test_curves_of_any_length_are_thinned_to_what_a_chart_shows(tmp_path: Path) -> None:
    number = POINTS + 500
    run = FakeRun(tmp_path / "run", clean_steps=0, steps=number)
    run.train(0, number)
    for step in range(1, number):
        run.evaluate("train", step, 0.9 * step / number)
    run.end("train", number, 0.95)
    (compared,) = compare_runs([run.write()]).runs
    thinned = compared.evaluated.thinned()
    assert len(thinned.step) == POINTS
    assert (thinned.step[0], thinned.step[-1]) == (1, number)
    assert thinned.values["top1"][-1] == pytest.approx(95)
    assert len(compared.updates.step) <= POINTS


def test_runs_of_any_kind_make_a_page(tmp_path: Path) -> None:
    kinds: list[Callable[[Path], Path]] = [
        fake_runs.failed_at_once,
        fake_runs.interrupted_after_one_step,
        fake_runs.diverged,
        fake_runs.killed,
        fake_runs.polished_checkpoint,
    ]
    for place, make in enumerate(kinds):
        make(tmp_path / str(place))
    folders = sorted(tmp_path.iterdir())
    assert "<h1>5 runs compared</h1>" in make_comparison_page(compare_runs(folders)).html()
