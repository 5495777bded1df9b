"""What a database of known numbers recommends, held against SciPy and NumPy."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from optuna.storages import InMemoryStorage
from policy_databases import Policy, fill_storage
from scipy import stats

from largebatch.errors import StudyError
from largebatch.lab.studies.metrics import Interval, Ratio
from largebatch.lab.studies.policies.groups import Group, choose, groups_of, is_of
from largebatch.lab.studies.policies.recommend import Recommendation, good_values, recommend
from largebatch.lab.studies.policies.recommend_words import (
    as_json,
    policies_table,
    runs_behind,
    schedule_yaml,
    sentences,
)
from largebatch.lab.studies.queue.results import CellResults, read_results
from largebatch.lab.studies.queue.study import RATE
from largebatch.recipe.loading import parse_recipe

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


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    storage = InMemoryStorage()
    policies = {"slow": SLOW, "quick": QUICK, "never": NEVER}
    fill_storage(storage, tmp_path_factory.mktemp("study"), policies)
    (found,) = groups_of("a database", read_results(storage))
    return found


def answer(found: Recommendation) -> str:
    return "\n".join(sentences(found))


def table(found: Recommendation) -> list[list[str]]:
    """Return the header and the rows of the table."""
    return [re.split(" {2,}", line) for line in policies_table(found).text().splitlines()]


def test_the_policy_of_the_lowest_cost_leads_with_what_it_costs(group: Group) -> None:
    found = recommend(group, by="cost", target=0.9)
    assert [one.cell.policy for one in found.standings] == ["quick", "slow", "never"]
    assert not found.too_little
    against = found.standings[1].against
    assert isinstance(against, Ratio)
    ends = [  # 8 to 9 updates against 3 to 4, and so on: nothing was evaluated between
        stats.ttest_rel(np.log(one), np.log(other)).confidence_interval(0.975)
        for one, other in (([8, 9, 10], [4, 5, 6]), ([9, 10, 11], [3, 4, 5]))
    ]
    low_ratio, high_ratio = np.exp(ends[0].low), np.exp(ends[1].high)
    assert against.interval is not None
    assert against.interval[1:3] == pytest.approx((low_ratio, high_ratio))
    low, high = stats.t.interval(0.95, 2, loc=5, scale=1 / np.sqrt(3))
    text, (head, quick, slow, never) = answer(found), table(found)
    assert text.startswith(
        "digits-96, lenet5, batch 96, lars (study tiny/digits): 3 policies x 3 seeds, by cost to "
        "90.00% (at the first evaluation there); intervals are at 95%, those of comparisons "
        "together\n"
        "recommended: quick, peak_lr 0.5; within the noise of the best in its search: "
        "peak_lr 0.5 to 1.25 (2 of 3 trials)\n"
    )
    names = ("policy", "updates", "images", "seconds", "reached", "seeds", "diverged")
    places = [head.index(name) for name in names]
    assert [quick[place] for place in places] == ["quick", "5", "480", "5.0", "3 of 3", "3", "0"]
    assert quick[places[1] + 1] == f"{(high - low) / 2:,.0f}"
    mean = (9 * 10 * 11 / (4 * 5 * 6)) ** (1 / 3)
    costlier = f"{mean:.2f} times ({low_ratio:.2f} to {high_ratio:.2f}) the updates"
    place = head.index("against quick")
    assert slow[place : place + 2] == [costlier, "no"]
    assert (never[0], never[head.index("reached")]) == ("never", "0 of 3")
    assert f"avoid slow: {costlier} of quick\n" in text
    assert text.endswith("avoid never: 1 of 3 seeds diverged; none of 3 seeds reached the target")


def test_the_policy_of_the_highest_accuracy_leads_by_pairs_of_seeds(group: Group) -> None:
    found = recommend(group, by="accuracy")
    assert [one.cell.policy for one in found.standings] == ["slow", "quick", "never"]
    against = found.standings[1].against
    assert isinstance(against, Interval)
    test = stats.ttest_rel(SLOW.top1, QUICK.top1).confidence_interval(0.975)  # one of two
    assert against[1:3] == pytest.approx((test.low, test.high))
    low, high = 100 * test.low, 100 * test.high
    assert f"avoid quick: 3.50 points ({low:.2f} to {high:.2f}) below slow" in answer(found)


def test_the_policy_that_depends_least_on_the_rate_is_the_most_robust(group: Group) -> None:
    found = recommend(group, by="robustness")
    assert [one.cell.policy for one in found.standings] == ["slow", "quick", "never"]
    scales = (0.1, 0.5, 1.0, 5.0, 10.0)
    tops = [{1.0: one.top1[0], **one.scaled} for one in (SLOW, QUICK)]
    areas = [np.trapezoid([one[scale] for scale in scales], np.log10(scales)) / 2 for one in tops]
    assert [one.scores[1] for one in found.standings[:2]] == pytest.approx(areas)
    text = answer(found)
    assert "0.1 times: 60.00%, 0.5 times: 90.00%, 1 times: 95.00%, 5 times: 90.00%" in text
    assert "35.00 points lost at the worst of them" in text
    assert "insufficient data: 1 seed: the noise of seeds is hardly known" in text


def test_good_rates_are_within_the_noise_of_images_and_of_seeds(group: Group) -> None:
    """Held against a lower trial on either side of what the two kinds of noise allow."""
    (quick,) = (cell for cell in group.cells if cell.policy == "quick")
    variance = 0.8 * 0.2 / 300 + np.var(QUICK.top1, ddof=1)
    edge = 0.8 - stats.norm.ppf(0.975) * np.sqrt(2 * variance)
    for top1, number in ((edge + 1e-9, 3), (edge - 1e-9, 2)):
        trials = [replace(one, top1=top1) if one.top1 == 0.5 else one for one in quick.search]
        found = good_values(replace(quick, search=tuple(trials)))
        assert (found.number, found.trials) == (number, 3)
        assert found.ranges[RATE] == ((0.2, 1.25) if number == 3 else (0.5, 1.25))
    stopped = [replace(one, pruned_after=3) if one.top1 == 0.79 else one for one in quick.search]
    assert good_values(replace(quick, search=tuple(stopped))).number == 1


def test_the_schedule_can_be_pasted_into_a_recipe(group: Group) -> None:
    found = recommend(group, by="cost", target=0.9).first
    assert found is not None
    text = Path("recipes/quickstart/digits_96.yaml").read_text()
    before, _, rest = text.partition("\nschedule:")
    after = rest[re.search(r"\n(?=\w)", rest).start() :]  # type: ignore[union-attr]
    recipe = parse_recipe(before + "\n" + schedule_yaml(found.cell) + after, source="pasted")
    assert recipe.schedule == found.cell.cell.at(found.cell.values).schedule


def test_the_runs_behind_are_named_and_all_is_there_as_json(group: Group) -> None:
    found = recommend(group, by="cost", target=0.9)
    assert list(runs_behind(found)) == [
        "runs: study tiny/digits in a database; commit c0ffee",
        *(f"  /runs/seed-{seed}" for seed in (1, 2, 3)),
    ]
    content = as_json(found)
    assert (content["recommended"], content["level"]) == ("quick", [])
    assert content["avoid"].keys() == {"slow", "never"}
    first = content["policies"][0]
    assert (first["costs"]["updates"]["mean"], first["costs"]["reached"]) == (5, 3)
    assert first["values"] == {RATE: 0.5}
    assert content["policies"][2]["against_first"] is None


def every(change: Callable[[CellResults], CellResults], group: Group) -> Group:
    return replace(group, cells=tuple(map(change, group.cells)))


def test_two_seeds_are_too_few(group: Group) -> None:
    found = recommend(
        every(lambda cell: replace(cell, seeds=cell.seeds[:2]), group), by="cost", target=0.9
    )
    text = answer(found)
    assert "insufficient data: 2 seeds: the noise of seeds is hardly known; 3 or more" in text
    assert "tentative: quick" in text
    assert as_json(found)["recommended"] is None


def test_one_seed_cannot_separate_policies(group: Group) -> None:
    few = every(lambda cell: replace(cell, seeds=cell.seeds[:1]), group)
    few_found = recommend(few, by="cost", target=0.9)
    text = answer(few_found)
    assert "within the noise of each other, so in no order: quick, slow, never\n" in text
    assert "2.25 times (no interval) the updates" in policies_table(few_found).text()
    assert "avoid" not in text


def test_policies_within_the_noise_are_all_named(group: Group) -> None:
    seeds = {
        "slow": [0.95, 0.94, 0.96],
        "quick": [0.94, 0.96, 0.96],
        "never": [0.5, 0.5, 0.5],
    }

    def level(cell: CellResults) -> CellResults:
        top1 = seeds[cell.policy]
        changed = (replace(one, top1=top1[one.seed - 1]) for one in cell.seeds)
        return replace(cell, seeds=tuple(changed))

    found = recommend(every(level, group), by="accuracy")
    assert [one.cell.policy for one in found.level] == ["slow"]
    text = answer(found)
    assert "insufficient data: within the noise of each other, so in no order: quick, slow" in text
    head, _, slow, _ = table(found)
    assert slow[head.index("within noise")] == "yes"


def test_a_target_that_nothing_reaches_recommends_nothing(group: Group) -> None:
    found = recommend(group, by="cost", target=0.99)
    assert found.first is None
    assert answer(found).splitlines()[1:] == [
        "insufficient data: no policy reached 99.00%: the best of them, slow, ended at 95.67%",
        "avoid never: 1 of 3 seeds diverged",
    ]
    assert not list(runs_behind(found))


def missing(group: Group, misses: Mapping[str, Collection[int]]) -> Group:
    """Return the group with seeds that did not reach the target, by policy."""

    def change(cell: CellResults) -> CellResults:
        seeds = misses.get(cell.policy, ())
        runs = (replace(one, evaluations=()) if one.seed in seeds else one for one in cell.seeds)
        return replace(cell, seeds=tuple(runs))

    return every(change, group)


def test_a_policy_that_fewer_seeds_bring_to_the_target_is_behind_in_no_order(group: Group) -> None:
    """Whole runs of 12 updates are no more than the 9 to 11 of the other, by their noise."""
    found = recommend(missing(group, {"quick": [2, 3]}), by="cost", target=0.9)
    assert [one.cell.policy for one in found.standings] == ["slow", "quick", "never"]
    assert [one.cell.policy for one in found.level] == ["quick"]
    head, _, quick, _ = table(found)
    assert quick[head.index("reached")] == "1 of 3"
    assert quick[head.index("within noise")] == "yes"


def test_a_policy_of_which_no_seed_gets_there_takes_more_than_its_whole_runs(group: Group) -> None:
    """12 updates or more of `slow` against 4, 5 and 6 of `quick`; against 9 to 11 it is open."""
    surely = recommend(missing(group, {"slow": [1, 2, 3]}), by="cost", target=0.9)
    assert surely.standings[1].avoid == ("none of 3 seeds reached the target",)
    bounds = stats.ttest_rel(np.log([12] * 3), np.log([4, 5, 6])).confidence_interval(0.975)
    assert bounds.low > 0
    without = replace(group, cells=tuple(one for one in group.cells if one.policy != "never"))
    found = recommend(missing(without, {"quick": [1, 2, 3]}), by="cost", target=0.9)
    assert [one.cell.policy for one in found.level] == ["quick"]
    assert stats.ttest_rel(np.log([12] * 3), np.log([9, 10, 11])).confidence_interval(0.95).low < 0
    head, _, quick = table(found)
    assert quick[head.index("reached")] == "0 of 3"
    assert quick[head.index("within noise")] == "yes"
    assert "avoid" not in answer(found)


def counted(
    tmp_path: Path, first: Sequence[int | None], other: Sequence[int | None], *more: Policy
) -> Recommendation:
    """Return the recommendation by cost of runs of 12 updates, by their updates until 90 %."""
    storage = InMemoryStorage()
    policies = {
        name: Policy(reached=reached, top1=[0.92] * len(reached))
        for name, reached in (("first", first), ("other", other))
    }
    policies |= {f"more-{number}": policy for number, policy in enumerate(more)}
    fill_storage(storage, tmp_path, policies)
    (group,) = groups_of("a database", read_results(storage))
    return recommend(group, by="cost", target=0.9)


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
def test_a_policy_is_costlier_where_that_is_sure(
    tmp_path: Path, first: Sequence[int | None], other: Sequence[int | None], *, is_level: bool
) -> None:
    found = counted(tmp_path, first, other)
    assert [one.cell.policy for one in found.standings] == ["first", "other"]
    assert found.standings[1].is_level is is_level
    assert bool(found.standings[1].avoid) is not is_level


def test_what_is_sure_of_one_policy_need_not_be_of_one_among_many(tmp_path: Path) -> None:
    """All of 4 seeds and none: 1 in 70 by chance, which is too much for one of four policies."""
    first, other = [12] * 4, [None] * 4
    assert stats.fisher_exact([[0, 4], [4, 0]], alternative="less").pvalue == pytest.approx(1 / 70)
    assert not counted(tmp_path, first, other).standings[1].is_level
    more = [Policy(reached=first, top1=[0.91] * 4)] * 3
    among = {one.cell.policy: one for one in counted(tmp_path, first, other, *more).standings}
    assert among["other"].is_level


def test_where_all_policies_diverged_once_they_can_be_level(group: Group) -> None:
    def once(cell: CellResults) -> CellResults:
        top1 = (0.95, 0.94, 0.1) if cell.policy == "slow" else (0.94, 0.95, 0.1)
        runs = [replace(run, top1=top1[run.seed - 1]) for run in cell.seeds]
        runs[2] = replace(runs[2], diverged="the loss is nan")
        return replace(cell, seeds=tuple(runs))

    found = recommend(every(once, group), by="accuracy")
    assert all(one.is_level for one in found.standings[1:])


def test_where_one_seed_gets_to_the_target_nothing_is_recommended(group: Group) -> None:
    found = recommend(missing(group, {"slow": [1, 2, 3], "quick": [1, 3]}), by="cost", target=0.9)
    assert found.first is not None
    text = answer(found)
    assert (
        "insufficient data: 1 of 3 seeds reached the target: the noise of seeds is hardly" in text
    )
    assert "in no order: quick, slow\n" in text
    assert as_json(found)["recommended"] is None


def test_a_level_policy_of_few_seeds_leaves_the_first_one_in_doubt(group: Group) -> None:
    def two(cell: CellResults) -> CellResults:
        changed = tuple(replace(one, top1=(0.95, 0.96, 0.96)[one.seed - 1]) for one in cell.seeds)
        return replace(cell, seeds=changed[:2] if cell.policy == "quick" else changed)

    text = answer(recommend(every(two, group), by="accuracy"))
    assert "insufficient data: 2 seeds: the noise of seeds is hardly known" in text


def test_a_policy_that_diverged_is_not_recommended_without_a_doubt(group: Group) -> None:
    def once(cell: CellResults) -> CellResults:
        *kept, last = cell.seeds
        return replace(cell, seeds=(*kept, replace(last, diverged="the loss is nan")))

    text = answer(recommend(every(once, group), by="cost", target=0.9))
    assert "insufficient data: quick comes first although 1 of 3 seeds diverged\n" in text
    assert "avoid quick" not in text


def test_a_rate_at_an_end_of_its_search_speaks_for_a_policy_that_is_behind(group: Group) -> None:
    def at_an_end(cell: CellResults) -> CellResults:
        return replace(cell, values={RATE: 0.2}) if cell.policy == "slow" else cell

    only_it = recommend(every(at_an_end, group), by="accuracy")
    assert [one.avoid for one in only_it.standings if one.cell.policy == "slow"] == [()]
    found = recommend(every(at_an_end, group), by="cost", target=0.9)
    assert found.standings[1].avoid[1:] == (
        "schedule.peak_lr 0.2 is the lowest tried: a better one may lie beyond",
    )
    assert not found.doubts


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            lambda cell: replace(cell, finished=cell.policy != "slow"),
            "not finished: slow",
            id="unfinished",
        ),
        pytest.param(
            lambda cell: replace(cell, values={RATE: 0.2}),
            "quick: schedule.peak_lr 0.2 is the lowest tried: a better one may lie beyond",
            id="edge",
        ),
        pytest.param(
            lambda cell: replace(cell, seeds=()), "no policy has a seed that is done", id="nothing"
        ),
    ],
)
def test_what_is_missing_is_named(
    group: Group, change: Callable[[CellResults], CellResults], expected: str
) -> None:
    text = answer(recommend(every(change, group), by="cost", target=0.9))
    assert f"insufficient data: {expected}" in text


def test_one_policy_and_another_batch_are_too_little(group: Group) -> None:
    alone = replace(group, cells=group.cells[:1])
    text = answer(recommend(alone, by="accuracy", batch=512))
    assert "one policy was measured: there is no other to compare with" in text
    assert "batch 512 was not measured: this is of 96, and neither the order" in text
    unscaled = every(lambda cell: replace(cell, scaled=()), group)
    assert "give the study robustness_seeds" in answer(recommend(unscaled, by="robustness"))


def of_batch(group: Group, batch: int) -> Group:
    def change(cell: CellResults) -> CellResults:
        sizes = cell.recipe.batch.model_copy(update={"global_batch": batch})
        return replace(cell, recipe=cell.recipe.model_copy(update={"batch": sizes}))

    return every(change, group)


@pytest.mark.parametrize(
    ("batch", "expected"), [(32, [32]), (64, [32, 96]), (96, [96]), (512, [384]), (8, [32])]
)
def test_the_nearest_batches_on_either_side_are_chosen(
    group: Group, batch: int, expected: list[int]
) -> None:
    groups = [of_batch(group, size) for size in (384, 32, 96)]
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
def test_a_data_set_is_what_begins_the_name_of_a_recipe(
    group: Group, recipe: str, dataset: str, expected: bool
) -> None:
    named = every(
        lambda cell: replace(cell, recipe=cell.recipe.model_copy(update={"name": recipe})), group
    )
    assert is_of(named, dataset) is expected


def test_what_nothing_was_measured_of_is_refused_with_what_there_is(group: Group) -> None:
    with pytest.raises(StudyError, match=r"no study of digits, vgg: the database has digits-96, l"):
        choose([group], dataset="digits", model="vgg")
    assert choose([group], dataset="digits", model="lenet5", optimizer="lars") == [group]
