"""Correlations of settings and costs, against SciPy and by hand."""

import math

import pytest
from scipy import stats
from setting_results import cell, run

from largebatch.lab.studies.settings.correlations import (
    correlation,
    correlations,
    describe,
    sections,
)
from largebatch.lab.studies.settings.settings import Findings, find
from largebatch.report.interactive import Table

BATCHES = (48, 96, 144, 192, 240, 288, 336, 384)
SECONDS = (50.0, 30.0, 20.0, 18.0, 14.0, 13.0, 12.0, 15.0)


def findings(*, settings: int) -> Findings:
    """Recipes whose training time falls with the batch, but for the last one."""
    both = list(zip(BATCHES, SECONDS, strict=True))[:settings]
    cells = [
        cell("digits", f"batch-{batch}", [run(seed, 0.9, seconds=each + seed / 100)
                                          for seed in (1, 2, 3)], batch=batch)
        for batch, each in both
    ]  # fmt: skip
    return find(cells, ("top1",))


def test_a_correlation_is_that_of_ranks_with_the_interval_of_bonett_and_wright() -> None:
    found = correlation(BATCHES, SECONDS)
    assert found is not None
    assert found.rho == pytest.approx(stats.spearmanr(BATCHES, SECONDS).statistic)
    reach = 1.959964 * math.sqrt((1 + found.rho**2 / 2) / 5)
    assert math.atanh(found.high) - math.atanh(found.rho) == pytest.approx(reach, rel=1e-5)
    assert found.is_sure
    same = correlation(BATCHES, BATCHES)
    assert same is not None
    assert (same.rho, same.high) == (1, 1)
    one_pair = [*BATCHES[1::-1], *BATCHES[2:]]
    exchanged = correlation(BATCHES, one_pair)
    assert exchanged is not None
    assert same.low == pytest.approx(exchanged.low)  # as if one pair of neighbours were exchanged
    assert correlation([1] * 8, SECONDS) is None
    assert correlation([*BATCHES[:4], *[math.nan] * 4], SECONDS) is None


def test_batch_goes_with_training_time_and_processor_time_with_it() -> None:
    found = correlations(findings(settings=8), 0)
    assert found["global_batch", "Training time"].rho == pytest.approx(
        stats.spearmanr(BATCHES, SECONDS).statistic
    )
    assert found["Processor time", "Training time"].rho == 1
    assert ("Cores used", "Training time") not in found  # the same in all settings
    (words,) = describe(findings(settings=8))
    assert words.startswith("digits: rank correlations over 8 settings: ")
    assert "processor time with training time" in words or "training time with processor" in words
    (section,) = sections(findings(settings=8))
    (table,) = section.parts
    assert isinstance(table, Table)
    assert "Training time" in [column.title for column in table.columns]


def test_few_settings_have_no_correlations() -> None:
    assert not correlations(findings(settings=4), 0)
    assert not list(describe(findings(settings=4)))
    assert not list(sections(findings(settings=4)))
