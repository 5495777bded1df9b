"""Transfer and resources of settings, held against NumPy, SciPy and by hand."""

from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats

from largebatch import load_recipe
from largebatch.lab.studies.comparison import best_setting, draw, lost, transfer_matrix
from largebatch.lab.studies.trained import CellResults, Result, TrainedCell
from largebatch.report.pages import Table

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


def run(seed: int, top1: float, *, seconds: float) -> Result:
    usage = {
        "train_seconds": seconds, "cpu_seconds": 1.5 * seconds, "cores": 1.5,
        "peak_memory_bytes": 4e8,
    }  # fmt: skip
    return Result(seed=seed, top1=top1, usage=usage, images_per_second=600 * 96 / seconds)


def test_the_page_has_costs_and_transfer() -> None:
    """The large batch is faster, and for letters less accurate."""
    recipe = load_recipe("digits_96")
    cells = [
        CellResults(
            cell=TrainedCell(
                configuration=name, variant=setting, recipe=recipe, seeds=3, own_process=True
            ),
            seeds=tuple(run(seed, top1 + seed / 1000, seconds=seconds) for seed in (1, 2, 3)),
        )
        for name, setting, top1, seconds in (
            ("digits", "small", 0.8, 50.0), ("digits", "large", 0.9, 20.0),
            ("letters", "small", 0.7, 40.0), ("letters", "large", 0.6, 30.0),
        )
    ]  # fmt: skip
    page = draw("by-hand", cells)
    (table,), *_, matrices = (section.parts for section in page.sections)
    assert isinstance(table, Table)
    found = {column.title: list(column.values) for column in table.columns}
    assert found["Setting"] == ["small", "large"] * 2
    assert found["Training, s"] == pytest.approx([50.0, 20.0, 40.0, 30.0])
    assert found["Peak memory, MB"] == pytest.approx([400.0] * 4)
    top1 = matrices[0]
    assert isinstance(top1, Table)
    assert top1.columns[2].title.startswith("used on letters")
    assert top1.columns[2].values == pytest.approx([60.2, 70.2])
    assert "on letters that of digits is −10.00 (−10.00 to −10.00)" in page.findings[0]
    assert "<svg" in page.html()
