"""Simulates the time of a protocol and the order in which gradients arrive, without computing any.

Learners pull weights, compute for a time drawn from a distribution, and push a gradient to every
server, by the same rule as the servers of a run, on simpy's events. Gradients do not change times,
so the weights of a simulated run are a second step: `replay` computes them from the simulated order
of arrivals.

The messages are those of `learner`: a pull asks the first server, then all others concurrently; a
push goes to all concurrently; both wait for the answers. A link carries one message after the other
at its bandwidth, or all at the same time at fair rates. A message arrives when both ends have
transferred it, so the link of a server, which all learners share, saturates first. The latencies of
both links are added.

A server copies weights and makes updates one after the other, in the order of requests. It adds the
gradients of an update when the last of them has arrived.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt
from pydantic import Field

from largebatch.data.order import WORDS_PER_BLOCK, Stream, random_words
from largebatch.formatting import plural
from largebatch.lab.protocols.server import Arrival, MiniBatches, UpdateRule
from largebatch.optional import require_scipy, require_simpy
from largebatch.recipe.section import NonNegative, Positive, Section

if TYPE_CHECKING:
    import simpy


FloatArray = npt.NDArray[np.float64]

_BLOCKS = 16  # number of blocks drawn at a time, which is 64 mini-batches


class ConstantTime(Section):
    """The same time for every mini-batch."""

    kind: Literal["constant"]
    seconds: Positive


class Lognormal(Section):
    """Lognormal distribution, as is common for times on shared machines."""

    kind: Literal["lognormal"]
    median: Positive
    sigma: Positive
    """Standard deviation of the natural logarithm."""


class Recorded(Section):
    """Measured times, each with the same probability."""

    kind: Literal["recorded"]
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]


class Stragglers(Section):
    """Times in which any mini-batch of any learner may take several times as long."""

    kind: Literal["stragglers"]
    usual: Annotated[ConstantTime | Lognormal | Recorded, Field(discriminator="kind")]
    probability: Annotated[float, Field(gt=0, lt=1)]
    factor: Annotated[float, Field(gt=1, le=1e6)]


ComputeTime = Annotated[
    ConstantTime | Lognormal | Recorded | Stragglers, Field(discriminator="kind")
]


def quantiles(times: ComputeTime, uniform: FloatArray) -> FloatArray:
    """Return the seconds for numbers drawn uniformly between 0 and 1."""
    match times:
        case ConstantTime(seconds=seconds):
            return np.full_like(uniform, seconds)
        case Lognormal(median=median, sigma=sigma):
            normal: FloatArray = require_scipy("scipy.special").ndtri(uniform)
            return median * np.exp(sigma * normal)
        case Recorded(seconds=record):
            places = (uniform * len(record)).astype(np.int64)
            return np.asarray(record, dtype=np.float64)[places]
        case Stragglers(usual=usual, probability=probability, factor=factor):
            # One number decides both: whether the time is that of a straggler, and, stretched to 0
            # to 1, the quantile. So each time takes one draw, whatever its distribution.
            slow = uniform < probability
            rest = (uniform - probability) / (1 - probability)
            found = quantiles(usual, np.where(slow, uniform / probability, rest))
            return np.where(slow, factor * found, found)
        case _:
            assert_never(times)


def expectation(times: ComputeTime) -> float:
    """Return the mean in seconds."""
    match times:
        case ConstantTime(seconds=seconds):
            return seconds
        case Lognormal(median=median, sigma=sigma):
            return median * math.exp(sigma**2 / 2)
        case Recorded(seconds=record):
            return float(np.mean(record))
        case Stragglers(usual=usual, probability=probability, factor=factor):
            return expectation(usual) * (1 + probability * (factor - 1))
        case _:
            assert_never(times)


def compute_times(
    times: ComputeTime, *, seed: int, learner: int, factor: float = 1.0
) -> Iterator[float]:
    """Yield the seconds of each mini-batch of a learner that is slower by `factor`."""
    for block in count(step=_BLOCKS):
        words = random_words(
            seed, Stream.COMPUTE_TIME, block=block, num_blocks=_BLOCKS, part=learner
        )
        # 52 bits, and half a bit that keeps the ends out, where a quantile may be infinite.
        bits = (words.reshape(_BLOCKS * WORDS_PER_BLOCK) >> np.uint64(12)).astype(np.float64)
        uniform: FloatArray = (bits + 0.5) * 2.0**-52
        yield from (factor * quantiles(times, uniform)).tolist()


class SimulatedLink(Section):
    """The network link of a host, the same in both directions."""

    bandwidth: Positive | None = None
    """Bytes per second in each direction; null: no limit."""

    latency: NonNegative = 0.0
    """Seconds that this link adds to every message."""


class Serving(Section):
    """Time of a server, which does one of these after the other."""

    pull: NonNegative = 0.0
    """Seconds to copy a byte of the weights for a learner."""

    gradient: NonNegative = 0.0
    """Seconds to add a byte of one gradient to the mean of an update."""

    update: NonNegative = 0.0
    """Seconds to update a byte of the weights."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCluster:
    """Learners, the servers that hold the weights, and the times of computation and links."""

    learners: int
    compute: ComputeTime
    """Seconds for the gradient of one mini-batch."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Factors on the time of all mini-batches of some learners, counted from 0."""

    link: SimulatedLink = field(default_factory=SimulatedLink)
    """Link of every learner."""

    server_link: SimulatedLink | None = None
    """Link of every server on a host of its own; None: the same as of a learner."""

    serving: Serving | None = None
    """None: servers take no time."""

    model_bytes: float = 0.0
    """Bytes of the weights, or of a gradient, over all servers."""

    shares: Sequence[float] = ()
    """Bytes on each server; empty: equal parts of model_bytes."""

    sharing: Literal["queue", "fair"] = "queue"
    """How messages share a link: one after the other, or all at the same time at fair rates, as TCP
    connections do. Fair rates take longer to simulate."""


