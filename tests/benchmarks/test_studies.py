"""Tables and figures of the frozen studies, the recipes of their runs, and a short soak."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from scipy.stats import ttest_1samp

from benchmarks.speed.measuring import RESULTS, ROOT, newest
from benchmarks.studies import images, pages
from benchmarks.studies.accuracies import read
from benchmarks.studies.audit import accuracy_fell
from benchmarks.studies.augmentation import tables as augmentation
from benchmarks.studies.averaged_weights import tables as averaged_weights
from benchmarks.studies.figures import save_svg
from benchmarks.studies.learning_rates import tables as learning_rates
from benchmarks.studies.optimizers import tables as optimizers
from benchmarks.studies.order import tables as order
from benchmarks.studies.polishing import tables as polishing
from benchmarks.studies.polishing_gpu import tables as polishing_gpu
from benchmarks.studies.recipes import tables as recipes
from benchmarks.studies.staleness import tables as staleness
from largebatch.lab.studies.study import load_study
from largebatch.lab.studies.trained import cells_of


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
            partial(averaged_weights.draw, study=result("averaged_weights")), (480, 640),
            id="averaged weights",
        ),
        pytest.param(
            partial(optimizers.draw, study=optimizers.Study(result("optimizers"))), (560, 900),
            id="optimizers",
        ),
        pytest.param(
            partial(accuracy_fell.draw, loops=result("accuracy_fell")["loops"]), (520, 700),
            id="accuracy fell",
        ),
        *(pytest.param(*one, id=name) for name, one in pages.figures().items()),
    ],
)  # fmt: skip
def test_a_figure_is_drawn_from_the_results(
    draw_it: Any,  # noqa: ANN401 -- a partial function
    size: tuple[int, int],
    tmp_path: Path,
) -> None:
    save_svg(tmp_path / "figure.svg", draw_it, size=size)
    svg = ET.parse(tmp_path / "figure.svg").getroot()
    assert len(list(svg.iter())) > 100
    assert "prefers-color-scheme:dark" in (svg[0].text or "")


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


def test_the_study_on_a_gpu_compares_the_ends_of_each_recipe_by_seed(tmp_path: Path) -> None:
    study = load_study(Path(polishing_gpu.__file__).with_name("study.yaml"))
    cells = cells_of(study, tmp_path)
    assert len(cells) * study.seeds == 9 * 3 * 20
    for cell in cells[:3]:
        assert {setting for setting, _ in polishing_gpu.ENDS.values()} >= {cell.variant}
        for seed in (1, 2, 3):
            ends = [{"top1": 0.80 + seed / 100}, {"top1": 0.80 + seed / 50}]
            diverged = seed == 3 and cell.variant == "affine"
            record = {"seed": seed, "top1": 0.1, "diverged": diverged, "evaluations": ends}
            path = tmp_path / cell.name / f"seed-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record))
    rows = {row["end"]: row for row in polishing_gpu.rows(polishing_gpu.read(tmp_path))}
    assert rows["as trained"]["top1"].mean == pytest.approx(82)
    assert rows["as trained"]["gain"] is None
    assert rows["clean"]["gain"].mean == pytest.approx(0)
    low, high = ttest_1samp([1.0, 2.0, 3.0], 0).confidence_interval(1 - 0.05 / 4)
    for end in ("statistics", "clean, statistics"):
        assert rows[end]["gain"][:3] == pytest.approx((2, low, high))
    assert rows["affine"]["gain"].mean == pytest.approx((1 + 2 - 73) / 3)


def test_the_study_of_augmentation_compares_gains_by_seed(tmp_path: Path) -> None:
    study = load_study(Path(augmentation.__file__).with_name("study.yaml"))
    cells = cells_of(study, tmp_path)
    assert len(cells) * study.seeds == 4 * 8 * 3
    for cell in cells:
        for seed in (1, 2, 3):
            top1 = 0.5 + seed / 100
            if cell.variant.endswith(augmentation.POLISHED):
                top1 += 0.01 if cell.variant.startswith("crops") else 0.01 * seed
            path = tmp_path / cell.name / f"seed-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"seed": seed, "top1": top1}))
    rows = list(augmentation.rows(read(tmp_path)))
    assert len(rows) == 4 * 4
    assert rows[0]["images"] == "crops"
    assert rows[0]["gain"][:3] == pytest.approx((1, 1, 1))
    low, high = ttest_1samp([0.0, 1.0, 2.0], 0).confidence_interval(0.95)
    for row in rows[1:4]:
        assert row["trained"].mean == pytest.approx(52)
        assert row["gain"].mean == pytest.approx(2)
        assert row["more"][:3] == pytest.approx((1, low, high))


def test_the_study_of_orders_compares_with_the_random_one_by_seed(tmp_path: Path) -> None:
    study = load_study(Path(order.__file__).with_name("study.yaml"))
    cells = cells_of(study, tmp_path)
    assert len(cells) * study.seeds == 4 * 3 * 3
    for cell in cells:
        for seed in (1, 2, 3):
            top1 = 0.5 + seed / 100 - (0 if cell.variant == order.BASELINE else 0.01 * seed)
            path = tmp_path / cell.name / f"seed-{seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"seed": seed, "top1": top1}))
    rows = list(order.rows(read(tmp_path)))
    assert len(rows) == 4 * 3
    assert rows[0]["difference"] is None
    low, high = ttest_1samp([-1.0, -2.0, -3.0], 0).confidence_interval(0.95)
    for row in rows[1:3]:
        assert row["top1"].mean == pytest.approx(50)
        assert row["difference"][:3] == pytest.approx((-2, low, high))


@pytest.mark.long
def test_randomly_disturbed_runs_end_like_undisturbed_ones(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.studies.soak.soak"]
    options = ["--faults", "12", "--seed", "3", "--out", str(out)]
    subprocess.run([*command, *options], check=True, timeout=3600, cwd=ROOT)
    result = json.loads(out.read_text())
    assert result["faults"] >= 12
    assert (result["lost"], result["orphans"]) == ([], 0)
    assert 0 < result["effective_training_time_ratio"] < 1


def test_a_folder_of_images_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = np.zeros((20, 4, 4, 3), np.uint8), np.arange(20) % 10
    monkeypatch.setattr(images, "load", lambda _: (split, split))
    with monkeypatch.context() as broken:
        broken.setattr(Image, "fromarray", None)
        with pytest.raises(TypeError):
            images.write_part(tmp_path, "cifar10", train=10, val=5)
    out = images.write_part(tmp_path, "cifar10", train=10, val=5)
    assert len(list(out.rglob("*.png"))) == 15
