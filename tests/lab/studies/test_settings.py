"""Transfer, correlations and resources of settings, held against NumPy, SciPy and by hand."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import FakeRun
from scipy import stats

from largebatch import load_recipe
from largebatch.lab.studies.settings import (
    Findings,
    best_setting,
    correlation,
    correlations,
    describe,
    lost,
    make_page,
    transfer_matrix,
)
from largebatch.lab.studies.trained import (
    CellResults,
    Result,
    SettingCell,
    Usage,
    usage_of,
)
from largebatch.recipe.recipe import Recipe
from largebatch.report.pages import Table
from largebatch.report.run import read_run
from largebatch.tracking.events import SYSTEM

RECIPES, SETTINGS = ("mnist", "cifar", "svhn"), ("small", "own", "large", "wide")
SEEDS = (1, 2, 3, 4)
BATCHES = (48, 96, 144, 192, 240, 288, 336, 384)
SECONDS = (50.0, 30.0, 20.0, 18.0, 14.0, 13.0, 12.0, 15.0)
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
            assert one.own is not None
            assert one.gap is not None
            assert one.value.mean == pytest.approx(table[b, best[a]].mean())
            assert one.own.mean == pytest.approx(table[b].mean(axis=1).max())
            gaps = table[b, best[a]] - table[b, best[b]]  # seed by seed
            expected = gaps.mean() + np.array([0, -1, 1]) * reach * gaps.std(ddof=1)
            assert one.gap[:3] == pytest.approx(expected, abs=1e-12)
            assert one.share == pytest.approx(one.value.mean / one.own.mean)


def test_of_costs_the_lowest_is_best_and_a_gap_is_a_ratio() -> None:
    table = drawn(seed=9)
    best = table.mean(axis=2).argmin(axis=1)
    for a, row in enumerate(transfer_matrix(by_name(table), higher=False)):
        for b, one in enumerate(row):
            assert one.setting == SETTINGS[best[a]]
            assert one.gap is not None
            ratios = table[b, best[a]] / table[b, best[b]]
            assert one.gap.mean == pytest.approx(stats.gmean(ratios))
            assert one.share <= 1


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
    assert (other.value, other.gap, other.share) == (None, None, 0.0)  # it diverged there
    assert last.setting == "slow"
    ((one,),) = transfer_matrix({"a": {"cached": {1: 0.0, 2: 0.0}}}, higher=False)
    assert (one.gap, one.share) == (None, 1.0)  # a cost of 0 has no ratio


@cache
def recipe(batch: int) -> Recipe:
    changes = [f"batch.global_batch={batch}"]
    return load_recipe("digits_96", ["duration={steps: 600}", "polish=null", *changes])


def run(seed: int, top1: float, *, seconds: float, begun: float = 0.0) -> Result:
    """Return a run of `seconds` seconds, a tenth of which were evaluations."""
    return Result(
        seed=seed, values={}, updates=600, top1=top1, top5=1.0, loss=1.0, seconds=seconds,
        usage=Usage(
            train_seconds=0.9 * seconds, evaluation_seconds=0.1 * seconds,
            cpu_seconds=1.5 * seconds, cores=1.5, peak_memory_bytes=4e8, read_bytes=2e6,
        ),
        images_per_second=600 * 96 / seconds, begun=begun, ended=begun + seconds, other_cores=0.5,
        host="node-7",
    )  # fmt: skip


def cell(name: str, setting: str, seeds: Sequence[Result], *, batch: int = 96) -> CellResults:
    own = SettingCell(configuration=name, variant=setting, recipe=recipe(batch), seeds=len(seeds))
    return CellResults(cell=own, seeds=tuple(seeds))


def findings(*, settings: int) -> Findings:
    """Settings whose training time falls with the batch, but for the last one."""
    both = list(zip(BATCHES, SECONDS, strict=True))[:settings]
    return Findings(
        [
            cell(
                "digits", f"batch-{batch}",
                [run(seed, 0.9, seconds=each + seed / 100) for seed in (1, 2, 3)], batch=batch,
            )
            for batch, each in both
        ]
    )  # fmt: skip


def test_a_correlation_is_that_of_ranks_with_the_interval_of_bonett_and_wright() -> None:
    found = correlation(BATCHES, SECONDS)
    assert found is not None
    assert found.rho == pytest.approx(stats.spearmanr(BATCHES, SECONDS).statistic)
    reach = 1.959964 * math.sqrt((1 + found.rho**2 / 2) / 5)
    assert math.atanh(found.high) - math.atanh(found.rho) == pytest.approx(reach, rel=1e-5)
    assert found.is_sure
    same = correlation(BATCHES, BATCHES)
    exchanged = correlation(BATCHES, [*BATCHES[1::-1], *BATCHES[2:]])
    assert same is not None
    assert exchanged is not None
    assert (same.rho, same.high) == (1, 1)
    assert same.low == pytest.approx(exchanged.low)  # as if one pair of neighbours were exchanged
    assert correlation([1] * 8, SECONDS) is None
    assert correlation([*BATCHES[:4], *[math.nan] * 4], SECONDS) is None


def test_the_batch_correlates_with_training_time() -> None:
    found = correlations(findings(settings=8), "digits")
    assert found["global_batch", "Training time"].rho == pytest.approx(
        stats.spearmanr(BATCHES, SECONDS).statistic
    )
    assert found["Processor time", "Training time"].rho == 1
    assert ("Cores used", "Training time") not in found  # the same in all settings
    assert not correlations(findings(settings=4), "digits")


def columns(table: object) -> dict[str, list[Any]]:
    assert isinstance(table, Table)
    return {column.title: list(column.values) for column in table.columns}


def test_the_page_has_costs_transfer_and_correlations() -> None:
    other = [cell("letters", one.variant, one.seeds, batch=one.recipe.batch.global_batch)
             for one in findings(settings=8).cells]  # fmt: skip
    page = make_page(
        "by-hand", [*findings(settings=8).cells, *other], metrics=("top1", "train_seconds")
    )
    found = columns(page.sections[0].parts[0])
    assert found["Setting"][:2] == ["batch-48", "batch-96"]
    assert found["Training, s"][0] == pytest.approx(0.9 * 50.02)
    assert found["Peak memory, MB"] == pytest.approx([400.0] * 16)
    assert found["global_batch"] == [*BATCHES, *BATCHES]
    _, times = (columns(part) for part in page.sections[1].parts)
    assert times["used on letters"] == pytest.approx([0.9 * 12.02] * 2)
    assert "digits" in columns(page.sections[3].parts[0])
    text = " ".join(describe(Findings(other), ["top1"]))
    assert "batch-336" in text  # the fastest


def test_usage_is_summed_over_records_and_workers(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    seconds = np.repeat(draw.uniform(0.5, 2.0, (5, 1)), 2, axis=1)
    table = {
        "cpu_percent": draw.uniform(50, 200, (5, 2)),
        "peak_memory_bytes": np.sort(draw.uniform(1e8, 9e8, (5, 2)), axis=0),
        "read_bytes_per_second": draw.uniform(0, 1e6, (5, 2)),
        "written_bytes_per_second": draw.uniform(0, 1e6, (5, 2)),
        "gpu_percent": np.full((5, 2), 75.0),
        "seconds": seconds,
    }
    run = FakeRun(tmp_path / "run")
    for step in range(5):
        record = {name: [None, None] for name in SYSTEM}
        record |= {name: list(values[step]) for name, values in table.items()}
        run.records.append({"event": "system", "stage": "train", "step": step, **record})
    found = usage_of(read_run(run.write()))
    cpu = (table["cpu_percent"] * seconds).sum() / 100
    assert found.cpu_seconds == pytest.approx(cpu)
    assert found.cores == pytest.approx(cpu / seconds[:, 0].sum())
    assert found.peak_memory_bytes == table["peak_memory_bytes"][-1].sum()
    assert found.read_bytes == pytest.approx((table["read_bytes_per_second"] * seconds).sum())
    assert found.gpu_percent == pytest.approx(75)
    assert math.isnan(found.gpu_memory_bytes)