class Simulation(NamedTuple):
    """The result of a simulation."""

    arrivals: list[list[Arrival]]
    """Arrivals at every server, in their order."""

    ends: FloatArray
    """Seconds from the start until all servers have made an update, one for each update."""


def simulate(
    rule: UpdateRule,
    cluster: SimulatedCluster,
    *,
    servers: int | None,
    updates: int,
    seed: int,
    first: int = 0,
) -> Simulation:
    """Simulate a number of updates of a cluster, in which each server makes its part of every one.

    `servers` is the number of hosts with shares of the weights, equal ones unless the cluster has
    others; None: every learner's host holds a share, which that learner reaches without a link.
    `first` is the number of the first update.

    Raises ValueError if rule and cluster have different numbers of learners, and for shares of
    another number of servers.
    """
    if rule.learners != cluster.learners:
        raise ValueError(
            f"the rule has {plural(rule.learners, 'learner')}, the cluster {cluster.learners}"
        )
    engine = _Engine(
        rule, cluster, servers=servers, seed=seed, updates=range(first, first + updates)
    )
    engine.run()
    arrivals = [server.arrivals for server in engine.servers]
    return Simulation(arrivals, np.max([server.ends for server in engine.servers], axis=0))


class LinkDirection:
    """One direction of a link: first come, first served."""

    __slots__ = ("_seconds_per_byte", "bandwidth", "free_at")

    def __init__(self, bandwidth: float | None) -> None:
        self.bandwidth = bandwidth
        """Bytes per second; None: no limit."""

        self._seconds_per_byte = 0.0 if bandwidth is None else 1 / bandwidth
        self.free_at = 0.0
        """Time at which all messages so far have been sent."""

    def send(self, now: float, size: float) -> float:
        """Send a message of `size` bytes and return the time of its last byte."""
        # A message waits for those before it. Nothing else need be simulated of a queue.
        self.free_at = max(now, self.free_at) + size * self._seconds_per_byte
        return self.free_at


class _Host:
    def __init__(self, link: SimulatedLink) -> None:
        self.inward = LinkDirection(link.bandwidth)
        self.outward = LinkDirection(link.bandwidth)
        self.latency = link.latency


class _Server:
    """The clock of one server, and the record of its gradients."""

    def __init__(self, host: _Host, share: float, clock: int) -> None:
        self.host = host
        self.share = share
        self.clock = clock
        self.work = LinkDirection(1.0)  # in seconds
        self.arrived = 0  # with those that wait for the server
        self.pushed: list[_Connection] = []  # whose gradients the next update has so far
        self.ends: list[float] = []
        self.arrivals: list[Arrival] = []


