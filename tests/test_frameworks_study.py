"""The loops and results of benchmarks/frameworks.py, and the runs of learning_rates_shapes.py."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import frameworks_loops as loops  # noqa: E402
from configurations import table  # noqa: E402
from defaults import finite  # noqa: E402
from frameworks import FRAMEWORKS, settings_for, summary  # noqa: E402
from learning_rates import CONFIGURATIONS  # noqa: E402
from learning_rates_shapes import (  # noqa: E402
    BETWEEN,
    BOUNDED,
    FACTORS,
    SCALED,
    SHAPES,
    recipe_of,
    runs_of,
    study_of,
)
from learning_rates_shapes_tables import (  # noqa: E402
    _bounds,
    _draw,
    _scales,
    _shapes,
    changes_of,
    scales_of,
    shapes_of,
)
from schedules_of import schedule_of as rates_of  # noqa: E402

from largebatch.lab.studies.queue.study import load_study  # noqa: E402

EPOCHS = 4
ONE = CONFIGURATIONS[1]


class Counted(nn.Linear):
    """A network that counts its training batches."""

    batches = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        return super().forward(images.flatten(1))


def data() -> loops.Data:
    """Ten images in two classes."""
    torch.manual_seed(0)
    images, labels = torch.randn(10, 1, 2, 2), torch.arange(10) % 2
    return loops.Data(EPOCHS, images, labels, images, labels)


@pytest.mark.parametrize(
    ("loop", "batches"),
    [(loops.train_torch, 3), (loops.train_timm, 2), (loops.train_lightning, 3)],
    ids=["torch", "timm", "lightning"],
)
def test_only_timm_drops_the_last_batch(loop: loops.Loop, batches: int) -> None:
    if loop is loops.train_lightning:
        pytest.importorskip("lightning")
    model = Counted(4, 2)
    before = model.weight.detach().clone()
    loop(model, data(), loops.Setting(4, "sgd", 0.1, decay="steps", at=(0.5,)))
    assert model.batches == batches * EPOCHS
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("decay", ["constant", "steps", "cosine"])
def test_torch_and_timm_have_the_same_rates_but_for_when_steps_fall(
    decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def epoch(model: nn.Module, batches: object, criterion: object, optimizer: object) -> None:
        assert isinstance(optimizer, torch.optim.Optimizer)
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()

    monkeypatch.setattr(loops, "_epoch", epoch)
    at = (0.5,) if decay == "steps" else ()
    setting = loops.Setting(4, "sgd", 0.1, decay=decay, at=at)  # type: ignore[arg-type]
    for loop in (loops.train_torch, loops.train_timm):
        loop(Counted(4, 2), data(), setting)
    ours, theirs = seen[:EPOCHS], seen[EPOCHS:]
    if decay == "steps":  # timm's multistep falls an epoch sooner
        ours = [*ours[1:], ours[-1]]
    assert ours == pytest.approx(theirs, abs=2e-6)  # timm's cosine ends at min_lr


def test_a_summary_exchanges_the_best_settings() -> None:
    top1 = {"torch": 0.9, "timm": 0.8, "lightning": 0.7, "largebatch": 0.6}
    records = [
        {"framework": framework, "setting": setting, "seed": seed, "top1": value + seed / 100
         if (framework, setting) != ("timm", "torch") or (seed != 7 and framework == "timm"
         and seed > 2) else 0.1}
        for framework in FRAMEWORKS
        for setting, value in top1.items()
        for seed in range(1, 8)
    ]  # fmt: skip
    assert top1.keys() == settings_for("digits").keys() == settings_for("cifar10").keys()
    found = summary(records)
    assert found["best settings"] == {"torch": "torch", "timm": "timm", "largebatch": "torch"}
    exchanged = {(it["best of"], it["used on"]): it for it in found["best settings exchanged"]}
    assert len(exchanged) == 6
    failed = exchanged["torch", "timm"]
    assert (failed["runs that fail"], failed["runs that fail with the own best"]) == (1, 0)
    assert failed["minus the own best"] is None
    lost = exchanged["timm", "torch"]
    assert (lost["setting"], lost["runs that fail"]) == ("timm", 0)
    assert lost["minus the own best"]["mean"] == pytest.approx(-10)
    assert lost["minus the own best"]["number"] == 5
    assert exchanged["torch", "largebatch"]["minus the own best"] is None, "the same setting"
    assert "torch" not in found["frameworks with a setting, best to worst"]
    assert set(found["Lightning minus PyTorch, seed 1"].values()) == {0.0}


def test_a_loop_stops_where_the_loss_is_not_finite() -> None:
    given = replace(data(), train_images=torch.full((10, 1, 2, 2), math.inf))
    for loop in (loops.train_torch, loops.train_timm):
        model = Counted(4, 2)
        with pytest.raises(FloatingPointError):
            loop(model, given, loops.Setting(5, "sgd", 0.1))
        assert model.batches == 2, "at the end of the first epoch"


@pytest.mark.parametrize("key", ["digits, large, sgd", "fashion_mnist, large, sgd"])
def test_changed_shapes_and_rates_can_be_planned(key: str, tmp_path: Path) -> None:
    (one,) = (it for it in CONFIGURATIONS if it.key == key)
    study = study_of(one)
    changes = sum(map(len, SHAPES.values()))
    assert len(study["policies"]) == len({*SHAPES, *BOUNDED}) + changes
    file = tmp_path / "study.yaml"
    file.write_text(json.dumps(study), encoding="utf-8")
    assert len(load_study(file).policies) == len(study["policies"])
    tri, wider = study["policies"]["tri"], study["policies"]["tri-low_lr-x-0.25"]
    assert wider["decay"]["low_lr"] == tri["decay"]["low_lr"] / 4
    assert wider["decay"]["half_cycle"] == tri["decay"]["half_cycle"]

    found = {name: {"rate": 0.02} for name in SCALED}
    bounds = {"lower": {"value": 0.001}, "upper": {"value": 0.01}}
    asked = list(runs_of(one, found, bounds))
    assert len(asked) == len(SCALED) * len(FACTORS) * 5 + len(BOUNDED) * 5
    assert len({(it.group, it.policy, it.what, it.seed) for it in asked}) == len(asked)
    for it in asked:
        if it.seed == 1:
            recipe = recipe_of(one, {"schedule": json.loads(it.schedule)})
            assert rates_of(recipe)(30) > 0


def result() -> dict[str, Any]:
    """A result in which changed shapes gain 2 points and composite loses 10 at low rates."""
    runs = [
        {"group": "scales", "policy": name, "what": f"{factor:g}", "seed": seed, "top1": top1}
        for name in SCALED
        for factor in FACTORS
        for seed in range(1, 6)
        for top1 in [
            0.1
            if factor == 4
            else 0.8 + 0.01 * ((seed * 3) % 4) - 0.1 * (name == "composite" and factor < 1)
        ]
    ] + [
        {"group": "bounds", "policy": name, "what": BETWEEN, "seed": seed, "top1": 0.8 + seed / 500}
        for name in BOUNDED
        for seed in range(1, 6)
    ]
    names = {*SHAPES, *BOUNDED} | {
        f"{name}-{change.name}" for name, changes in SHAPES.items() for change in changes
    }
    shapes = {
        name: {
            "rate": 0.02,
            "seeds": [
                {"seed": seed, "top1": 0.9 + 0.02 * ("-x-" in name) + 0.001 * (seed % 2)}
                for seed in range(1, 6)
            ],
        }
        for name in names
    }
    ends = {"lower": {"value": 0.001}, "upper": {"value": 0.01}}
    return {"runs": runs, "shapes": shapes, "range": ends}


def test_robustness_and_shapes_are_paired_by_seed() -> None:
    found = result()
    scales = scales_of(found)
    assert list(scales) == list(SCALED)
    assert changes_of(scales["composite"], 0.25)[1] == pytest.approx(-0.1)
    assert changes_of(scales["composite"], 4) == {}
    fix, *_, composite = (
        line for line in _scales(ONE, found) if line.startswith(("| fix", "| comp"))
    )
    same = "+0.0 (+0.0 to +0.0)"
    assert f"| 81.8 | 81.8 | 81.8 | 81.8 | 81.8 | fails | +0.0 |  | {same} |" in fix
    fallen = "| 71.8 | 71.8 | 81.8 | 81.8 | 81.8 | fails | -10.0 | -10.0 (-10.0 to -10.0)"
    assert f"{fallen} | {same} |" in composite
    shapes = {(it.policy, it.change): it for it in shapes_of(found)}
    assert len(shapes) == 14
    gained = shapes["step", "gamma-x-0.85"]
    assert gained.fails == 0
    assert gained.points is not None
    assert gained.points.mean == pytest.approx(2)
    found["shapes"]["step-gamma-x-0.85"]["seeds"][1]["top1"] = 0.1
    failed = {(it.policy, it.change): it for it in shapes_of(found)}["step", "gamma-x-0.85"]
    assert (failed.fails, failed.points) == (1, None)
    for one in found["runs"]:
        if (one["policy"], one["what"], one["seed"]) == ("tri", "0.25", 3):
            one["top1"] = 0.1
    assert changes_of(scales_of(found)["tri"], 0.25) == {}
    assert sum("| tri |" in line and "fails |  |" in line for line in _scales(ONE, found)) == 1


def test_every_table_of_shapes_is_printed_and_drawn(tmp_path: Path) -> None:
    found = result()
    assert any("surely |" in line for line in _shapes(ONE, found))
    assert any(line.startswith("| tri | 80.6 | 90.1 | -9.46") for line in _bounds(ONE, found))
    found["shapes"]["tri"]["seeds"][1]["top1"] = 0.1
    assert any("| a seed fails |" in line for line in _bounds(ONE, found))
    _draw(tmp_path / "figure.png", {ONE: found})
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_table_of_configurations_has_ratios_and_sure_correlations() -> None:
    run = {"seed": 1, "top1": 0.9, "images_per_second": 1234.0}
    times = {
        key: {"mean": 2.0, "low": 1.5, "high": 2.5, "number": 3}
        for key in ("train_seconds", "cpu_seconds", "cores", "peak_memory_bytes")
    }
    sure = {"rho": 0.9, "low": 0.5, "high": 0.99, "number": 13}
    result = {
        "usage": {"lenet5": {"own": [run]}},
        "times those of own": {"lenet5": {"own": times}},
        "rank correlations": {"lenet5": {"a, b": sure, "a, c": {**sure, "low": -0.1}}},
    }
    *_, row, correlation = table(result)
    assert row.startswith("| lenet5 | own | 90.00 | 1,234 | 2.00 (1.50 to 2.50) |")
    assert correlation == "lenet5: a, b: +0.90 (+0.50 to +0.99, 13 settings)"
    assert finite(float("nan")) is None
