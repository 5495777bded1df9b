"""Range tests of real runs: their losses against plain PyTorch, whatever the division."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plain
import pytest
import torch
import torch.nn.functional as F
from crown import EPS, ETA, MOMENTUM, WEIGHT_DECAY
from safetensors.torch import save_file
from torch import nn

from largebatch import load_recipe
from largebatch.cli.main import DONE, USER, main
from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.lab.measure import lr_range
from largebatch.lab.measure.lr_range import (
    Range,
    plan_range,
    train_range,
)
from largebatch.models.networks import LeNet5
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import read_run
from largebatch.runs.options import Options

LENET = ("model={name: lenet5}", "batch={global_batch: 48, bn_span: null}", "polish=null",
         "data.image_size=16", "execution.cache=memory", "loss.label_smoothing=0.1")  # fmt: skip
OPTIMIZERS = {
    "sgd": f"optimizer={{kind: sgd, momentum: {MOMENTUM}, weight_decay: {WEIGHT_DECAY}}}",
    "reference": f"optimizer={{kind: lars, convention: reference, momentum: {MOMENTUM}, "
    f"weight_decay: {WEIGHT_DECAY}, eta: {ETA}, eps: {EPS}}}",
}
RATES = {"sgd": (0.003, 0.03), "reference": (0.1, 1.0)}
STEPS = 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights that no seed of ours draws."""
    path = tmp_path_factory.mktemp("weights") / "lenet5.safetensors"
    torch.manual_seed(7)
    save_file(LeNet5(10).state_dict(), path)
    return path


def a_recipe(kind: str, weights: Path, *changes: str) -> Recipe:
    return load_recipe(
        "digits_96", [*LENET, OPTIMIZERS[kind], f"model.weights={weights}", *changes]
    )


def ranged(recipe: Recipe, kind: str) -> Range:
    low, high = RATES[kind]
    return plan_range(recipe, low=low, high=high, steps=STEPS)