class _Learner:
    """The state of a learner in its rounds of pull, compute and push."""

    def __init__(self, number: int, host: _Host, seconds: Iterator[float]) -> None:
        self.number = number
        self.host = host
        self.seconds = seconds
        self.connections: list[_Connection] = []
        self.mini_batch = -1
        self.expect(0)

    def expect(self, answers: int) -> None:
        self._missing = answers
        self.ready_at = 0.0

    def waits_after(self, at: float) -> bool:
        """Count an answer at a time; return True if others are missing."""
        self._missing -= 1
        self.ready_at = max(self.ready_at, at)
        return self._missing > 0


@dataclass(eq=False, slots=True)
class _Connection:
    """The messages between one learner and one server."""

    learner: _Learner
    server: _Server
    latency: float
    clock_read: int = 0


class _Engine:
    def __init__(
        self,
        rule: UpdateRule,
        cluster: SimulatedCluster,
        *,
        servers: int | None,
        seed: int,
        updates: range,
    ) -> None:
        self.env = require_simpy().Environment()
        self._rule = rule
        self._mini_batches = MiniBatches(rule, updates)
        hosts = [_Host(cluster.link) for _ in range(cluster.learners)]
        link = cluster.server_link or cluster.link
        # A server beside a learner has its host, and so its link; its own learner reaches it
        # without.
        server_hosts = hosts if servers is None else [_Host(link) for _ in range(servers)]
        shares = cluster.shares or [cluster.model_bytes / len(server_hosts)] * len(server_hosts)
        self.servers = [
            _Server(host, share, updates.start)
            for host, share in zip(server_hosts, shares, strict=True)
        ]
        self._fair = FairLinks(self.env) if cluster.sharing == "fair" else None
        serving = cluster.serving or Serving()
        self._pull_seconds = serving.pull
        """Seconds per byte to copy weights, and to make an update of all its gradients."""

        self._update_seconds = rule.gradients * serving.gradient + serving.update
        self._learners = []
        for number, host in enumerate(hosts):
            factor = cluster.slow.get(number, 1.0)
            seconds = compute_times(cluster.compute, seed=seed, learner=number, factor=factor)
            learner = _Learner(number, host, seconds)
            for server in self.servers:
                latency = 0.0 if host is server.host else host.latency + server.host.latency
                learner.connections.append(_Connection(learner, server, latency))
            self._learners.append(learner)

    def run(self) -> None:
        for learner in self._learners:
            self._ask(learner.connections[:1], 0.0)
        self.env.run()

    def _at(self, seconds: float, call: Callable[[], None]) -> None:
        delay = seconds - self.env.now
        # Called directly: an event for what happens now would only cost time.
        if delay <= 0:
            call()
        else:
            self.env.timeout(delay).callbacks.append(lambda _: call())

    def _ask(self, connections: Sequence[_Connection], begin: float) -> None:
        connections[0].learner.expect(len(connections))
        for connection in connections:
            self._at(begin + connection.latency, partial(self._read, connection))

    def _read(self, connection: _Connection) -> None:
        server = connection.server
        end = server.work.send(self.env.now, self._pull_seconds * server.share)
        self._at(end, partial(self._answer, connection))

    def _answer(self, connection: _Connection) -> None:
        learner, server = connection.learner, connection.server
        # As in the real protocol, the first server hands out the mini-batches, and the others are
        # asked after its answer.
        if server is self.servers[0]:
            number = self._mini_batches.next(learner.number)
            if number is None:
                return
            learner.mini_batch = number
        connection.clock_read = server.clock
        take = partial(self._take_weights, connection)
        self._send(connection, server.host, learner.host, take)

    def _take_weights(self, connection: _Connection, at: float) -> None:
        learner = connection.learner
        if learner.waits_after(at):
            return
        if connection.server is self.servers[0] and len(self.servers) > 1:
            self._ask(learner.connections[1:], learner.ready_at)
        else:
            self._at(learner.ready_at + next(learner.seconds), partial(self._push, learner))

    def _push(self, learner: _Learner) -> None:
        learner.expect(len(learner.connections))
        for connection in learner.connections:
            receive = partial(self._receive, connection)
            arrive = partial(self._at, call=receive)
            self._send(connection, learner.host, connection.server.host, arrive)

    def _receive(self, connection: _Connection) -> None:
        server = connection.server
        server.arrived += 1
        # The server adds up gradients and updates when the last one has arrived, one update after
        # the other.
        completes = server.arrived % self._rule.gradients == 0
        seconds = self._update_seconds * server.share if completes else 0.0
        end = server.work.send(self.env.now, seconds)
        self._at(end, partial(self._take_gradient, connection))

    def _take_gradient(self, connection: _Connection) -> None:
        server, learner = connection.server, connection.learner
        update = server.clock
        read = connection.clock_read
        server.arrivals.append(
            Arrival(update, learner.number, read, update - read, learner.mini_batch)
        )
        server.pushed.append(connection)
        # Without waiting a learner goes on when its gradient was taken; else all go on with the
        # update.
        free: Sequence[_Connection] = () if self._rule.waits else (connection,)
        if len(server.pushed) == self._rule.gradients:
            free = server.pushed if self._rule.waits else free
            server.pushed = []
            server.ends.append(self.env.now)
            server.clock += 1
        for freed in free:
            if not freed.learner.waits_after(self.env.now + freed.latency):
                self._ask(freed.learner.connections[:1], freed.learner.ready_at)

    def _send(
        self, connection: _Connection, source: _Host, target: _Host, arrive: "Arrive"
    ) -> None:
        """Send one server's share of the weights; call `arrive` with the time of arrival."""
        now = self.env.now
        share = connection.server.share
        latency = connection.latency
        if source is target:
            arrive(now)
            return
        if self._fair is not None:
            ends = [end for end in (source.outward, target.inward) if end.bandwidth]
            self._fair.send(ends, share, lambda at: arrive(at + latency))
            return
        begin = source.outward.free_at
        sent = source.outward.send(now, share)

        def receive() -> None:
            received = target.inward.send(self.env.now, share)
            arrive(max(sent, received) + latency)

        # The receiving end is entered when the sending one begins with the message, since bytes
        # stream through both. Its last byte comes when the slower of the two has passed it.
        self._at(begin, receive)


