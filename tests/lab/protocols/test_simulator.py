"""Simulated times against SciPy, queueing theory, simpy's own resources, and the papers."""

from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import simpy
from scipy import stats

from largebatch.lab.protocols.server import UpdateRule
from largebatch.lab.protocols.simulator import (
    ComputeTime,
    ConstantTime,
    FairLinks,
    LinkDirection,
    Lognormal,
    Recorded,
    Serving,
    SimulatedCluster,
    SimulatedLink,
    Simulation,
    Stragglers,
    compute_times,
    expectation,
    simulate,
)

MEAN, QUANTILES = 0.5, -np.log1p(-(np.arange(10_000) + 0.5) / 10_000)
EXPONENTIAL = Recorded(kind="recorded", seconds=tuple((MEAN * QUANTILES).tolist()))
"""As good as an exponential distribution."""

NARROW = Lognormal(kind="lognormal", median=1.0, sigma=0.1)
SECOND = ConstantTime(kind="constant", seconds=1.0)


def harmonic(number: int) -> float:
    """Return H_n."""
    return sum(1 / k for k in range(1, number + 1))


def seconds_of(found: Simulation) -> float:
    """Return the mean seconds of an update."""
    return float(found.ends[-1] / len(found.ends))


def softsync(learners: int, n: int) -> UpdateRule:
    return UpdateRule(learners=learners, gradients=learners // n, waits=False)


@pytest.mark.parametrize(
    ("gradients", "waits", "expected"),
    [
        pytest.param(16, True, harmonic(16), id="hardsync"),
        pytest.param(4, False, 4 / 16, id="4-batch"),
        pytest.param(1, False, 1 / 16, id="asynchronous"),
    ],
)
def test_an_update_takes_as_long_as_theory_has_it_for_exponential_learners(
    gradients: int, waits: bool, expected: float
) -> None:
    """Dutta et al., arXiv:1803.01113: order statistics of exponential variables."""
    rule = UpdateRule(learners=16, gradients=gradients, waits=waits)
    cluster = SimulatedCluster(learners=16, compute=EXPONENTIAL)
    updates = 16_000 // gradients
    found = seconds_of(simulate(rule, cluster, servers=1, updates=updates, seed=1))
    assert found == pytest.approx(MEAN * expected, rel=0.02)


@pytest.mark.parametrize("n", [1, 2, 4, 15, 30])
def test_staleness_is_about_n_and_at_most_twice_that(n: int) -> None:
    """Rudra, arXiv:1509.04210."""
    cluster = SimulatedCluster(learners=30, compute=NARROW)
    found = simulate(softsync(30, n), cluster, servers=1, updates=200 * n, seed=3)
    staleness = [one.staleness for one in found.arrivals[0]]
    assert min(staleness) == 0
    assert max(staleness) <= 2 * n
    assert np.mean(staleness) == pytest.approx(n, rel=0.08)


def test_hardsync_has_no_staleness_and_each_update_one_gradient_of_every_learner() -> None:
    cluster = SimulatedCluster(learners=5, compute=EXPONENTIAL)
    found = simulate(UpdateRule.hardsync(5), cluster, servers=None, updates=40, seed=5)
    assert len(found.arrivals) == 5
    for arrivals in found.arrivals:
        assert {one.staleness for one in arrivals} == {0}
        updates = np.reshape([one.learner for one in arrivals], (40, 5))
        assert (np.sort(updates, axis=1) == np.arange(5)).all()
        assert all(one.mini_batch == 5 * one.update + one.learner for one in arrivals)


def test_a_slow_learner_pushes_less_where_none_waits_and_slows_all_where_they_wait() -> None:
    cluster = SimulatedCluster(learners=4, compute=SECOND, slow={2: 10.0})
    waiting = simulate(UpdateRule.hardsync(4), cluster, servers=1, updates=20, seed=1)
    free = simulate(softsync(4, 4), cluster, servers=1, updates=310, seed=1)
    pushed = np.bincount([one.learner for one in free.arrivals[0]])
    assert seconds_of(waiting) == pytest.approx(10.0)
    assert pushed.tolist() == [100, 100, 10, 100]
    assert free.ends[-1] == pytest.approx(100.0)


def test_a_central_server_saturates_where_shards_do_not() -> None:
    """At its limit a link of B bytes/s takes B / M gradients a second, however many learners."""

    def rate(learners: int, servers: int) -> float:
        link = SimulatedLink(bandwidth=1e6)
        cluster = SimulatedCluster(learners=learners, compute=NARROW, link=link, model_bytes=1e5)
        found = simulate(
            softsync(learners, learners), cluster, servers=servers, updates=600, seed=1
        )
        return 1 / seconds_of(found)

    assert rate(40, 1) == pytest.approx(10, rel=0.03)
    assert rate(80, 1) == pytest.approx(10, rel=0.03)
    assert rate(40, 8) > 2.5 * rate(40, 1)


def test_a_message_takes_the_slower_end_and_both_latencies() -> None:
    cluster = SimulatedCluster(
        learners=1,
        compute=SECOND,
        link=SimulatedLink(bandwidth=100.0, latency=0.25),
        server_link=SimulatedLink(bandwidth=200.0, latency=0.5),
        model_bytes=50.0,
    )
    found = simulate(UpdateRule.hardsync(1), cluster, servers=1, updates=2, seed=1)
    one_way = 0.75 + 50 / 100
    first = 0.75 + one_way + 1.0 + one_way  # asked for, weights, computed, gradient
    assert found.ends.tolist() == pytest.approx([first, first + 0.75 + first])


def test_messages_that_share_a_link_fairly_all_arrive_when_a_queue_has_sent_the_last() -> None:
    """Learners that start together: a queue serves one after the other, TCP all at once."""
    cluster = SimulatedCluster(
        learners=4, compute=SECOND, link=SimulatedLink(bandwidth=100.0), model_bytes=50.0
    )
    queue, fair = (
        simulate(UpdateRule.hardsync(4), one, servers=1, updates=3, seed=1)
        for one in (cluster, replace(cluster, sharing="fair"))
    )
    assert np.diff(fair.ends, prepend=0.0).tolist() == pytest.approx([2.0 + 1.0 + 2.0] * 3)
    assert np.diff(queue.ends, prepend=0.0).tolist() == pytest.approx([0.5 + 1.0 + 2.0] * 3)


def test_fair_rates_are_those_of_the_fullest_link_first() -> None:
    """Two messages leave a slow host, one of them to a host that a third one reaches from afar."""
    env = simpy.Environment()
    links, slow, fast, shared = FairLinks(env), *map(LinkDirection, (10.0, 100.0, 30.0))
    ends: dict[str, float] = {}
    for name, over, size in (
        ("alone", [slow], 50.0), ("both", [slow, shared], 50.0), ("last", [fast, shared], 275.0),
    ):  # fmt: skip
        links.send(over, size, partial(ends.setdefault, name))
    env.run()
    assert ends == pytest.approx({"alone": 10.0, "both": 10.0, "last": 10.0 + 25.0 / 30.0})


def test_servers_may_have_unequal_shares() -> None:
    def seconds(*shares: float) -> float:
        cluster = SimulatedCluster(
            learners=2,
            compute=SECOND,
            link=SimulatedLink(bandwidth=100.0),
            shares=shares,
            sharing="fair",
        )
        found = simulate(UpdateRule.hardsync(2), cluster, servers=len(shares), updates=1, seed=1)
        return seconds_of(found)

    assert seconds(80.0, 20.0) == pytest.approx(1.6 + 0.4 + 1.0 + 1.6)
    assert seconds(20.0, 80.0) == pytest.approx(0.4 + 1.6 + 1.0 + 1.6)
    with pytest.raises(ValueError, match="argument 2"):
        simulate(
            UpdateRule.hardsync(2),
            SimulatedCluster(learners=2, compute=SECOND, shares=(1.0, 2.0)),
            servers=1,
            updates=1,
            seed=1,
        )


def test_a_link_serves_as_a_resource_of_simpy() -> None:
    """Messages of any size at any time, one after the other, first come, first served."""
    generator = np.random.default_rng(0)
    begins = np.cumsum(generator.exponential(1.0, size=300))
    sizes = generator.exponential(90.0, size=300)
    env, link, through = simpy.Environment(), LinkDirection(100.0), []
    resource = simpy.Resource(env, capacity=1)

    def message(begin: float, size: float) -> simpy.events.ProcessGenerator:
        yield env.timeout(begin)
        with resource.request() as request:
            yield request
            yield env.timeout(size / 100.0)
        through.append(env.now)

    for begin, size in zip(begins, sizes, strict=True):
        env.process(message(begin, size))
    env.run()
    found = [link.send(begin, size) for begin, size in zip(begins, sizes, strict=True)]
    assert found == pytest.approx(through)


def test_other_numbers_of_learners_are_refused() -> None:
    cluster = SimulatedCluster(learners=4, compute=SECOND)
    with pytest.raises(ValueError, match="3 .* 4"):
        simulate(UpdateRule.hardsync(3), cluster, servers=1, updates=1, seed=1)


def test_a_server_that_takes_time_makes_one_update_after_the_other() -> None:
    """A pull waits for the updates before it, so all 8 learners start again after 8 of 0.5 s."""
    serving = Serving(pull=0.0, gradient=0.02, update=0.03)
    cluster = SimulatedCluster(learners=8, compute=SECOND, serving=serving, model_bytes=10.0)
    free = simulate(softsync(8, 8), cluster, servers=1, updates=800, seed=1)
    assert seconds_of(free) == pytest.approx((1.0 + 8 * 0.5) / 8, rel=0.01)
    assert sorted(one.staleness for one in free.arrivals[0][-8:]) == [*range(8)]
    waiting = simulate(UpdateRule.hardsync(8), cluster, servers=1, updates=10, seed=1)
    assert seconds_of(waiting) == pytest.approx(1.0 + 8 * 0.2 + 0.3)
    two = simulate(UpdateRule.hardsync(8), cluster, servers=2, updates=10, seed=1)
    assert seconds_of(two) == pytest.approx(1.0 + (8 * 0.2 + 0.3) / 2)


RECORD = (0.5, 1.0, 1.0, 2.5)
USUAL = Lognormal(kind="lognormal", median=0.3, sigma=0.7)


def drawn(distribution: ComputeTime, number: int = 20_000, **keys: float) -> np.ndarray:
    times = compute_times(distribution, seed=3, learner=1, **keys)
    return np.fromiter(islice(times, number), dtype=np.float64)


def test_times_have_the_distribution_of_scipy() -> None:
    expected = stats.lognorm(0.7, scale=0.3)
    assert stats.kstest(drawn(USUAL), expected.cdf).pvalue > 0.01
    assert expectation(USUAL) == pytest.approx(expected.mean())


def test_recorded_times_come_back_each_as_often() -> None:
    seconds = drawn(Recorded(kind="recorded", seconds=RECORD))
    shares = {value: float((seconds == value).mean()) for value in set(RECORD)}
    assert shares == pytest.approx({0.5: 0.25, 1.0: 0.5, 2.5: 0.25}, abs=0.01)
    assert set(seconds) == set(RECORD)


def test_stragglers_of_a_distribution_are_the_mixture() -> None:
    slowed = Stragglers(kind="stragglers", usual=USUAL, probability=0.2, factor=4.0)
    usual = stats.lognorm(0.7, scale=0.3)

    def mixture(x: np.ndarray) -> np.ndarray:
        cdf: np.ndarray = 0.8 * usual.cdf(x) + 0.2 * usual.cdf(x / 4)
        return cdf

    assert stats.kstest(drawn(slowed), mixture).pvalue > 0.01
    assert expectation(slowed) == pytest.approx(1.6 * usual.mean())


def test_learners_and_seeds_draw_their_own_and_a_slow_one_takes_a_multiple() -> None:
    first = drawn(USUAL, 200)
    assert (first == drawn(USUAL, 200)).all()
    assert drawn(USUAL, 200, factor=3.0) == pytest.approx(3 * first)
    other = list(islice(compute_times(USUAL, seed=3, learner=2), 200))
    assert not np.isin(other, first).any()
