"""Rankings of policies, and transfer and resources of settings, against SciPy, NumPy, by hand."""

import csv
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from scipy import stats
from short_studies import SERVERS, Json, Policy, a_record, measured, undisturbed, write_study

from largebatch import load_recipe
from largebatch.cli.main import DONE, USER, main
from largebatch.lab.studies import runner
from largebatch.lab.studies.comparison import (
    Ranking,
    best_setting,
    draw,
    lost,
    rank,
    transfer_matrix,
)
from largebatch.lab.studies.hosts import HostsCell
from largebatch.lab.studies.study import RATE, Slot
from largebatch.lab.studies.trained import CellResults, TrainedCell, TrainedRecord, read_result
from largebatch.recipe.loading import parse_recipe
from largebatch.report.pages import Chart, Code, Table

QUICK = Policy(
    reached=[4, 5, 6],
    top1=[0.91, 0.92, 0.935],
    trials={0.5: 0.8, 0.2: 0.5, 1.25: 0.79},
    scaled={0.1: 0.5, 0.5: 0.8, 5.0: 0.7, 10.0: 0.1},
)
SLOW = Policy(
    reached=[9, 10, 11],
    top1=[0.95, 0.96, 0.96],
    scaled={0.1: 0.6, 0.5: 0.9, 5.0: 0.9, 10.0: 0.8},
)
NEVER = Policy(reached=[None] * 3, top1=[0.5, 0.5, 0.6], diverged=[3], scaled=QUICK.scaled)
ALL = {"slow": SLOW, "quick": QUICK, "never": NEVER}

Cells = list[CellResults]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return measured(tmp_path_factory.mktemp("study"), ALL)


def with_seeds(cells: Cells, change: Callable[[str, TrainedRecord], TrainedRecord | None]) -> Cells:
    """Return the cells with other seeds; None leaves one out."""
    found = []
    for cell in cells:
        seeds = (change(cell.cell.variant, run) for run in cell.seeds)
        found.append(replace(cell, seeds=tuple(run for run in seeds if run is not None)))
    return found


def level(found: Ranking) -> list[str]:
    """Return the policies within the noise of the first one."""
    return [one.policy for one in found.ranked if one.is_level]


def test_the_policy_of_the_lowest_cost_leads(cells: Cells) -> None:
    found = rank(cells, target=0.9)
    _, slow, never = found.ranked
    assert [one.policy for one in found.ranked] == ["quick", "slow", "never"]
    assert found.doubts == []
    assert str(found.finding) == ("digits, by cost to 90.00%: quick is recommended, peak_lr 0.5.")
    # one of two comparisons
    ends = stats.ttest_rel(np.log([9, 10, 11]), np.log([4, 5, 6])).confidence_interval(0.975)
    mean = (9 * 10 * 11 / (4 * 5 * 6)) ** (1 / 3)
    assert slow.against == pytest.approx((mean, np.exp(ends.low), np.exp(ends.high), 3))
    assert not slow.is_level
    assert (never.scores, never.against) == ({}, None)


def test_the_policy_of_the_highest_accuracy_leads_by_pairs_of_seeds(cells: Cells) -> None:
    found = rank(cells)
    assert [one.policy for one in found.ranked] == ["slow", "quick", "never"]
    against = found.ranked[1].against
    assert against is not None
    test = stats.ttest_rel(SLOW.top1, QUICK.top1).confidence_interval(0.975)
    assert against[1:3] == pytest.approx((test.low, test.high))


def test_the_policy_that_depends_least_on_the_rate_is_the_most_robust(cells: Cells) -> None:
    found = rank(cells, robust=True)
    assert [one.policy for one in found.ranked] == ["slow", "quick", "never"]
    for ranked, policy in zip(found.ranked, (SLOW, QUICK), strict=False):
        for seed, own in enumerate(policy.top1, start=1):
            values = {1.0: own, **policy.scaled}
            scales = sorted(values)
            area = np.trapezoid([values[scale] for scale in scales], np.log10(scales)) / 2
            assert ranked.scores[seed] == pytest.approx(area)
    assert "slow is recommended" in str(found.finding)
    alone = [replace(cell, scaled=cell.scaled[:4]) for cell in cells]  # of seed 1
    assert any("too few seeds" in doubt for doubt in rank(alone, robust=True).doubts)


