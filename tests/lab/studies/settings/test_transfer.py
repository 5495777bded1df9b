"""The transfer matrix, held against NumPy by hand."""

import numpy as np
import pytest
from scipy import stats

from largebatch.lab.studies.settings.transfer import Values, best_setting, lost, transfer_matrix

RECIPES, SETTINGS = ("mnist", "cifar", "svhn"), ("small", "own", "large", "wide")
SEEDS = (1, 2, 3, 4)


def drawn(
    seed: int = 5, *, low: float = 0.5
) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
    """Values by recipe, setting and seed; which setting is best differs from recipe to recipe."""
    draw = np.random.default_rng(seed)
    means = draw.uniform(low, 0.9, (len(RECIPES), len(SETTINGS), 1))
    return np.asarray(means + draw.normal(0, 0.01, (len(RECIPES), len(SETTINGS), len(SEEDS))))


def by_name(table: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]) -> Values:
    return {
        recipe: {
            setting: dict(zip(SEEDS, map(float, table[i, j]), strict=True))
            for j, setting in enumerate(SETTINGS)
        }
        for i, recipe in enumerate(RECIPES)
    }


def test_a_cell_is_what_the_column_has_with_the_best_setting_of_the_row() -> None:
    table = drawn()
    best = table.mean(axis=2).argmax(axis=1)
    assert len(set(best)) > 1
    level = 1 - 0.025 / (len(SETTINGS) - 1)  # the own best one against all others
    reach = stats.t.ppf(level, len(SEEDS) - 1) / np.sqrt(len(SEEDS))
    matrix = transfer_matrix(by_name(table), higher=True)
    for a in range(len(RECIPES)):
        for b in range(len(RECIPES)):
            one = matrix[a][b]
            assert (one.best_of, one.used_on) == (RECIPES[a], RECIPES[b])
            assert one.setting == SETTINGS[best[a]]
            assert one.value is not None
            assert one.own is not None
            assert one.gap is not None
            assert one.value.mean == pytest.approx(table[b, best[a]].mean())
            assert one.own.mean == pytest.approx(table[b].mean(axis=1).max())
            gaps = table[b, best[a]] - table[b, best[b]]  # seed by seed
            expected = gaps.mean() + np.array([0, -1, 1]) * reach * gaps.std(ddof=1)
            assert one.gap[:3] == pytest.approx(expected, abs=1e-12)
            assert one.share == pytest.approx(one.value.mean / one.own.mean)
            assert (a == b) <= (one.gap[:3] == (0, 0, 0))


def test_of_costs_the_lowest_is_best_and_a_gap_is_how_many_times_as_much() -> None:
    table = drawn(seed=9)
    best = table.mean(axis=2).argmin(axis=1)
    matrix = transfer_matrix(by_name(table), higher=False)
    for a in range(len(RECIPES)):
        for b in range(len(RECIPES)):
            one = matrix[a][b]
            assert one.setting == SETTINGS[best[a]]
            assert one.gap is not None
            ratios = table[b, best[a]] / table[b, best[b]]
            assert one.gap.mean == pytest.approx(stats.gmean(ratios))
            assert one.share <= 1


def test_what_is_lost_is_beyond_the_noise_of_seeds() -> None:
    table = drawn()
    best = table.mean(axis=2).argmax(axis=1)
    named = [
        (one.best_of, one.used_on)
        for one in lost(transfer_matrix(by_name(table), higher=True), higher=True)
    ]
    expected = [
        (RECIPES[a], RECIPES[b])
        for a in range(len(RECIPES))
        for b in range(len(RECIPES))
        if best[a] != best[b]
        and stats.ttest_rel(table[b, best[a]], table[b, best[b]]).pvalue < 0.05
    ]
    assert named == expected != []
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
    assert (other.value, other.gap, other.share) == (None, None, 0.0)  # it diverged there
    assert last.setting == "slow"


def test_a_cost_of_nothing_has_no_ratio() -> None:
    ((one,),) = transfer_matrix({"a": {"cached": {1: 0.0, 2: 0.0}}}, higher=False)
    assert (one.gap, one.share) == (None, 1.0)