Arrive = Callable[[float], object]
"""Called with the time at which the last byte arrives."""

_ROUNDING = 1e-9  # share of a message that is left by rounding when it ends


@dataclass(eq=False, slots=True)
class _SimulatedMessage:
    ends: Sequence[LinkDirection]
    size: float
    arrive: Arrive
    left: float
    rate: float = 0.0


class FairLinks:
    """The messages under way between hosts, which share links as TCP connections do.

    Rates are max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): the end of a link
    with the least for each of its messages fixes their rates, then the next one among the rest.
    """

    def __init__(self, env: "simpy.Environment") -> None:
        self._env = env
        self._under_way: list[_SimulatedMessage] = []
        self._at = 0.0
        """Time up to which what is left of the messages is known."""

        self._plans = 0
        """Number of times that the rates were set or are about to be; older events do nothing."""

    def send(self, ends: Sequence[LinkDirection], size: float, arrive: Arrive) -> None:
        """Send a message over the ends of links; without any it arrives immediately."""
        if not ends or not size:
            arrive(self._env.now)
            return
        self._advance()
        self._under_way.append(_SimulatedMessage(ends, size, arrive, left=size))
        self._plan(0.0)

    def _advance(self) -> None:
        passed = self._env.now - self._at
        self._at = self._env.now
        # Rates are constant between two events, so what is left falls linearly.
        for message in self._under_way:
            message.left -= message.rate * passed

    def _plan(self, delay: float) -> None:
        self._plans += 1
        number = self._plans

        def fire(_: object) -> None:
            if number == self._plans:
                self._deliver()

        self._env.timeout(delay).callbacks.append(fire)

    def _deliver(self) -> None:
        self._advance()
        ended = [one for one in self._under_way if one.left <= _ROUNDING * one.size]
        if ended:
            self._under_way = [one for one in self._under_way if one not in ended]
            self._plan(0.0)  # after all that these messages set off now
            for message in ended:
                message.arrive(self._env.now)
        elif self._under_way:
            _set_rates(self._under_way)
            self._plan(min(one.left / one.rate for one in self._under_way))


def _set_rates(messages: Sequence[_SimulatedMessage]) -> None:
    users: dict[LinkDirection, list[_SimulatedMessage]] = {}
    for message in messages:
        for end in message.ends:
            users.setdefault(end, []).append(message)
    free = {end: end.bandwidth or math.inf for end in users}
    while users:
        # Max-min fairness by progressive filling: the end with the least for each message fixes its
        # messages, and what these leave at other ends is divided among the rest.
        tightest = min(users, key=lambda end: free[end] / len(users[end]))
        rate = free[tightest] / len(users[tightest])
        for message in users.pop(tightest):
            message.rate = rate
            for other in message.ends:
                if other in users:
                    users[other].remove(message)
                    free[other] -= rate
                    if not users[other]:
                        del users[other]