def test_the_schedule_can_be_pasted_into_a_recipe(cells: Cells) -> None:
    *_, shown = draw("tiny", cells, targets=[0.9]).sections[1].parts
    assert isinstance(shown, Code)
    assert "quick" in shown.name
    text = Path("recipes/quickstart/digits_96.yaml").read_text()
    before, _, rest = text.partition("\nschedule:")
    after = rest[re.search(r"\n(?=\w)", rest).start() :]  # type: ignore[union-attr]
    recipe = parse_recipe(before + "\n" + shown.text + after, source="pasted")
    (own,) = (one.cell for one in cells if one.cell.variant == "quick")
    assert recipe.schedule == own.recipe_of(Slot(name="seed-1", seed=1), {RATE: 0.5}).schedule
    assert recipe.schedule.peak_lr == 0.5


def by_accuracy(cells: Cells, top1: Mapping[str, Sequence[float]]) -> Cells:
    return with_seeds(
        cells, lambda name, run: replace(run, top1=top1.get(name, [run.top1] * 3)[run.seed - 1])
    )


def test_few_seeds_are_a_doubt(cells: Cells) -> None:
    two = with_seeds(cells, lambda _, run: run if run.seed < 3 else None)
    found = rank(two, target=0.9)
    assert any("too few seeds to judge: 2" in doubt for doubt in found.doubts)
    assert "quick" not in str(found.finding).partition("not concluded")[0]
    one = with_seeds(cells, lambda _, run: run if run.seed < 2 else None)
    assert level(rank(one, target=0.9)) == ["slow"]


def test_policies_within_the_noise_are_in_no_order(cells: Cells) -> None:
    top1 = {"slow": [0.95, 0.94, 0.96], "quick": [0.94, 0.96, 0.96], "never": [0.5] * 3}
    found = rank(by_accuracy(cells, top1))
    assert level(found) == ["slow"]
    assert "recommended" not in str(found.finding)


def missing(cells: Cells, misses: Mapping[str, Collection[int]]) -> Cells:
    """Return the cells with seeds that did not reach the target, by policy."""
    return with_seeds(
        cells,
        lambda name, run: replace(run, evaluations=()) if run.seed in misses.get(name, ()) else run,
    )


def test_the_policy_that_more_seeds_bring_to_the_target_leads(cells: Cells) -> None:
    found = rank(missing(cells, {"quick": [2, 3]}), target=0.9)
    assert [one.policy for one in found.ranked] == ["slow", "quick", "never"]
    assert level(found) == ["quick"]  # of one pair nothing is sure
    nothing = rank(cells, target=0.99)
    assert "no policy reached 99.00%" in str(nothing.finding)


def test_diverged_seeds_put_a_policy_last_unless_all_have_them(cells: Cells) -> None:
    top1 = {"slow": (0.95, 0.94, 0.1), "quick": (0.94, 0.95, 0.1), "never": (0.94, 0.95, 0.1)}
    once = with_seeds(
        by_accuracy(cells, top1),
        lambda _, run: replace(run, diverged="the loss is nan") if run.seed == 3 else run,
    )
    found = rank(once)
    assert all(one.is_level for one in found.ranked[1:])
    assert found.doubts
    assert not rank(cells).ranked[-1].is_level


def test_what_is_missing_is_a_doubt(cells: Cells) -> None:
    unfinished = [replace(one, finished=one.cell.variant != "slow") for one in cells]
    assert "slow" in rank(unfinished, target=0.9).doubts[0]
    assert rank(with_seeds(cells, lambda *_: None), target=0.9).doubts
    at_an_end = with_seeds(cells, lambda _, run: replace(run, values={RATE: 0.2}))
    assert [each for each in rank(at_an_end, target=0.9).doubts if "lowest" in each]


def test_the_page_has_the_numbers_of_every_policy(cells: Cells) -> None:
    page = draw("tiny", cells, targets=[0.9])
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["Policy"] == ["slow", "quick", "never"]
    assert found["Top-1, %"] == pytest.approx([95.67, 92.17, 53.33], abs=0.01)
    assert found["Updates to 90 %"][:2] == pytest.approx([10, 5])
    assert found["reached 90 %"] == ["3 of 3", "3 of 3", "0 of 3"]
    assert found["peak_lr"] == [0.5] * 3
    assert found["Diverged"] == [0, 0, 1]
    assert found["AC"] == pytest.approx([0.5 + mean / 4 for mean in (2.87 / 3, 2.765 / 3, 1.6 / 3)])
    assert found["CDAC"][0] == pytest.approx(0.125 - 2.87 / 48)
    assert found["Top-5, %"][1] == pytest.approx(100 * (2.765 / 3 + 0.05), abs=0.01)
    assert found["Top-1 at 0.1 x the rate, %"] == pytest.approx([60, 50, 50])
    assert len(page.findings) == 3
    assert len(page.sections[1].parts) == 1 + 1 + 1
    assert "<svg" in page.html()


