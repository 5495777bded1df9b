"""The study of local steps, benchmarks/local_steps.py: equal bytes, its search and differences."""

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import local_steps as study  # noqa: E402

from largebatch.recipe.protocols import LocalSteps  # noqa: E402

Options = argparse.Namespace


def options(work: Path) -> Options:
    return argparse.Namespace(work=work, epochs=1, seeds=2)


@pytest.fixture
def two_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start half as many processes as the study."""
    monkeypatch.setattr(study, "LEARNERS", 2)


@pytest.mark.parametrize("arm", study.ARMS, ids=lambda arm: arm.name)
def test_learners_send_once_in_so_many_samples(arm: study.Arm) -> None:
    recipe = arm.recipe(0.01, seed=1, epochs=1)
    assert recipe.protocol is not None
    samples = recipe.protocol.mini_batch(recipe.batch.global_batch)
    steps = recipe.protocol.steps if isinstance(recipe.protocol, LocalSteps) else 1
    assert samples * steps == study.MU * arm.interval


@pytest.mark.usefixtures("two_learners")
def test_real_learners_send_as_much_by_local_steps_as_by_hardsync(tmp_path: Path) -> None:
    sent = {}
    for name in (study.LOCAL, "hardsync"):
        found = study.carry_out(study.Arm(name, 4), 0.01, seed=1, args=options(tmp_path))
        sent[name] = found["sent"] / found["samples"]
    samples = study.LEARNERS * study.MU * 4
    for each in sent.values():  # the last average comes after fewer updates
        assert each == pytest.approx(1 / samples, rel=1 / 11)


@pytest.mark.usefixtures("two_learners")
def test_a_run_that_diverges_is_as_good_as_chance_and_is_not_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        found = study.carry_out(study.Arm("hardsync", 1), 1e6, seed=1, args=options(tmp_path))
        assert found["top1"] == 0.1
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_differences_are_those_of_arms_that_send_as_much() -> None:
    def record(arm: study.Arm, seed: int) -> dict[str, Any]:
        top1 = 0.8 + 0.01 * (seed % 2) + 0.05 * (arm.protocol == study.LOCAL)
        return {"arm": arm.name, "rate": 0.04, "seed": seed, "top1": top1, "sent": 3.0}

    records = [record(*each) for each in product(study.ARMS, (1, 2, 3, study.SEARCH_SEEDS[0]))]
    found = study.result(records)
    assert len(found["differences"]) == 6
    for each in found["differences"].values():
        assert each["mean"] == pytest.approx(5)
        assert each["number"] == 3
    assert len(found["search"]) == len(study.ARMS)
    assert not study.result(records[:-8])["differences"]

    for each in study.result(records[:-2])["differences"].values():
        assert each["number"] == 2, "one arm has two seeds"
    failed = next(one for one in records if one["arm"] == "hardsync, H = 16")
    failed["top1"] = 0.1
    names = study.result(records)["differences"]
    assert len(names) == 5
    assert "local steps, H = 16, less hardsync" not in names


def test_the_search_is_judged_on_held_out_training_images() -> None:
    arm = study.ARMS[0]
    trial = arm.recipe(0.01, seed=study.SEARCH_SEEDS[0], epochs=1)
    assert trial.data.held_out is not None
    assert trial.data.held_out.samples == study.HELD_OUT
    assert arm.recipe(0.01, seed=1, epochs=1).data.held_out is None
