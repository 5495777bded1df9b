"""A server and its rule against the papers' update rules by hand, in plain PyTorch and float64."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.optim import SGD, Optimizer

from largebatch.lab.protocols.server import MiniBatches, ParameterServer, UpdateRule, divide
from largebatch.optim.lars import LARS
from largebatch.recipe.protocols import Protocol


def schedule(update: int) -> float:
    return 0.1 / (1 + update)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(3, 4), (4,)]
    ]


def gradient(weights: Sequence[Tensor], mini_batch: int) -> list[Tensor]:
    """Return the gradient of |a w - b|^2 / 2 with another a and b for each mini-batch."""
    generator = torch.Generator().manual_seed(mini_batch)
    found = []
    for weight in weights:
        a = 1 + torch.rand(weight.shape, generator=generator, dtype=torch.float64)
        b = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        found.append(a * (a * weight - b))
    return found


def serve(
    kind: Callable[..., Optimizer], rule: UpdateRule, *, clock: int = 0, **settings: float
) -> ParameterServer:
    weights = [weight.requires_grad_() for weight in start()]
    return ParameterServer(weights, kind(weights, lr=1.0, **settings), schedule, rule, clock=clock)


def read(server: ParameterServer) -> tuple[int, list[Tensor]]:
    """Pull, as through a network: a copy."""
    clock, weights = server.pull()
    return clock, [weight.clone() for weight in weights]


def assert_same(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-12, atol=1e-12)


def test_one_learner_is_plain_training() -> None:
    for rule in (UpdateRule.hardsync(1), UpdateRule(learners=1, gradients=1, waits=False)):
        expected = [weight.requires_grad_() for weight in start()]
        plain = SGD(expected, lr=1.0, momentum=0.9, weight_decay=1e-2)
        server = serve(SGD, rule, momentum=0.9, weight_decay=1e-2)
        for update in range(6):
            plain.param_groups[0]["lr"] = schedule(update)
            for weight, part in zip(expected, gradient(expected, update), strict=True):
                weight.grad = part.detach()
            plain.step()
            clock, weights = read(server)
            assert server.push(0, clock, gradient(weights, update)) is not None
        assert_same(server.weights, expected)


def test_n_of_lambda_at_a_fixed_rate_is_downpour() -> None:
    """Dean et al. 2012, section 4.1: the server subtracts each gradient as it comes."""
    server = serve(SGD, UpdateRule(learners=3, gradients=1, waits=False))
    held = {learner: read(server) for learner in range(3)}
    expected = start()
    for turn, learner in enumerate([0, 2, 2, 1, 0, 1, 2, 0]):
        clock, weights = held[learner]
        found = gradient(weights, turn)
        server.push(learner, clock, found)
        held[learner] = read(server)
        for weight, part in zip(expected, found, strict=True):
            weight.sub_(schedule(turn) * part)
        assert_same(server.weights, expected)
    assert [arrival.staleness for arrival in server.arrivals] == [0, 1, 0, 3, 3, 1, 3, 2]


def test_one_softsync_with_equal_speeds_is_the_mean_over_gradients_one_update_late() -> None:
    """Each learner pulls as soon as it has pushed, so that all but the last are one update late."""
    learners = 4
    server = serve(SGD, UpdateRule(learners=learners, gradients=learners, waits=False))
    held = {learner: read(server) for learner in range(learners)}
    history, expected = [start()], start()
    for update in range(5):
        sums = [torch.zeros_like(weight) for weight in expected]
        for learner in range(learners):
            late = min(update, 1) if learner < learners - 1 else 0
            mini_batch = update * learners + learner
            for total, part in zip(sums, gradient(history[update - late], mini_batch), strict=True):
                total.add_(part)
            server.push(learner, held[learner][0], gradient(held[learner][1], mini_batch))
            held[learner] = read(server)
        expected = [
            weight - schedule(update) * total / learners
            for weight, total in zip(expected, sums, strict=True)
        ]
        history.append(expected)
        assert_same(server.weights, expected)
    taus = [arrival.staleness for arrival in server.arrivals]
    assert taus == [0] * 4 + [1, 1, 1, 0] * 4


def test_every_gradient_has_the_rate_over_its_own_staleness_inside_the_mean() -> None:
    """Zhang et al. 2016 (arXiv:1511.05950), with momentum as in SGD."""
    rule = UpdateRule(learners=3, gradients=2, waits=False, by_staleness=True)
    server = serve(SGD, rule, momentum=0.9)
    begun = [weight.clone() for weight in start()]
    old = [(clock, begun) for clock in (0, 0)]
    expected = start()
    velocity = [torch.zeros_like(weight) for weight in expected]
    for update in range(4):
        pushed = [*old, (server.clock, read(server)[1])][-2 - (update == 3) :][:2]
        step = [torch.zeros_like(weight) for weight in expected]
        for place, (clock, weights) in enumerate(pushed):
            tau = update - clock
            found = gradient(weights, 2 * update + place)
            server.push(place, clock, found)
            for total, part in zip(step, found, strict=True):
                total.add_(schedule(update) / max(1, tau) * part / 2)
        for weight, speed, total in zip(expected, velocity, step, strict=True):
            speed.mul_(0.9).add_(total / schedule(update))
            weight.sub_(schedule(update) * speed)
        assert_same(server.weights, expected)
    taus = {arrival.staleness for arrival in server.arrivals}
    assert taus == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", [SGD, LARS])
def test_where_all_are_as_late_the_rate_over_staleness_is_the_rate_over_n(
    kind: Callable[..., Optimizer],
) -> None:
    """The weight decay too: it would else be tau times what it is beside the gradient."""
    late = 3
    ends = []
    for rule in (
        UpdateRule(learners=late, gradients=1, waits=False, by_staleness=True),
        UpdateRule(learners=late, gradients=1, waits=False, rate=1 / late),
    ):
        server = serve(kind, rule, clock=late, weight_decay=0.2)
        for mini_batch in range(4):
            found = gradient(start(), mini_batch)
            server.push(0, server.clock - late, found)
        ends.append(server.weights)
        assert [group["weight_decay"] for group in server.optimizer.param_groups] == [0.2]
    assert_same(*ends)
    assert not torch.equal(ends[0][0], start()[0])


def test_lars_takes_the_mean_factor_into_its_rate() -> None:
    """The trust ratio divides by |g|: in the mean alone, a late gradient would count in full."""
    rule = UpdateRule(learners=2, gradients=1, waits=False, by_staleness=True)
    server = serve(LARS, rule, momentum=0.0, weight_decay=0.0, eta=0.1)
    clock, weights = read(server)
    for mini_batch in range(4):
        before = [weight.detach().clone() for weight in server.weights]
        found = gradient(weights, mini_batch)
        server.push(0, clock, found)
        rate = schedule(mini_batch) / max(1, mini_batch)
        expected = [
            weight - rate * 0.1 * weight.norm() / part.norm() * part
            for weight, part in zip(before, found, strict=True)
        ]
        assert_same(server.weights, expected)


def test_hardsync_sums_by_learner_whoever_is_first() -> None:
    orders = [(0, 1, 2), (2, 0, 1)], [(2, 1, 0), (1, 2, 0)]
    found = []
    for order in orders:
        server = serve(LARS, UpdateRule.hardsync(3), momentum=0.9)
        for update, learners in enumerate(order):
            clock, weights = read(server)
            gradients = [gradient(weights, 3 * update + learner) for learner in range(3)]
            applied = [server.push(learner, clock, gradients[learner]) for learner in learners]
            assert applied[:2] == [None, None]
            assert applied[2] == schedule(update)
        found.append([weight.detach() for weight in server.weights])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_gradient_of_weights_to_come_and_a_second_one_for_an_update_are_refused() -> None:
    server = serve(SGD, UpdateRule.hardsync(2))
    with pytest.raises(ValueError, match="clock_read is 1, and only 0 updates were made"):
        server.push(0, 1, start())
    server.push(0, 0, start())
    with pytest.raises(ValueError, match="learner 0 pushed twice for update 0"):
        server.push(0, 0, start())


@pytest.mark.parametrize("servers", [1, 2, 5, 20])
def test_tensors_are_divided_whole_and_about_evenly(servers: int) -> None:
    sizes = [int(size) for size in torch.randint(1, 1000, (20,), generator=torch.Generator())]
    parts = divide(sizes, servers)
    assert sorted(number for part in parts for number in part) == list(range(20))
    filled = [sum(sizes[number] for number in part) for part in parts]
    assert max(filled) - min(filled) <= max(sizes)
    assert min(map(len, parts)) >= 1


PROTOCOL: TypeAdapter[Protocol] = TypeAdapter(Protocol)


def rule(mini_batch: int = 4, **section: object) -> UpdateRule:
    return UpdateRule.of(PROTOCOL.validate_python(section), mini_batch=mini_batch)


@pytest.mark.parametrize(("n", "gradients"), [(1, 30), (2, 15), (7, 4), (15, 2), (16, 1), (30, 1)])
def test_an_update_of_n_softsync_takes_lambda_over_n_gradients_rounded_down(
    n: int, gradients: int
) -> None:
    found = rule(kind="softsync", learners=30, n=n, modulation="none")
    assert found == UpdateRule(learners=30, gradients=gradients, waits=False)


def test_asynchronous_is_softsync_with_n_of_lambda() -> None:
    for modulation in ("none", "n", "staleness"):
        softsync = rule(kind="softsync", learners=30, n=30, modulation=modulation)
        assert rule(kind="asynchronous", learners=30, modulation=modulation) == softsync


def test_the_rate_is_divided_by_n_or_by_each_gradients_staleness() -> None:
    by_n = rule(kind="softsync", learners=30, n=15, modulation="n")
    assert (by_n.rate, by_n.factor(9)) == (1 / 15, 1)
    late = rule(kind="softsync", learners=30, n=15, modulation="staleness")
    assert late.rate == 1
    assert [late.factor(tau) for tau in (0, 1, 2, 30)] == [1, 1, 1 / 2, 1 / 30]


def test_hardsync_scales_the_rate_by_the_root_of_the_batch() -> None:
    """Rudra's example: 30 learners of 4 samples, at a rate found for 128."""
    found = rule(kind="hardsync", learners=30, modulation="sqrt", reference_batch=128)
    assert found.rate == pytest.approx(math.sqrt(120 / 128))
    assert (found.gradients, found.waits) == (30, True)


@pytest.mark.parametrize("learners", [1, 2, 5])
@pytest.mark.parametrize("gradients", [1, 2, 3])
def test_every_mini_batch_is_handed_out_once_however_unequal_the_learners_are(
    learners: int, gradients: int
) -> None:
    them = MiniBatches(UpdateRule(learners=learners, gradients=gradients, waits=False), range(2, 5))
    handed = [them.next(turn * turn % learners) for turn in range(3 * gradients)]
    assert handed == list(range(2 * gradients, 5 * gradients))
    assert them.next(0) is None


def test_stopping_early_completes_the_updates_that_were_begun() -> None:
    them = MiniBatches(UpdateRule(learners=4, gradients=3, waits=False), range(10))
    handed = [them.next(learner) for learner in range(4)]
    them.stop_early()
    handed += [them.next(0) for _ in range(3)]
    assert handed == [0, 1, 2, 3, 4, 5, None]