def test_a_table_and_charts_are_written_for_a_paper(cells: Cells, tmp_path: Path) -> None:
    page = draw("tiny", cells, targets=[0.9])
    page.write_for_paper(tmp_path)
    text = (tmp_path / "variants.csv").read_bytes()
    assert text.startswith("\ufeff".encode())
    rows = list(csv.DictReader(text.decode("utf-8-sig").splitlines()))
    assert [row["Policy"] for row in rows] == ["slow", "quick", "never"]
    assert float(rows[1]["Top-1, %"]) == pytest.approx(100 * 2.765 / 3)
    latex = (tmp_path / "variants.tex").read_text()
    head, first = re.findall(r"(.*) \\\\", latex)[:2]
    assert head.startswith(r"Policy & Recipe & Top-1, \% & $\pm$ &")
    assert first.startswith("slow & digits & 95.67 & ")
    assert latex.count("&") == (len(rows) + 1) * head.count("&")
    assert (tmp_path / "cost-digits.pdf").read_bytes().startswith(b"%PDF")
    chart = (tmp_path / "scales-digits.svg").read_text()
    page.write_for_paper(tmp_path)
    assert (tmp_path / "scales-digits.svg").read_text() == chart


def test_both_axes_have_the_intervals_of_seeds() -> None:
    """20 s times 1.01, 1.02 and 1.03: deviation 0.2; t(0.975, 2) = 4.302653."""
    (chart, *_) = draw("by-hand", settings_by_hand()).sections[1].parts
    assert isinstance(chart, Chart)
    figure = Figure()
    chart.draw(figure)
    spans = {
        tuple(map(tuple, segment))
        for collection in figure.axes[0].collections
        if isinstance(collection, LineCollection)
        for segment in collection.get_segments()
    }
    reach = 4.302653 * 0.2 / math.sqrt(3)
    assert any(
        one == pytest.approx((20.4 - reach, 90.2), abs=1e-4)
        and other == pytest.approx((20.4 + reach, 90.2), abs=1e-4)
        for one, other in spans
    )
    assert len(spans) == 4


RECIPES, SETTINGS = ("mnist", "cifar", "svhn"), ("small", "own", "large", "wide")
SEEDS = (1, 2, 3, 4)
Values = Mapping[str, Mapping[str, Mapping[int, float]]]
Drawn = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]


def drawn(seed: int = 5) -> Drawn:
    """Values by recipe, setting and seed; which setting is best differs from recipe to recipe."""
    draw = np.random.default_rng(seed)
    means = draw.uniform(0.5, 0.9, (len(RECIPES), len(SETTINGS), 1))
    return np.asarray(means + draw.normal(0, 0.01, (len(RECIPES), len(SETTINGS), len(SEEDS))))


def by_name(table: Drawn) -> Values:
    return {
        recipe: {
            setting: dict(zip(SEEDS, map(float, table[i, j]), strict=True))
            for j, setting in enumerate(SETTINGS)
        }
        for i, recipe in enumerate(RECIPES)
    }


def test_a_transfer_is_the_column_with_the_best_setting_of_the_row() -> None:
    table = drawn()
    best = table.mean(axis=2).argmax(axis=1)
    assert len(set(best)) > 1
    level = 1 - 0.025 / (len(SETTINGS) - 1)  # the own best one against all others
    reach = stats.t.ppf(level, len(SEEDS) - 1) / np.sqrt(len(SEEDS))
    matrix = transfer_matrix(by_name(table), higher=True)
    for a, row in enumerate(matrix):
        for b, one in enumerate(row):
            assert (one.best_of, one.used_on) == (RECIPES[a], RECIPES[b])
            assert one.setting == SETTINGS[best[a]]
            assert one.value is not None
            assert one.gap is not None
            assert one.value.mean == pytest.approx(table[b, best[a]].mean())
            gaps = table[b, best[a]] - table[b, best[b]]  # seed by seed
            expected = gaps.mean() + np.array([0, -1, 1]) * reach * gaps.std(ddof=1)
            assert one.gap[:3] == pytest.approx(expected, abs=1e-12)


