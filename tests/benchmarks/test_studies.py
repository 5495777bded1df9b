"""Tables and figures of the frozen studies, from their results, and the recipes of their runs."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from benchmarks.speed.measuring import RESULTS, newest
from benchmarks.studies.audit import accuracy_fell
from benchmarks.studies.averaged_weights import tables as averaged_weights
from benchmarks.studies.images import draw
from benchmarks.studies.learning_rates import tables as learning_rates
from benchmarks.studies.optimizers import tables as optimizers
from benchmarks.studies.polishing import run as polishing_run
from benchmarks.studies.polishing import tables as polishing
from benchmarks.studies.recipes import tables as recipes
from benchmarks.studies.staleness import tables as staleness
from largebatch.errors import DivergedError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.report.style import save_png


def result(name: str) -> dict[str, Any]:
    path = newest(name, RESULTS, machine="*")
    assert path is not None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_the_tables_of_polishing_are_those_that_its_run_wrote() -> None:
    study = result("polishing_study")
    found = polishing.tables(study["cells"])
    for name in ("polishing", "batches"):
        assert len(found[name]) == len(study[name]) > 10
        for row, written in zip(found[name], study[name], strict=True):
            for key in ("top1", "difference"):
                assert row[key] == pytest.approx(written[key], nan_ok=True)


def test_an_interval_is_that_of_a_t_test() -> None:
    values = [1.3, 0.2, 2.4, 1.1, 0.9]
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    found = polishing.student(values)
    assert (found["low"], found["high"]) == pytest.approx((expected.low, expected.high))
    assert found["mean"] == pytest.approx(1.18)


@pytest.mark.parametrize(
    ("draw_it", "size"),
    [
        pytest.param(
            partial(averaged_weights.draw, study=result("averaged_weights")), (900, 330),
            id="averaged weights",
        ),
        pytest.param(
            partial(optimizers.draw, study=optimizers.Study(result("optimizers"))), (1200, 430),
            id="optimizers",
        ),
        pytest.param(
            partial(accuracy_fell.draw, loops=result("accuracy_fell")["loops"]), (900, 430),
            id="accuracy fell",
        ),
    ],
)  # fmt: skip
def test_a_figure_is_drawn_from_the_results(
    draw_it: Any,  # noqa: ANN401 -- a partial function
    size: tuple[int, int],
    tmp_path: Path,
) -> None:
    save_png(tmp_path / "figure.png", draw_it, size=size, pixels=size[0])
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_tables_of_every_study_are_printed() -> None:
    lines = list(averaged_weights.tables(result("averaged_weights")))
    assert len(lines) > 40
    lines = list(optimizers.tables(optimizers.Study(result("optimizers"))))
    assert sum(line.startswith("| Muon | ") for line in lines) == 13
    assert len(list(recipes.answers(recipes.read()))) == 31
    assert len(list(accuracy_fell.table(result("accuracy_fell")["loops"]))) == 8


def test_the_tables_of_staleness_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    staleness.main()
    assert "| sgd-usual-sigma30-mu4-lambda30-staleness | 57.21 (" in capsys.readouterr().out


def test_the_best_and_the_worst_policy_are_those_of_the_results() -> None:
    found = learning_rates.read()
    lines = list(learning_rates.summary(found))
    assert "| cifar10, large, sgd | 80 | 43.34 | cosine, 45.83 | warmup-fix, 38.49 |" in lines
    assert len(lines) == 2 + len(found)
    (name, one), *_ = found.items()
    assert "| fix | 0.02 | 98.28 (97.83 to 98.73) |" in learning_rates.policies_of(name, one)


def test_the_critical_batch_is_where_a_fifth_more_epochs_are_needed() -> None:
    epochs = {batch: 3 * (1 + batch / 5000) for batch in (500, 2000, 8000)}
    assert optimizers.critical_batch(epochs) == pytest.approx(1000, rel=1e-3)
    assert optimizers.critical_batch({500: 1.0, 2000: 1.0}) is None
    assert optimizers.epochs_to(0.5, [(1.0, 0.4), (2.0, 0.6), (3.0, 0.45)]) == 1.5
    assert optimizers.epochs_to(0.7, [(1.0, 0.4), (2.0, 0.6)]) is None


def test_both_batches_of_polishing_train_the_same_epochs_with_one_span() -> None:
    every = list(polishing_run.cells(5))
    assert {cell.key for cell in every} == set(result("polishing_study")["cells"])
    for cell in polishing_run.cells(1):
        for way in cell.ways:
            recipe = polishing_run.recipe_of(cell, way)
            plan = make_plan(recipe, workers=1)
            assert plan.train_samples == polishing_run.IMAGES
            assert plan.global_batch == {"large": 480, "small": 15}[cell.batch]
            assert recipe.batch.bn_span == 15
            assert recipe.polish is not None


@dataclass
class Stage:
    name: str
    top1: float
    loss: float = 1.0


@dataclass
class Summary:
    stages: tuple[Stage, ...]
    status: str = "finished"


def test_an_arm_of_polishing_is_named_by_its_last_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(recipe: Any, **_: object) -> Summary:  # noqa: ANN401 -- a recipe
        way = "clean" if recipe.polish.clean else "affine" if recipe.polish.affine else None
        names = [name for name in ("train", way, "statistics") if name]
        return Summary(tuple(Stage(name, 0.1 * at) for at, name in enumerate(names)))

    monkeypatch.setattr(polishing_run, "run", run)
    cell = next(polishing_run.cells(1))
    found = polishing_run.carry_out(cell, tmp_path, tmp_path / "log")["arms"]
    written = result("polishing_study")["cells"][cell.key]["arms"]
    assert set(found) == set(written)
    assert found["control"]["top1"] == 0
    assert found["clean 2"]["top1"] == found["statistics"]["top1"] == 0.1
    assert found["affine + statistics"]["top1"] == 0.2

    def diverges(*_: object, **__: object) -> None:
        raise DivergedError("at update 1")

    monkeypatch.setattr(polishing_run, "run", diverges)
    found = polishing_run.carry_out(cell, tmp_path, tmp_path / "log")["arms"]
    assert found == {"control": {"top1": 0.1, "loss": None}}


def test_parts_of_a_set_are_disjoint_balanced_and_the_first_is_always_the_same() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 400)
    first, second = draw(labels, [40, 20])
    assert not set(first) & set(second)
    assert np.bincount(labels[first]).tolist() == [10] * 4
    assert np.bincount(labels[second]).tolist() == [5] * 4
    assert first.tolist() == draw(labels, [40, 0])[0].tolist()
    with pytest.raises(ValueError, match="same number"):
        draw(labels, [41])


def test_the_rate_of_a_loop_rises_to_its_peak_and_falls_to_zero() -> None:
    rate = accuracy_fell.schedule(2.0, warm_up=4, updates=12)
    assert [rate(update) for update in (0, 3, 4, 8)] == [0.5, 2.0, 2.0, 1.0]


def test_one_process_learns_the_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_fell, "EPOCHS", 3)
    loop = accuracy_fell.Loop("one process", times=1, warm_up=0)
    curves = accuracy_fell.Training(loop, seed=1, workers=1).run()
    assert curves["top1"][-1] > 0.9
    assert curves["loss"][-1] < curves["loss"][0]
