"""The ranking of policies of known numbers, held against SciPy and NumPy, and their page."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from largebatch.lab.planner.draft import draft
from schedules_of import schedule_of
from scipy import stats
from short_studies import SETTINGS, Policy, measured

from largebatch.errors import StudyError
from largebatch.lab.planner.suggest import DataSet, Suggestion, suggest
from largebatch.lab.studies.metrics import Interval, Ratio
from largebatch.lab.studies.policies import make_page
from largebatch.lab.studies.recommend import (
    Group,
    as_json,
    choose,
    groups_of,
    rank,
    read_groups,
    schedule_yaml,
    sentences,
    shape_for,
)
from largebatch.lab.studies.search import good_values
from largebatch.lab.studies.study import RATE
from largebatch.lab.studies.trained import CellResults, Result
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import Table

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
NEVER = Policy(reached=[None] * 3, top1=[0.5, 0.5, 0.6], diverged=[3], scaled=SLOW.scaled)
ALL = {"slow": SLOW, "quick": QUICK, "never": NEVER}

Cells = list[CellResults]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return measured(tmp_path_factory.mktemp("study"), ALL)


def with_seeds(cells: Cells, change: Callable[[str, Result], Result | None]) -> Cells:
    """Return the cells with other seeds; None leaves one out."""
    found = []
    for cell in cells:
        seeds = (change(cell.variant, run) for run in cell.seeds)
        found.append(replace(cell, seeds=tuple(run for run in seeds if run is not None)))
    return found


def with_recipe(cells: Cells, **changes: object) -> Cells:
    return [
        replace(
            one, cell=replace(one.cell, recipe=one.cell.recipe.model_copy(update=dict(changes)))
        )
        for one in cells
    ]


def of_batch(cells: Cells, batch: int) -> Cells:
    sizes = cells[0].recipe.batch.model_copy(update={"global_batch": batch})
    return with_recipe(cells, batch=sizes)


def columns(table: Table) -> dict[str, list[Any]]:
    return {column.title: list(column.values) for column in table.columns}


def test_the_policy_of_the_lowest_cost_leads(cells: Cells) -> None:
    found = rank(cells, by="cost", target=0.9)
    quick, slow, never = found.ranked
    assert [one.policy for one in found.ranked] == ["quick", "slow", "never"]
    assert found.recommended is quick
    assert isinstance(slow.against, Ratio)
    ends = [  # 8 to 9 updates against 3 to 4, and so on: nothing was evaluated between
        stats.ttest_rel(np.log(one), np.log(other)).confidence_interval(0.975)
        for one, other in (([8, 9, 10], [4, 5, 6]), ([9, 10, 11], [3, 4, 5]))
    ]
    assert slow.against.interval is not None
    assert slow.against.interval[:3] == pytest.approx(
        ((9 * 10 * 11 / (4 * 5 * 6)) ** (1 / 3), np.exp(ends[0].low), np.exp(ends[1].high))
    )
    assert quick.costs is not None
    assert quick.costs.updates is not None
    low, high = stats.t.interval(0.95, 2, loc=5, scale=1 / np.sqrt(3))
    assert quick.costs.updates[:3] == pytest.approx((5, low, high))
    assert quick.costs.images is not None
    assert (quick.costs.images.mean, quick.costs.reached) == (480, 3)
    assert len(slow.avoid) == 1
    assert never.avoid == ("1 of 3 seeds diverged", "none of 3 seeds reached the target")
    assert never.costs is not None
    assert never.costs.reached == 0


def test_the_policy_of_the_highest_accuracy_leads_by_pairs_of_seeds(cells: Cells) -> None:
    found = rank(cells, by="accuracy")
    assert [one.policy for one in found.ranked] == ["slow", "quick", "never"]
    against = found.ranked[1].against
    assert isinstance(against, Interval)
    test = stats.ttest_rel(SLOW.top1, QUICK.top1).confidence_interval(0.975)  # one of two
    assert against[1:3] == pytest.approx((test.low, test.high))
    assert found.ranked[1].avoid


def test_the_policy_that_depends_least_on_the_rate_is_the_most_robust(cells: Cells) -> None:
    found = rank(cells, by="robustness")
    assert [one.policy for one in found.ranked] == ["slow", "quick", "never"]
    scales = (0.1, 0.5, 1.0, 5.0, 10.0)
    tops = [{1.0: one.top1[0], **one.scaled} for one in (SLOW, QUICK)]
    areas = [np.trapezoid([one[scale] for scale in scales], np.log10(scales)) / 2 for one in tops]
    assert [one.scores[1] for one in found.ranked[:2]] == pytest.approx(areas)
    robustness = found.ranked[0].results.robustness
    assert robustness is not None
    assert robustness.worst_drop == pytest.approx(0.35)
    assert found.gaps  # one seed


def test_good_rates_are_within_the_noise_of_images_and_of_seeds(cells: Cells) -> None:
    """Held against a lower trial on either side of the limit of the two kinds of noise."""
    (quick,) = (cell for cell in cells if cell.variant == "quick")
    search = quick.cell.search
    assert search is not None
    variance = 0.8 * 0.2 / 300 + np.var(QUICK.top1, ddof=1)
    edge = 0.8 - stats.norm.ppf(0.975) * np.sqrt(2 * variance)
    for top1, number in ((edge + 1e-9, 3), (edge - 1e-9, 2)):
        trials = [replace(one, top1=top1) if one.top1 == 0.5 else one for one in quick.trials]
        found = good_values(search, trials, quick.seeds)
        assert (found.number, found.trials) == (number, 3)
        assert found.ranges[RATE] == ((0.2, 1.25) if number == 3 else (0.5, 1.25))
    stopped = [replace(one, pruned_after=3) if one.top1 == 0.79 else one for one in quick.trials]
    assert good_values(search, stopped, quick.seeds).number == 1


def test_the_schedule_can_be_pasted_into_a_recipe(cells: Cells) -> None:
    found = rank(cells, by="cost", target=0.9).first
    assert found is not None
    text = Path("recipes/quickstart/digits_96.yaml").read_text()
    before, _, rest = text.partition("\nschedule:")
    after = rest[re.search(r"\n(?=\w)", rest).start() :]  # type: ignore[union-attr]
    recipe = parse_recipe(before + "\n" + schedule_yaml(found.results) + after, source="pasted")
    assert recipe.schedule == found.results.cell.at(found.results.values).schedule


def test_folders_of_studies_are_read_back(tmp_path: Path) -> None:
    measured(tmp_path, ALL, recorded=True)
    (group,) = read_groups([tmp_path])
    found = rank(group.cells, by="cost", target=0.9)
    content = as_json(group, found)
    assert (content["recommended"], content["level"], content["study"]) == (
        "quick", [], "tiny/digits"
    )  # fmt: skip
    first, _, never = content["policies"]
    assert (first["costs"]["updates"][0], first["costs"]["reached"]) == (5, 3)
    assert first["values"] == {RATE: 0.5}
    assert first["schedule"]["peak_lr"] == 0.5
    assert never["avoid"]
    assert all(cell.finished for cell in group.cells)
    with pytest.raises(StudyError):
        read_groups([tmp_path / "nothing"])


def by_accuracy(cells: Cells, top1: Mapping[str, Sequence[float]]) -> Cells:
    return with_seeds(
        cells, lambda name, run: replace(run, top1=top1.get(name, [run.top1] * 3)[run.seed - 1])
    )


def test_few_seeds_are_a_gap(cells: Cells) -> None:
    two = with_seeds(cells, lambda _, run: run if run.seed < 3 else None)
    found = rank(two, by="cost", target=0.9)
    assert found.first is not None
    assert found.first.policy == "quick"
    assert found.gaps
    assert found.recommended is None
    one = rank(
        with_seeds(cells, lambda _, run: run if run.seed < 2 else None), by="cost", target=0.9
    )
    assert [each.policy for each in one.level] == ["slow", "never"]
    assert not any(each.avoid for each in one.ranked)
    top1 = {"slow": (0.95, 0.96, 0.96), "quick": (0.95, 0.96, 0.96)}
    level = with_seeds(
        by_accuracy(cells, top1), lambda name, run: run if name != "quick" or run.seed < 3 else None
    )
    assert rank(level, by="accuracy").gaps  # the one within the noise has two seeds


def test_policies_within_the_noise_are_in_no_order(cells: Cells) -> None:
    top1 = {"slow": [0.95, 0.94, 0.96], "quick": [0.94, 0.96, 0.96], "never": [0.5] * 3}
    found = rank(by_accuracy(cells, top1), by="accuracy")
    assert [one.policy for one in found.level] == ["slow"]
    assert found.doubts
    assert found.recommended is None


def test_a_target_that_nothing_reaches_recommends_nothing(cells: Cells) -> None:
    found = rank(cells, by="cost", target=0.99)
    assert found.first is None
    assert found.gaps
    assert found.ranked[2].avoid == ("1 of 3 seeds diverged",)


def missing(cells: Cells, misses: Mapping[str, Collection[int]]) -> Cells:
    """Return the cells with seeds that did not reach the target, by policy."""
    return with_seeds(
        cells,
        lambda name, run: replace(run, evaluations=()) if run.seed in misses.get(name, ()) else run,
    )


def test_a_policy_that_fewer_seeds_bring_to_the_target_is_behind_in_no_order(cells: Cells) -> None:
    """Whole runs of 12 updates are within the noise of the 9 to 11 of the other."""
    found = rank(missing(cells, {"quick": [2, 3]}), by="cost", target=0.9)
    assert [one.policy for one in found.ranked] == ["slow", "quick", "never"]
    assert [one.policy for one in found.level] == ["quick"]


def test_a_policy_of_which_no_seed_gets_there_takes_more_than_its_whole_runs(cells: Cells) -> None:
    """12 updates or more of `slow` against 4, 5 and 6 of `quick`; against 9 to 11 it is open."""
    surely = rank(missing(cells, {"slow": [1, 2, 3]}), by="cost", target=0.9)
    assert surely.ranked[1].avoid == ("none of 3 seeds reached the target",)
    bounds = stats.ttest_rel(np.log([12] * 3), np.log([4, 5, 6])).confidence_interval(0.975)
    assert bounds.low > 0
    without = [one for one in cells if one.variant != "never"]
    found = rank(missing(without, {"quick": [1, 2, 3]}), by="cost", target=0.9)
    assert [one.policy for one in found.level] == ["quick"]
    assert stats.ttest_rel(np.log([12] * 3), np.log([9, 10, 11])).confidence_interval(0.95).low < 0


def counted(
    folder: Path, first: Sequence[int | None], other: Sequence[int | None], *more: Policy
) -> dict[str, bool]:
    """Return which policies are level with `first`, by their updates until 90 % of 12."""
    policies = {
        name: Policy(reached=reached, top1=[0.92] * len(reached))
        for name, reached in (("first", first), ("other", other))
    }
    policies |= {f"more-{number}": policy for number, policy in enumerate(more)}
    found = rank(measured(folder, policies), by="cost", target=0.9)
    assert found.ranked[0].policy == "first"
    return {one.policy: one.is_level for one in found.ranked}


@pytest.mark.parametrize(
    ("first", "other", "is_level"),
    [
        pytest.param([12] * 6, [None] * 6, False, id="fewer, by Fisher's test"),
        pytest.param([12] * 3, [None] * 3, True, id="fewer, and it may be chance"),
        pytest.param([4, 4, 5, 12, 12], [9, 9, 10, None, None], False, id="longer with both"),
        pytest.param(
            [4, 5, 6, None, 4], [9, 10, 11, 12, None], True, id="reached by the other alone"
        ),
        pytest.param([1, 1, 2, 12], [1, None, None, None], True, id="at the first evaluation"),
        pytest.param([5, 6, 5, 6], [6, 7, 6, 7], True, id="between two evaluations"),
    ],
)
def test_a_policy_is_costlier_only_if_that_is_sure(
    tmp_path: Path, first: Sequence[int | None], other: Sequence[int | None], *, is_level: bool
) -> None:
    assert counted(tmp_path, first, other)["other"] is is_level


def test_a_sure_difference_of_one_policy_need_not_be_sure_among_many(tmp_path: Path) -> None:
    """All of 4 seeds and none: 1 in 70 by chance, which is too much for one of four policies."""
    first, other = [12] * 4, [None] * 4
    assert stats.fisher_exact([[0, 4], [4, 0]], alternative="less").pvalue == pytest.approx(1 / 70)
    assert not counted(tmp_path, first, other)["other"]
    more = [Policy(reached=first, top1=[0.91] * 4)] * 3
    assert counted(tmp_path, first, other, *more)["other"]


def test_diverged_seeds_put_a_policy_last_unless_all_have_them(cells: Cells) -> None:
    top1 = {"slow": (0.95, 0.94, 0.1), "quick": (0.94, 0.95, 0.1), "never": (0.94, 0.95, 0.1)}
    once = with_seeds(
        by_accuracy(cells, top1),
        lambda _, run: replace(run, diverged="the loss is nan") if run.seed == 3 else run,
    )
    found = rank(once, by="accuracy")
    assert all(one.is_level for one in found.ranked[1:])
    assert found.doubts
    assert not found.ranked[0].avoid


def test_a_rate_at_an_end_of_its_search_is_a_doubt(cells: Cells) -> None:
    def at_an_end(name: str) -> Cells:
        return with_seeds(
            cells, lambda own, run: replace(run, values={RATE: 0.2}) if own == name else run
        )

    behind = rank(at_an_end("slow"), by="cost", target=0.9)
    assert len(behind.ranked[1].avoid) == 2
    assert "lowest" in behind.ranked[1].avoid[1]
    assert not behind.doubts
    first = rank(at_an_end("quick"), by="cost", target=0.9)
    assert [RATE in doubt for doubt in first.doubts] == [True]


def test_missing_measurements_are_gaps_and_doubts(cells: Cells) -> None:
    unfinished = [replace(one, finished=one.variant != "slow") for one in cells]
    assert "slow" in rank(unfinished, by="cost", target=0.9).gaps[0]
    nothing = with_seeds(cells, lambda *_: None)
    assert rank(nothing, by="cost", target=0.9).gaps
    alone = rank(cells[:1], by="accuracy", batch=512)
    assert alone.gaps
    assert "512" in alone.doubts[0]
    unscaled = [replace(one, scaled=()) for one in cells]
    assert "robustness_seeds" in rank(unscaled, by="robustness").gaps[0]
    assert any("512" in each for each in sentences(alone))


def group(cells: Cells) -> Group:
    return Group(folder="a folder", cells=tuple(cells))


@pytest.mark.parametrize(
    ("batch", "expected"), [(32, [32]), (64, [32, 96]), (96, [96]), (512, [384]), (8, [32])]
)
def test_the_nearest_batches_on_either_side_are_chosen(
    cells: Cells, batch: int, expected: list[int]
) -> None:
    groups = [group(of_batch(cells, size)) for size in (384, 32, 96)]
    assert sorted(one.batch for one in choose(groups, batch=batch)) == expected


@pytest.mark.parametrize(
    ("recipe", "dataset", "expected"),
    [
        ("fashion_mnist_resnet9_128", "fashion-mnist", True),
        ("fashion_mnist_resnet9_128", "FashionMNIST", True),
        ("fashion_mnist_resnet9_128", "mnist", False),
        ("cifar10_resnet8_128", "cifar-10", True),
        ("cifar100_resnet8", "cifar-10", False),
        ("other", "digits", True),
    ],
)
def test_a_data_set_is_the_beginning_of_the_name_of_a_recipe(
    cells: Cells, recipe: str, dataset: str, expected: bool
) -> None:
    assert group(with_recipe(cells, name=recipe)).is_of(dataset) is expected


def test_an_unmeasured_question_is_refused(cells: Cells) -> None:
    groups = groups_of("a folder", cells)
    with pytest.raises(StudyError, match="vgg"):
        choose(groups, dataset="digits", model="vgg")
    assert choose(groups, dataset="digits", model="lenet5", optimizer="lars") == groups


IMAGES = DataSet(samples=1437, val_samples=360, classes=10, image_size=16)
HALVES = {"warmup": None, "decay": {"kind": "steps", "gamma": 0.5, "at": [{"steps": 5}]}}
COSINE = {"warmup": {"epochs": 0.2}, "decay": {"kind": "cosine", "end_lr": 0.01}}


def shaped(folder: Path, shape: dict[str, Any], *, batch: int = 96) -> Group:
    """Return a group whose most accurate policy has this shape."""
    policies = {
        "shape": Policy(reached=[4] * 3, top1=[0.96, 0.95, 0.97]),
        "other": Policy(reached=[4] * 3, top1=[0.9, 0.91, 0.9]),
    }
    digits = {"recipe": "digits_96", "set": {**SETTINGS, "batch.global_batch": batch}}
    return group(
        measured(
            folder, policies, policies={"shape": shape, "other": {"decay": {"kind": "constant"}}},
            recipes={"digits": digits},
        )
    )  # fmt: skip


def suggested(batch: int = 96) -> Suggestion:
    return suggest(batch, data=IMAGES, model="lenet5", epochs=4)


def rates(recipe: Recipe) -> list[float]:
    schedule = schedule_of(recipe)
    return [schedule(step) for step in range(make_plan(recipe, workers=1).steps)]


@pytest.mark.parametrize("shape", [HALVES, COSINE], ids=["steps", "cosine"])
@pytest.mark.parametrize(("batch", "of"), [(96, 96), (64, 48)])
def test_a_measured_shape_is_stretched_over_the_suggested_run(
    tmp_path: Path, shape: dict[str, Any], batch: int, of: int
) -> None:
    """Held against the measured rates, interpolated at the same part of the run."""
    own, found = shaped(tmp_path, shape, batch=of), suggested(batch)
    taken = shape_for(found, [group(of_batch(list(own.cells), 96)), own])
    assert taken is not None
    recipe = parse_recipe(draft(found, schedule=taken.schedule), source="suggested")
    assert recipe.schedule.peak_lr == found.peak_lr
    before, here = rates(own.recipe), rates(recipe)
    assert (len(before), len(here) > 50) == (12, True)
    places = np.arange(len(here)) * 12 / len(here)
    expected = np.interp(places, range(12), before) / own.recipe.schedule.peak_lr
    inside = (places <= 11) & ((shape is COSINE) | (places < 4) | (places > 5.2))
    assert np.array(here)[inside] / found.peak_lr == pytest.approx(expected[inside], abs=0.02)


def test_no_shape_is_taken_from_too_little(tmp_path: Path) -> None:
    own = shaped(tmp_path, COSINE)
    assert shape_for(suggested(56), [group(of_batch(list(own.cells), 24)), own]) is not None
    few = group(with_seeds(list(own.cells), lambda _, run: run if run.seed < 3 else None))
    for found in (shape_for(suggested(), [few]), shape_for(suggested(64), [own])):
        assert found is not None
        assert found.schedule is None
    assert shape_for(replace(suggested(), model="resnet18"), [own]) is None
    assert shape_for(replace(suggested(), data=replace(IMAGES, classes=9)), [own]) is None


def test_the_page_has_the_numbers_of_every_policy(cells: Cells) -> None:
    page = make_page("tiny", cells, targets=[0.9])
    table = page.sections[0].parts[0]
    assert isinstance(table, Table)
    found = columns(table)
    assert found["Policy"] == ["slow", "quick", "never"]
    assert found["Top-1, %"] == pytest.approx([95.67, 92.17, 53.33], abs=0.01)
    assert found["Updates to 90 %"][:2] == pytest.approx([10, 5])
    assert found["reached 90 %"] == ["3 of 3", "3 of 3", "0 of 3"]
    assert found["peak_lr"] == [0.5] * 3
    assert found["Worst drop, points"] == pytest.approx([35.0, 81.0, -10.0 + 10.0], abs=0.01)
    assert found["Diverged"] == [0, 0, 1]
    fronts = dict(zip(found["Policy"], found["Pareto front"], strict=True))
    assert "Updates to 90 %" in fronts["slow"]
    assert "Updates to 90 %" in fronts["quick"]
    assert fronts["never"] is None
    assert not page.is_sound or all(cell.finished for cell in cells)
    assert "<svg" in page.html()
