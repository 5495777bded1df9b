"""`plan --calibrate`: what is measured here, and the cluster file that holds it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from largebatch import load_recipe
from largebatch.cli.main import DONE, USER, main
from largebatch.errors import LargebatchError
from largebatch.lab.measure import calibrate
from largebatch.lab.measure.calibrate import fit_line
from largebatch.lab.planner.cluster import load_cluster
from largebatch.models import build


def test_a_line_is_fitted_by_relative_errors() -> None:
    """Against numpy's least squares of (slope x + start) / y = 1."""
    times = {4: 0.031, 8: 0.049, 16: 0.088, 64: 0.33}
    sizes, seconds = np.array(list(times)), np.array(list(times.values()))
    rows = np.stack([sizes / seconds, 1 / seconds], axis=1)
    expected, *_ = np.linalg.lstsq(rows, np.ones(4), rcond=None)
    assert fit_line(times) == pytest.approx(tuple(expected), rel=1e-9)


def test_nothing_takes_less_than_no_time() -> None:
    """The line through the origin that is nearest by relative errors."""
    times = {1: 0.5, 2: 1.9, 4: 4.4}
    parts = [size / seconds for size, seconds in times.items()]
    slope, start = fit_line(times)
    assert start == 0
    assert slope == pytest.approx(sum(parts) / sum(part**2 for part in parts))


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(LargebatchError, match="larger sizes"):
        fit_line({2: 0.028, 4: 0.027, 8: 0.025})


def test_one_worker_is_measured_and_its_file_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {size: 1e-4 + size / 2e9 for size in calibrate.SIZES}
    monkeypatch.setattr(calibrate, "_exchanging", lambda: link)
    monkeypatch.setattr(calibrate, "ROUNDS", 2)
    monkeypatch.setattr(calibrate, "READ_SECONDS", 0.01)
    file, threads = tmp_path / "here.yaml", torch.get_num_threads()
    words = ["plan", "digits_96", "--calibrate", "--out", str(file)]
    assert main(words) == DONE
    assert torch.get_num_threads() == threads
    assert f"cluster file: {file}" in capsys.readouterr().out

    found = load_cluster(str(file)).measured
    assert found is not None
    assert found.exchange_seconds == pytest.approx(1e-4)
    assert found.exchange_gigabytes_per_second == pytest.approx(2)
    recipe = load_recipe("digits_96")
    model = build(recipe.model.name, num_classes=10, arguments=recipe.model.arguments)
    assert found.gradient_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    norms = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert found.norm_layers == len(norms) > 0
    assert 1e-6 < found.seconds_per_image < 1
    assert found.images_per_second_read > 1

    assert main(["plan", "digits_96", "--cluster", str(file), "--workers", "2"]) == DONE
    assert "limited by" in capsys.readouterr().out
    assert main(words) == USER  # it is not overwritten
    assert "exists" in capsys.readouterr().err
    assert main(["plan", "cifar10_resnet8_128", "--cluster", str(file)]) == USER
    assert main(["plan", "digits_96", "--set", "optimizer={kind: muon}", *words[2:]]) == USER
    assert "optimizer.kind" in capsys.readouterr().err


def test_a_file_that_cannot_be_made_is_found_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.yaml"
    file.touch()
    monkeypatch.setattr(calibrate, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(LargebatchError, match="exists"):
        calibrate.calibrate(load_recipe("digits_96"), file)
    assert file.exists()
    for unwritable in (tmp_path / f"{'a' * 300}.yaml", Path("/proc/here.yaml")):
        with pytest.raises(LargebatchError, match="cannot be written"):
            calibrate.calibrate(load_recipe("digits_96"), unwritable)


@pytest.mark.long
def test_the_link_between_two_workers_is_measured() -> None:
    times = calibrate._exchanging()
    assert list(times) == list(calibrate.SIZES)
    latency, largest = times[calibrate.SIZES[0]], times[calibrate.SIZES[-1]]
    assert 1e-6 < latency < largest < 10
