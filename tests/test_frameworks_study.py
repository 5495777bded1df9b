"""The loops and results of benchmarks/frameworks.py, and the runs of learning_rates_shapes.py."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import frameworks_loops as loops  # noqa: E402
from configurations import table  # noqa: E402
from defaults import finite  # noqa: E402
from frameworks import FRAMEWORKS, settings_for, summary  # noqa: E402
from learning_rates import CONFIGURATIONS, policies  # noqa: E402
from learning_rates_shapes import SHAPES, Change, recipe_of, runs_of, schedule_of  # noqa: E402
from learning_rates_shapes_tables import areas_of, scales_of, shapes_of  # noqa: E402
from schedules_of import schedule_of as rates_of  # noqa: E402

from largebatch.studies.metrics import Interval  # noqa: E402

EPOCHS = 4


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


def test_changed_shapes_and_rates_can_be_planned() -> None:
    (one,) = (it for it in CONFIGURATIONS if it.key == "digits, large, sgd")
    found = {name: {"rate": 0.02} for name in policies(peak=1, epochs=1, steps=1)}
    bounds = {"lower": {"value": 0.001}, "upper": {"value": 0.01}}
    asked = list(runs_of(one, found, bounds))
    assert len(asked) == 5 * sum(map(len, SHAPES.values())) + 6 * 4 * 3 + 3 * 5
    assert len({(it.group, it.policy, it.what, it.seed) for it in asked}) == len(asked)
    for it in asked:
        if it.seed == 1:
            recipe = recipe_of(one, {"schedule": json.loads(it.schedule)})
            assert rates_of(recipe)(30) > 0
    own = schedule_of(one, "tri", 0.02)
    longer = Change("half_cycle.epochs", 2).of(own["decay"])
    assert longer["half_cycle"]["epochs"] == 2 * own["decay"]["half_cycle"]["epochs"]
    assert longer["low_lr"] == own["decay"]["low_lr"]


def test_robustness_and_shapes_are_paired_by_seed() -> None:
    cell = {"seeds": [{"seed": seed, "top1": 0.9 + seed / 100} for seed in (1, 2, 3)]}
    runs = {("scales", "fix", f"{factor:g}"): {1: 0.5, 2: 0.7} for factor in (0.25, 0.5, 2.0, 4.0)}
    scales = scales_of({"fix": cell}, runs, "fix")
    assert list(scales) == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert scales[1.0] == {1: 0.91, 2: 0.92}
    # the trapezoids: 1.5 of 4 octaves at 0.5, the others half way to 0.91
    assert areas_of(scales)[1] == pytest.approx((0.5 + 0.705 + 0.705 + 0.5) / 4)
    changed = {("shapes", "fix", "gamma x 2"): {1: 0.93, 2: 0.94, 3: 0.95}}
    points = shapes_of({"fix": cell}, changed)["fix", "gamma x 2"]
    assert isinstance(points, Interval)
    assert points.mean == pytest.approx(2)
    changed["shapes", "fix", "gamma x 2"][2] = 0.1
    assert shapes_of({"fix": cell}, changed)["fix", "gamma x 2"] == 1  # seed that diverged


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