def test_of_costs_the_lowest_is_best_and_a_gap_is_a_ratio() -> None:
    table = drawn(seed=9)
    best = table.mean(axis=2).argmin(axis=1)
    for a, row in enumerate(transfer_matrix(by_name(table), higher=False)):
        for b, one in enumerate(row):
            assert one.setting == SETTINGS[best[a]]
            assert one.gap is not None
            ratios = table[b, best[a]] / table[b, best[b]]
            assert one.gap.mean == pytest.approx(stats.gmean(ratios))


def test_a_loss_is_beyond_the_noise_of_seeds() -> None:
    table = drawn()
    best = table.mean(axis=2).argmax(axis=1)
    found = lost(transfer_matrix(by_name(table), higher=True), higher=True)
    expected = [
        (RECIPES[a], RECIPES[b])
        for a in range(len(RECIPES))
        for b in range(len(RECIPES))
        if best[a] != best[b]
        and stats.ttest_rel(table[b, best[a]], table[b, best[b]]).pvalue < 0.05
    ]
    assert [(one.best_of, one.used_on) for one in found] == expected != []
    noise = 0.7 + np.random.default_rng(2).normal(0, 0.05, table.shape)
    assert not lost(transfer_matrix(by_name(noise), higher=True), higher=True)


def test_a_setting_without_a_value_for_every_seed_is_not_the_best_one() -> None:
    found = {"fast": {1: 1.0}, "slow": {1: 3.0, 2: 3.5}, "never": {}}
    assert best_setting(found, higher=False) == "slow"
    assert best_setting({"never": {}}, higher=False) is None
    ((own, other), (_, last)) = transfer_matrix(
        {"a": {"slow": {1: 2.0}, "fast": {1: 1.0}}, "b": {"slow": {1: 2.0}, "fast": {}}},
        higher=False,
    )
    assert own.setting == "fast"
    assert (other.value, other.gap) == (None, None)  # it diverged there
    assert last.setting == "slow"
    ((one,),) = transfer_matrix({"a": {"cached": {1: 0.0, 2: 0.0}}}, higher=False)
    assert one.gap is None  # a cost of 0 has no ratio


def run(cell: str, seed: int, top1: float, *, seconds: float) -> TrainedRecord:
    usage = {
        "train_seconds": seconds, "cpu_seconds": 1.5 * seconds, "cores": 1.5,
        "peak_memory_bytes": 4e8,
    }  # fmt: skip
    record = {**a_record(top1, seed=seed), **undisturbed(seed, cell=cell), "usage": usage}
    record["images_per_second"] = 600 * 96 / seconds
    return read_result(record, source=cell)


def settings_by_hand() -> Cells:
    """The large batch is faster, and for letters less accurate."""
    recipe = load_recipe("digits_96")
    return [
        CellResults(
            cell=TrainedCell(
                configuration=name, variant=setting, recipe=recipe, seeds=3, own_process=True
            ),
            seeds=tuple(
                run(
                    f"{name}/{setting}", seed, top1 + seed / 1000,
                    seconds=seconds * (1 + seed / 100),
                )
                for seed in (1, 2, 3)
            ),
        )
        for name, setting, top1, seconds in (
            ("digits", "small", 0.8, 50.0), ("digits", "large", 0.9, 20.0),
            ("letters", "small", 0.7, 40.0), ("letters", "large", 0.6, 30.0),
        )
    ]  # fmt: skip


def test_the_page_has_costs_and_transfer() -> None:
    page = draw("by-hand", settings_by_hand())
    (table,), *_, matrices = (section.parts for section in page.sections)
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["Setting"] == ["small", "large"] * 2
    assert found["Training, s"] == pytest.approx([51.0, 20.4, 40.8, 30.6])
    assert found["Peak memory, MB"] == pytest.approx([400.0] * 4)
    top1 = matrices[0]
    assert isinstance(top1, Table)
    assert top1.columns[2].title.startswith("used on letters")
    assert top1.columns[2].values == pytest.approx([60.2, 70.2])
    assert "large, 90.20 % (" in page.findings[0]
    assert "large is −10.00 (−10.00 to −10.00) from its own best" in page.findings[2]
    assert "digits, the shortest training: large, 20.4 s" in page.findings[4]
    assert not any("not concluded" in each for each in page.findings[:8])
    assert "within the noise" in page.findings[-1]  # all have the same memory
    assert "<svg" in page.html()


