"""The study of averaged weights: its averages are the libraries', its passes what they say."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.studies.averaged_weights import run as study
from benchmarks.studies.averaged_weights.passes import (
    Images,
    augmented,
    distance,
    merge,
    new_model,
    on_workers,
)
from benchmarks.studies.averaged_weights.run import (
    Averages,
    Run,
    mean_of,
    schedule,
    snapshot,
    train_sgd,
)


def small_images(number: int, side: int = 8) -> Images:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (number, side, side, 3), generator=draw).to(torch.uint8)
    return Images(pixels, torch.arange(number) % 10)


@pytest.fixture
def small_run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run of 32 updates of a small network."""

    def small() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10)
        )

    monkeypatch.setattr(study, "new_model", small)
    monkeypatch.setattr(study, "BATCH", 10)
    return Run("cifar10", small_images(80), "SGD", 0.1, seed=1, epochs=4)


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    rate = schedule(2.0, updates=16, warmup=4)
    assert [rate(update) for update in (0, 1, 3, 11, 12, 14)] == [0.5, 1, 2, 2, 2, 1]
    assert rate(16) == 0


def test_averages_are_those_of_torch_and_keep_the_newest_buffers(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "LAWA_UPDATES", 4)
    averages = Averages(small_run)
    twin = AveragedModel(small_run.model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    taken: list[dict[str, torch.Tensor]] = []

    def follow() -> None:
        averages.follow()
        twin.update_parameters(small_run.model)
        taken.append(snapshot(small_run.model))

    small_run.train(averages.peak_end, follow)
    states = averages.states("peak")
    ema = states["EMA 0.99, peak"]
    for name, value in twin.module.state_dict().items():
        assert torch.equal(ema["as left"][name], value), name
    assert not torch.equal(ema["averaged"]["1.running_mean"], ema["as left"]["1.running_mean"])
    every = round(study.SWA_EPOCHS * small_run.per_epoch)
    swa = mean_of(taken[::-1][: study.SWA_NUMBER * every : every])
    for name in ("0.weight", "1.running_var", "3.bias"):
        torch.testing.assert_close(states["SWA, peak"]["averaged"][name], swa[name])


def test_lawa_is_the_mean_of_the_last_weights(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "LAWA_UPDATES", 4)
    averages, taken = Averages(small_run), []

    def follow() -> None:
        averages.follow()
        taken.append(small_run.model.state_dict()["0.weight"].clone())

    small_run.train(small_run.updates, follow)
    expected = torch.stack([taken[update - 1] for update in (16, 20, 24, 28, 32)]).mean(0)
    assert torch.equal(averages.states("end")["LAWA, end"]["as left"]["0.weight"], expected)


def test_a_soup_begins_with_the_run_itself_and_each_end_has_an_order_of_its_own(
    small_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[list[dict[str, torch.Tensor]]] = []

    def noted(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ends.append(states)
        return mean_of(states)

    monkeypatch.setattr(study, "LAWA_UPDATES", 4)
    monkeypatch.setattr(study, "mean_of", noted)
    states = train_sgd(small_run, seed=1)
    first, second, third = (state["0.weight"] for state in ends[-1])
    assert torch.equal(states["last weights, end"]["as left"]["0.weight"], first)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_images_are_shifted_and_flipped_whole() -> None:
    images = small_images(200)
    moved = augmented(images.pixels, "cifar10", torch.Generator().manual_seed(3))
    centre = images.pixels[:, 4:5, 4:5]
    found = (moved == centre).all(3).flatten(1).any(1)
    assert found.double().mean() > 0.7  # the centre seldom leaves an image of 8 x 8
    assert len({image.numpy().tobytes() for image in moved}) == 200


@pytest.mark.long
def test_workers_disagree_without_polish(tmp_path: Path) -> None:
    model = new_model()
    torch.save({"as left": snapshot(model)}, tmp_path / "SWA, peak.pt")
    torch.save((small_images(5000, side=16), small_images(100, side=16)), tmp_path / "images")
    found = on_workers(2, tmp_path, tmp_path / "images", "cifar10")["SWA, peak"]
    assert found.keys() == {"polish", "own", "ddp", "mean"}
    assert found["polish"]["differ"] == found["mean"]["differ"] == 0
    assert found["polish"]["log_variance"] == 0
    assert found["own"]["log_variance"] > found["mean"]["log_variance"] > 1e-6
    assert all(len(part["top1"]) == 2 for part in found.values())


def test_the_distance_of_statistics_is_in_their_units() -> None:
    exact, other = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    other.load_state_dict(
        {
            **other.state_dict(),
            "running_mean": torch.tensor([0, 0.5]),
            "running_var": torch.tensor([4.0, 1]),
        }
    )
    off = distance(other, exact)
    assert off["shift"] == pytest.approx(0.5, rel=1e-4)
    assert off["log_variance"] == pytest.approx(1.3863, rel=1e-4)


def test_workers_differ_where_any_two_do() -> None:
    part = {"top1": 0.5, "seconds": 1.0, "shift": 0.0, "log_variance": 0.0}
    parts = [
        part | {"predicted": torch.tensor(predicted)}
        for predicted in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 0, 3, 4])
    ]
    assert merge(parts)["differ"] == 0.5
