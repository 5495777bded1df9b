"""Wrong workers are found by passes that others compute again, and a run without any is as before.

Cards are faulty as faulty_cards.py breaks them. Workers are threads; a whole run has processes.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from faulty_cards import FaultyCard, Trained, Worker, flip, trained
from on_forked_workers import on_forked_workers
from short_runs import CLEAN, EMA, a_recipe, log, weights

from largebatch import run
from largebatch.distributed.agreement import digest
from largebatch.errors import RecipeError, WrongCardError
from largebatch.training import replay
from largebatch.training.pass_record import sketch
from largebatch.training.replay import offsets
from largebatch.training.verdict import Pass, verdict

Damage = Callable[[int, Worker], None]
SECOND_CONVOLUTION = 3
"""Place of that layer in the network."""


def weight_of(worker: Worker) -> torch.Tensor:
    weight = worker.model[SECOND_CONVOLUTION].weight
    assert isinstance(weight, torch.Tensor)
    return weight


def of_worker(number: int, damage: Callable[[Worker], object]) -> Damage:
    """Return a damage to one worker."""

    def to(rank: int, worker: Worker) -> None:
        if rank == number:
            damage(worker)

    return to


def wrong_weight(worker: Worker) -> None:
    flip(weight_of(worker))


def wrong_activation(worker: Worker) -> None:
    worker.cards.append(FaultyCard("convolution", weight_of(worker)))


def wrong_gradient(worker: Worker) -> None:
    worker.cards.append(FaultyCard("convolution_backward", weight_of(worker), result=1))


def wrong_input(worker: Worker) -> None:
    worker.pipeline.damage = lambda batch: flip(batch.images)


def wrong_statistics(worker: Worker) -> None:
    scale = worker.model[SECOND_CONVOLUTION + 1].weight
    assert isinstance(scale, torch.Tensor)
    # Batch norm's mean is saved for the backward pass, and only that reads it.
    worker.cards.append(FaultyCard("native_batch_norm", scale, result=1))


def accused(results: list[Trained]) -> list[tuple[tuple[int, ...], bool, str]]:
    """Return the suspects of each event, which all workers must agree on."""
    events = results[0].log.events
    assert all(result.log.events == events for result in results)
    return [
        (tuple(it.worker for it in event.suspects), event.is_certain, event.place)
        for event in events
    ]


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long), 8])
@pytest.mark.parametrize(
    ("damage", "place"),
    [
        pytest.param(wrong_weight, "weights and running statistics", id="weight"),
        pytest.param(wrong_activation, "convolution of 3 (forward)", id="activation"),
        pytest.param(wrong_gradient, "convolution_backward of 3 (backward)", id="gradient"),
        pytest.param(wrong_input, "images", id="input"),
        pytest.param(wrong_statistics, "native_batch_norm of 4 (forward)", id="statistics"),
    ],
)
def test_a_worker_that_is_always_wrong_is_named_in_the_first_replay(
    damage: Callable[[Worker], None], place: str, workers: int
) -> None:
    results = trained(workers=workers, updates=1, damage=of_worker(1, damage))
    suspects = (0, 1) if workers == 2 else (1,)
    assert accused(results) == [(suspects, workers > 2, place)]
    assert results[0].log.events[0].suspects[-1].host


def test_a_wrong_running_statistic_is_seen_among_the_weights() -> None:
    """Training does not read it, so gradients are equal: `compare_every` finds it."""

    def damage(worker: Worker) -> None:
        flip(worker.model[4].running_var)  # type: ignore[arg-type]  # a tensor

    results = trained(workers=3, updates=2, damage=of_worker(1, damage))
    assert accused(results) == []
    assert not torch.equal(results[0].weights, results[1].weights)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("workers", [2, 3])
def test_an_error_that_comes_once_accuses_its_worker_and_not_the_partner(
    number: int, workers: int
) -> None:
    """`number` is that of a pass of worker 1 in a dispute; the first two are in every replay."""
    cards: list[FaultyCard] = []

    def damage(worker: Worker) -> None:
        weight = weight_of(worker)
        worker.cards.append(
            FaultyCard("convolution", weight, is_wrong=lambda place: place == number)
        )
        cards.extend(worker.cards)

    results = trained(workers=workers, updates=1, damage=of_worker(1, damage))
    assert cards[0].passes == (4 if number < 2 else 2)
    found = accused(results)
    assert found == ([((1,), True, "convolution of 3 (forward)")] if number < 2 else [])
    # The pass that the update uses is the last one, in which nothing was wrong.
    without = trained(workers=workers, updates=1, every=None)
    assert torch.equal(results[0].weights, without[0].weights)


def test_an_error_in_the_deciding_vote_accuses_its_worker_too() -> None:
    def damage(rank: int, worker: Worker) -> None:
        if rank == 0:
            wrong_activation(worker)
        if rank == 2:
            card = FaultyCard("convolution", weight_of(worker), is_wrong=lambda it: it == 2)
            worker.cards.append(card)

    results = trained(workers=5, updates=1, damage=damage)
    assert accused(results) == [((0, 2), True, "convolution of 3 (forward)")]


def test_two_wrong_workers_of_five_are_named() -> None:
    def damage(rank: int, worker: Worker) -> None:
        if rank in {1, 2}:
            flip(weight_of(worker), bit=1 << (18 + rank))

    results = trained(workers=5, updates=4, damage=damage)
    assert {(suspects, certain) for suspects, certain, _ in accused(results)} == {((1, 2), True)}


@pytest.mark.long
def test_a_rare_error_is_found_by_a_replay_of_every_update() -> None:
    """Once in 50 passes of one worker, of which each replay makes 2."""
    rare = Random(3)
    results = trained(
        workers=3,
        updates=60,
        damage=of_worker(
            1,
            lambda worker: worker.cards.append(
                FaultyCard(
                    "convolution", weight_of(worker), is_wrong=lambda _: rare.random() < 1 / 50
                )
            ),
        ),
    )
    found = accused(results)
    assert found
    assert {(suspects, certain) for suspects, certain, _ in found} == {((1,), True)}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_updates_have_the_same_bits_with_and_without_replays(accumulation: int) -> None:
    without, with_ = (
        trained(workers=4, updates=4, accumulation=accumulation, every=every, sync=2)
        for every in (None, 2)
    )
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(without, with_, strict=True))
    # What it costs: one micro-batch more in every second update.
    assert [b.passes - a.passes for a, b in zip(without, with_, strict=True)] == [2] * 4


@pytest.mark.parametrize("workers", [4, 6])
def test_a_worker_of_a_group_that_shares_spans_is_named(workers: int) -> None:
    results = trained(workers=workers, updates=1, sync=2, damage=of_worker(1, wrong_activation))
    suspects = (1, 3) if workers == 4 else (1,)
    assert accused(results) == [(suspects, workers == 6, "convolution of 3 (forward)")]


@pytest.mark.parametrize("sync", [1, 3])
def test_workers_without_partners_repeat_their_own_passes(sync: int) -> None:
    """A single worker, or workers that share one span: errors that come once are found."""

    def damage(worker: Worker) -> None:
        card = FaultyCard("convolution", weight_of(worker), is_wrong=lambda place: place == 1)
        worker.cards.append(card)

    results = trained(workers=sync, sync=sync, updates=1, damage=of_worker(0, damage))
    assert accused(results) == [((0,), False, "convolution of 3 (forward)")]


def test_arithmetic_that_does_not_repeat_is_compared_by_distance_and_accuses_nobody() -> None:
    def damage(rank: int, worker: Worker) -> None:
        bits = Random(rank)
        card = FaultyCard(
            "convolution_backward",
            weight_of(worker),
            result=1,
            bit=lambda: 1 << bits.randrange(12),
        )
        worker.cards.append(card)

    results = trained(workers=4, updates=3, damage=damage)
    assert accused(results) == []
    assert len(results[0].log.notes) == 1


@pytest.mark.parametrize(("bit", "is_found"), [(1, False), (1 << 27, True)])
def test_devices_of_different_models_are_compared_by_more_than_rounding(
    bit: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "device_kind", lambda _: str(threading.get_ident()))

    def damage(worker: Worker) -> None:
        card = FaultyCard("convolution_backward", weight_of(worker), result=1, bit=lambda: bit)
        worker.cards.append(card)

    results = trained(workers=3, updates=1, damage=of_worker(2, damage))
    assert accused(results) == ([((2,), True, "gradient of 3.weight")] if is_found else [])


def test_a_run_stops_before_the_update_that_a_replay_finds_wrong() -> None:
    with pytest.raises(WrongCardError, match="worker 2"):
        trained(workers=3, updates=1, action="stop", damage=of_worker(2, wrong_activation))


def test_every_pair_of_workers_comes_and_the_third_is_another_one() -> None:
    for workers in (3, 4, 8, 1000):
        both = [offsets(number, workers) for number in range(workers - 1)]
        assert {first for first, _ in both} == set(range(1, workers))
        assert all(first != second and 0 < second < workers for first, second in both)


def test_wrong_workers_of_a_thousand_are_found_and_nobody_else_is() -> None:
    draws = Random(5)
    workers = 1000
    for number in range(9):
        wrong = set(draws.sample(range(workers), 1 + number % 3))
        first, second = offsets(number, workers)
        passes = {
            owner: [
                Pass(worker, draws.random() if worker in wrong else 0.0)
                for worker in sorted(
                    [owner, (owner - first) % workers, (owner - second) % workers, owner]
                )
            ]
            for owner in range(workers)
        }
        found = verdict(passes, lambda a, b: None if a == b else 0, workers=workers)
        assert found is not None
        assert found.is_certain
        assert set(found.workers) == wrong


def test_more_wrong_workers_than_a_few_accuse_nobody() -> None:
    passes = {owner: [Pass(owner, owner), Pass((owner + 1) % 9, -owner - 1)] for owner in range(9)}
    assert verdict(passes, lambda a, b: None if a == b else 0, workers=9) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_any_flipped_bit_changes_a_digest(dtype: torch.dtype) -> None:
    numbers = torch.arange(1100).to(dtype)
    bits = numbers.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    before = digest(numbers)
    for place in (0, 511, 512, 1099):
        for bit in range(8 * dtype.itemsize - 1):
            bits[place] ^= 1 << bit
            assert digest(numbers) != before
            bits[place] ^= 1 << bit
    assert digest(numbers) == before
    # Errors of opposite sign in other rows do not cancel, and strides do not matter.
    swapped = torch.cat([numbers[512:1024], numbers[:512], numbers[1024:]])
    assert digest(swapped) != before
    for part in (numbers[:149:2], numbers[1:1000], numbers[3:70], numbers[:0]):
        assert digest(part) == digest(part.clone())


def test_the_distance_of_sketches_is_that_of_the_tensors() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(40, 25)
    ratios = []
    for _ in range(100):
        noise = 1e-3 * torch.randn(40, 25)
        distance = torch.linalg.vector_norm(sketch(tensor + noise)[1:] - sketch(tensor)[1:])
        ratios.append(float(distance / torch.linalg.vector_norm(noise)))
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.1)


def test_a_protocol_has_no_replays() -> None:
    with pytest.raises(RecipeError, match=r"execution\.replay_every"):
        a_recipe(
            CLEAN, changes=("execution.replay_every=5", "protocol={kind: hardsync, learners: 2}")
        )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_types_whose_convolutions_do_not_repeat_have_no_replays(
    precision: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=f"{precision} on a CPU .* set precision to fp32"):
        digits(tmp_path / "run", "execution.replay_every=3", f"precision={precision}")


def test_a_run_has_the_same_weights_with_and_without_replays(tmp_path: Path) -> None:
    """With dropout, mixed images, micro-batches, an EMA and a stage on clean images."""
    digits(tmp_path / "without")
    digits(tmp_path / "with", "execution.replay_every=3")
    require_equal(tmp_path)


@pytest.mark.long
def test_a_run_on_two_workers_has_the_same_weights_with_and_without_replays(tmp_path: Path) -> None:
    on_forked_workers(digits, tmp_path / "without", workers=2)
    on_forked_workers(digits, tmp_path / "with", "execution.replay_every=3", workers=2)
    require_equal(tmp_path)


def digits(folder: Path, *changes: str) -> None:
    usual = ("execution.device_batch=24", "batch.bn_span=24", "data.mix={mixup: 0.4}")
    run(a_recipe(CLEAN, EMA, changes=(*usual, *changes)), out=folder, report=False)


def require_equal(folder: Path) -> None:
    without = weights(folder / "without")
    with_ = weights(folder / "with")
    assert without.keys() == with_.keys()
    assert all(torch.equal(without[name], with_[name]) for name in without)
    assert log(folder / "with", "wrong_card") == []
    assert not [it for it in log(folder / "with", "note") if "replay" in it["text"]]
