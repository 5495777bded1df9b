"""What more workers than cores take longer than their turns."""

import pytest

from largebatch import load_recipe
from largebatch.lab.measure import oversubscription as module
from largebatch.lab.measure.oversubscription import oversubscription
from largebatch.lab.planner.cluster import Cluster, Measured
from largebatch.lab.planner.limits import settings
from largebatch.lab.planner.prediction import predict
from largebatch.recipe.recipe import Recipe

DIGITS = load_recipe("digits_96")
FOUND = Measured(
    model=DIGITS.model.name,
    arguments=DIGITS.model.arguments,
    classes=10,
    image_size=32,
    precision="fp32",
    settings=settings(DIGITS),
    device="cpu",
    seconds_per_image=1e-3,
    seconds_per_pass=2e-3,
    seconds_per_update=3e-3,
    gradient_bytes=1e6,
    reduction="fp32",
    groups=DIGITS.execution.groups.model_dump(mode="json"),
    messages=3,
    norm_layers=0,
    exchange_seconds=1e-4,
    exchange_gigabytes_per_second=1.0,
    images_per_second_read=2000.0,
)
TURNS = 2 * (24e-3 + 2e-3 + 3e-3 + 2 * 3e-4 + 1.5e-3)
"""Seconds of an update of four workers on two cores, without reading."""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has two cores."""
    monkeypatch.setattr(module, "available_cores", lambda: 2)


def test_it_is_what_an_update_takes_over_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def seconds(_: Recipe, workers: int) -> float:
        seen.append(workers)
        return 1.3 * TURNS

    monkeypatch.setattr(module, "seconds_per_update", seconds)
    ratio = oversubscription(DIGITS, FOUND)
    assert seen == [4]
    assert ratio == pytest.approx(1.3)
    measured = FOUND.model_copy(update={"oversubscription": ratio})
    here = Cluster(measured=measured, gpus_per_node=2, nodes=1, cpu_cores=2)
    step = predict(DIGITS, here, workers=4).step
    assert sum(step.values()) - step["input"] == pytest.approx(1.3 * TURNS)


def test_turns_that_take_no_longer_count_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "seconds_per_update", lambda *_: 0.5 * TURNS)
    assert oversubscription(DIGITS, FOUND) == 1


def test_a_batch_for_one_worker_alone_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "seconds_per_update", lambda *_: pytest.fail("it was measured"))
    alone = load_recipe("digits_96", ["batch={global_batch: 97, bn_span: 97}"])
    assert oversubscription(alone, FOUND) == 1


@pytest.mark.long
def test_workers_really_make_updates() -> None:
    """Four of them at once: no time is asserted, only that it was taken."""
    assert 1e-4 < module.seconds_per_update(DIGITS, 4) < 600
