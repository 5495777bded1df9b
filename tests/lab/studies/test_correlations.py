"""Rank correlations of settings with results, held against SciPy."""

import math
from pathlib import Path

import pytest
from scipy import stats
from short_studies import VARIED, a_record, cells_in, undisturbed

from largebatch.lab.studies.comparison import CORRELATED, draw
from largebatch.lab.studies.correlations import correlation, correlations, numbers_of
from largebatch.lab.studies.trained import CellResults, TrainedCell, results_of
from largebatch.report.pages import Table

BATCHES = (48, 96, 144, 192, 240, 288, 336, 384)
SECONDS = (50.0, 30.0, 20.0, 18.0, 14.0, 13.0, 12.0, 15.0)


def test_a_correlation_is_that_of_ranks_with_the_interval_of_bonett_and_wright() -> None:
    found = correlation(BATCHES, SECONDS)
    assert found is not None
    assert found.rho == pytest.approx(stats.spearmanr(BATCHES, SECONDS).statistic)
    reach = 1.959964 * math.sqrt((1 + found.rho**2 / 2) / 5)
    assert math.atanh(found.high) - math.atanh(found.rho) == pytest.approx(reach, rel=1e-5)
    assert found.is_sure
    of_ten = correlation(BATCHES, SECONDS, together=10)
    assert of_ten is not None
    wider = 2.807034 / 1.959964  # the normal quantiles of 1 - 0.05 / 20 and 1 - 0.05 / 2
    assert math.atanh(of_ten.high) - math.atanh(found.rho) == pytest.approx(wider * reach, rel=1e-5)


def test_equal_orders_have_the_interval_of_one_exchanged_pair() -> None:
    same = correlation(BATCHES, BATCHES)
    exchanged = correlation(BATCHES, [*BATCHES[1::-1], *BATCHES[2:]])
    assert same is not None
    assert exchanged is not None
    assert same.rho == same.high == pytest.approx(1)
    assert same.low == pytest.approx(exchanged.low)


def test_constants_and_few_numbers_have_no_correlation() -> None:
    assert correlation([1] * 8, SECONDS) is None
    assert correlation([*BATCHES[:4], *[math.nan] * 4], SECONDS) is None


def measured(folder: Path, number: int, *, diverged: int | None = None) -> list[CellResults]:
    """Return the results of settings with these batches and seconds; one may have diverged."""
    settings = {
        f"batch-{batch}": {"set": {"batch.global_batch": batch, "execution.cache": "none"}}
        for batch in BATCHES[:number]
    }
    cells = cells_in(folder, VARIED, settings=settings, seeds=3)
    results = []
    for place, cell in enumerate(cells):
        assert isinstance(cell, TrainedCell)
        usage = {
            "train_seconds": SECONDS[place],
            "cpu_seconds": 2 * SECONDS[place],
            "read_bytes": 1e6 * (place % 3),
        }
        records = {
            slot.name: {
                **a_record(0.5 + place / 100, seed=slot.seed),
                **undisturbed(slot.seed, cell=cell.name, place=3 * place + slot.seed),
                "usage": usage,
                "diverged": "the loss is infinite" if place == diverged else None,
            }
            for slot in cell.slots
        }
        results.append(results_of(cell, records))
    return results


def test_the_batch_correlates_with_the_training_time(tmp_path: Path) -> None:
    found = correlations(measured(tmp_path, 8), CORRELATED)
    expected = stats.spearmanr(BATCHES, SECONDS).statistic
    assert found["batch.global_batch", "Training time"].rho == pytest.approx(expected)
    assert found["Training time", "Processor time"].rho == pytest.approx(1)
    assert ("batch.global_batch", "Read from disk") in found
    assert ("batch.global_batch", "Cores used") not in found  # not measured
    assert not correlations(measured(tmp_path, 4), CORRELATED)


def test_only_what_is_a_number_in_every_setting_counts(tmp_path: Path) -> None:
    sgd = {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.001, "nesterov": False}
    settings = {
        "own": {"set": {"batch.global_batch": 48}},
        "sgd": {"set": {"batch.global_batch": 96, "optimizer": sgd}},
        "no warmup": {"set": {"batch.global_batch": 144, "schedule.warmup": None}},
    }
    named = {name.replace(" ", "-"): setting for name, setting in settings.items()}
    cells = cells_in(tmp_path, VARIED, settings=named)
    results = [CellResults(cell=cell) for cell in cells if isinstance(cell, TrainedCell)]
    found = numbers_of(results)
    assert found["batch.global_batch"] == [48, 96, 144]
    assert "optimizer.weight_decay" in found
    # Those of one setting only, one that is no number, and one below a section that is null.
    absent = {"optimizer.eta", "optimizer.kind", "optimizer.nesterov", "schedule.warmup.steps"}
    assert not absent & found.keys()


def test_a_setting_that_diverged_is_left_out(tmp_path: Path) -> None:
    found = correlations(measured(tmp_path, 8, diverged=3), CORRELATED)
    assert {each.number for each in found.values()} == {7}


def test_the_page_has_the_correlations_and_the_bytes_read_from_disks(tmp_path: Path) -> None:
    page = draw("tiny", measured(tmp_path, 8))
    (section,) = [section for section in page.sections if section.title == "Correlations"]
    (table,) = section.parts
    assert isinstance(table, Table)
    columns = {column.title: column for column in table.columns}
    rows = list(columns["digits"].values)
    place = rows.index("batch.global_batch")
    expected = stats.spearmanr(BATCHES, SECONDS).statistic
    assert columns["Training time"].values[place] == pytest.approx(expected)
    assert " to " in columns["Training time"].details[place]
    of_accuracy, of_time = [text for text in page.findings if "rank correlations" in text]
    assert "batch.global_batch with Top-1 +1.00" in of_accuracy
    assert "batch.global_batch with Training time" not in of_time  # the interval holds 0
    settings = page.sections[0].parts[0]
    assert isinstance(settings, Table)
    reads = next(column for column in settings.columns if column.title == "Read from disk, MB")
    assert list(reads.values) == pytest.approx([0, 1, 2, 0, 1, 2, 0, 1])