def plain_losses(kind: str, weights: Path) -> list[float]:
    """Train by hand: whole batches on one process, the formula of the optimizer, NumPy's rates."""
    net = nn.Sequential(
        nn.Conv2d(3, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.AdaptiveMaxPool2d(4),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip
    torch.manual_seed(7)
    net.load_state_dict(dict(zip(net.state_dict(), LeNet5(10).state_dict().values(), strict=True)))
    recipe = a_recipe(kind, weights, "duration={steps: 20}", "schedule.warmup=null")
    plan = make_plan(recipe.with_execution(device_batch=48), workers=1)
    pipeline = open_images(recipe, plan, Serial(torch.device("cpu")), folder=None)
    velocity = [torch.zeros_like(weight) for weight in net.parameters()]
    losses = []
    for lr, (images, labels) in zip(
        np.geomspace(*RATES[kind], STEPS),
        pipeline.training(range(STEPS), clean=False),
        strict=True,
    ):
        net.zero_grad()
        loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for weight, v in zip(net.parameters(), velocity, strict=True):
                assert weight.grad is not None
                plain.move(kind, weight, weight.grad, v, lr=float(lr))
    return losses


@pytest.mark.parametrize(
    ("kind", "workers", "device_batch"),
    [
        pytest.param("sgd", 1, 48, marks=pytest.mark.long),
        ("sgd", 1, 16),
        ("reference", 1, 24),
        pytest.param("sgd", 2, 12, marks=pytest.mark.long),
        pytest.param("reference", 2, 24, marks=pytest.mark.long),
    ],
)
def test_the_losses_are_those_of_plain_pytorch_whatever_the_division(
    kind: str, workers: int, device_batch: int, weights: Path, tmp_path: Path
) -> None:  # fmt: skip
    recipe = a_recipe(kind, weights, f"execution.device_batch={device_batch}")
    rates = ranged(recipe, kind)
    test = train_range(rates, Options(out=tmp_path), workers=workers)
    assert test is not None
    found = test.curves[0].losses
    np.testing.assert_allclose(found, plain_losses(kind, weights), rtol=2e-4)
    saved = json.loads((tmp_path / "range.json").read_text())
    assert saved["curves"][0]["losses"] == found.tolist()
    assert (tmp_path / "range.png").exists()


def test_everything_but_the_rate_is_the_recipes() -> None:
    """Its seed, optimizer, batch, span, images, augmentation, loss, precision, reduction."""
    changes = ("reduction.dtype=bf16", "monitor=gradient_norm", "precision=bf16")
    recipe = load_recipe("digits_96", changes)
    (derived,) = plan_range(recipe, low=0.05, high=0.5, steps=41).runs
    differ = {
        name
        for name in Recipe.model_fields
        if getattr(derived, name) != getattr(recipe, name)
    }  # fmt: skip
    assert differ == {"duration", "schedule", "polish", "evaluation"}
    assert make_plan(derived, workers=1).steps == 41
    assert derived.schedule.warmup is None
    assert derived.polish is None


def test_the_range_follows_from_the_recipes_rate_and_momentum() -> None:
    chosen = plan_range(load_recipe("digits_96"), seeds=3)
    assert chosen.rates[[0, -1]] == pytest.approx([0.0005, 50])
    assert (len(chosen.rates), len(chosen.runs)) == (100, 3)
    assert len(plan_range(load_recipe("digits_96", ["optimizer.momentum=0.95"])).rates) == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--low", "1", "--high", "0.1"], "from --low to --high, got 1 and 0.1: give a higher"),
        (["--steps", "50"], "--steps 50 are too few for the rates from 0.0005 to 50 with momentum"),
        (["--set", "batch.bn_span=32", "--workers", "7"], "digits-96: has no range test: "),
        (
            ["--set", "optimizer={kind: schedule-free, statistics_samples: 96}",
             "--set", "schedule.decay={kind: constant}"],
            "optimizer.kind: schedule-free takes a constant rate",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_tested_is_one_line_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["lab", "range", "digits_96", "--out", str(out), *words]) == USER
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_command_finds_bounds_where_the_run_diverges_and_makes_no_run_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command reads what is there; another range, or a run's folder, is refused."""
    sets = (*LENET, "optimizer={kind: sgd, momentum: 0.0}", "schedule.peak_lr=0.1",
            "batch.global_batch=96")  # fmt: skip
    words = ["lab", "range", "digits_96", *(word for s in sets for word in ("--set", s))]
    words += ["--low", "1e-3", "--high", "30", "--steps", "45", "--seeds", "2"]
    words += ["--out", str(tmp_path / "out")]
    assert main(words) == DONE
    first = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "range.json").read_text())
    assert all(curve["diverged"] is not None for curve in found["curves"])
    assert {curve["seed"] for curve in found["curves"]} == {1, 2}
    assert 0.001 < found["lower"]["value"] < found["upper"]["value"]
    assert found["turn"]["high"] < min(curve["diverged"] for curve in found["curves"])
    assert f"figure: {tmp_path / 'out' / 'range.png'}" in first

    monkeypatch.setattr(lr_range, "start", None)  # it is not called
    assert main(words) == DONE
    assert capsys.readouterr().out == first[first.index("bound") :]
    assert main(["20" if word == "30" else word for word in words]) == USER
    assert "another recipe" in capsys.readouterr().err
    words[-1] = str(tmp_path / "out" / "seed-1")
    assert main(words) == USER
    assert "seed-1: holds a run" in capsys.readouterr().err
    assert read_run(tmp_path / "out" / "seed-1").summary.status == "failed"  # type: ignore[union-attr]


def test_a_stop_request_starts_no_further_run_of_a_range_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Path] = []

    def stopped(_: object, options: Options) -> SimpleNamespace:
        started.append(options.out)
        return SimpleNamespace(status="interrupted")

    monkeypatch.setattr(lr_range, "start", stopped)
    assert main(["lab", "range", "digits_96", "--out", str(tmp_path / "out")]) == 75
    assert started == [tmp_path / "out" / "seed-1"]
    assert str(tmp_path / "out") in capsys.readouterr().out