def disturbed(cells: Cells, change: Callable[[TrainedRecord], TrainedRecord]) -> list[str]:
    """Return the findings about accuracy and training time on digits after a change."""
    found = draw("by-hand", with_seeds(cells, lambda _, one: change(one))).findings
    return [found[0], found[4]]


@pytest.mark.parametrize(
    ("change", "words", "of_accuracy"),
    [
        pytest.param(
            lambda run: replace(run, other_cores=0.6) if run.seed == 2 else run,
            "too busy to judge: other programs used up to 0.6 of 4 cores", False, id="busy",
        ),
        pytest.param(
            lambda run: replace(run, begun=1e9, ended=1e9 + run.seed),
            "6 of 6 runs overlapped", False, id="overlapping",
        ),
        pytest.param(
            lambda run: replace(run, host="node-8") if run.seed == 2 else run,
            "several machines", False, id="machines",
        ),
        pytest.param(
            lambda run: replace(run, other_cores=math.nan), "not measured", False, id="unmeasured"
        ),
        pytest.param(
            lambda run: replace(run, commit="1" * 40) if run.seed == 2 else run,
            "several commits: 000000000000, 111111111111", True, id="commits",
        ),
    ],
)  # fmt: skip
def test_times_of_disturbed_runs_conclude_nothing(
    change: Callable[[TrainedRecord], TrainedRecord], words: str, *, of_accuracy: bool
) -> None:
    accuracy, time = disturbed(settings_by_hand(), change)
    assert words in time
    assert (words in accuracy) == of_accuracy
    for one in (time, *([accuracy] if of_accuracy else [])):
        assert "not concluded" in one
        assert "20.4" not in one


def test_settings_of_few_or_missing_seeds_conclude_nothing() -> None:
    cells = settings_by_hand()
    two = with_seeds(cells, lambda _, one: one if one.seed < 3 else None)
    assert all("too few seeds to judge: 2" in each for each in draw("two", two).findings)
    lacking = with_seeds(cells, lambda name, one: one if name == "large" or one.seed < 3 else None)
    found = draw("lacking", lacking).findings
    assert all("not finished: small" in each for each in found)
    assert not draw("lacking", lacking).is_sound


def test_a_setting_within_the_noise_of_another_is_no_winner() -> None:
    """20 s and 20.2 s; pairs of seeds differ by 1.5 s either way."""

    def change(name: str, one: TrainedRecord) -> TrainedRecord:
        seconds = {"large": (20.0, 21.5, 18.5), "small": (21.5, 18.6, 20.5)}[name][one.seed - 1]
        return replace(one, usage={**one.usage, "train_seconds": seconds})

    times = draw("near", with_seeds(settings_by_hand(), change)).findings[4]
    assert "within the noise of each other, so in no order: large, small" in times
    assert "20.0" not in times


def test_the_command_draws_a_finished_study_and_recommends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    measured(folder, {"quick": QUICK, "slow": SLOW}, recorded=True, targets=[0.9])
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "study", "runs/tiny/study.yaml", "--jobs", "2"]) == DONE
    text = capsys.readouterr().out
    assert "page: runs/tiny/study.html" in text
    assert "by cost to 90.00%: quick is recommended" in text
    assert "by accuracy: slow is recommended" in text


def test_the_command_lists_the_runs_that_are_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start of the probe takes 3 s, of which updates take 0.5 s; 1 + 4 updates are 2 more."""

    def start(cell: HostsCell, *_: object) -> Json:
        probe = cell.on_hosts
        assert (probe.warm_up, probe.updates) == (1, 2)
        return {"seconds": [0.5, 0.5]}

    monkeypatch.setattr(HostsCell, "carry_out", start)
    monkeypatch.setattr(runner, "watched", lambda make: {**make(), "begun": 1.0, "ended": 4.0})
    monkeypatch.setattr(runner, "require_hosts", lambda: None)
    words = [
        "lab",
        "study",
        str(write_study(tmp_path, SERVERS, seeds=2)),
        "--out",
        f"{tmp_path}/out",
    ]
    assert main([*words, "--dry-run"]) == DONE
    *lines, total = capsys.readouterr().out.splitlines()
    assert "lenet5/central-2 seed-1" in lines
    assert total == "8 of 8 runs are left: about 0:00:32"
    assert main([*words, "--page"]) == USER
    assert "no run of the study has finished" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["study.yaml"]
