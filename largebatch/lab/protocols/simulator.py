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

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from largebatch.lab.protocols.cluster import Cluster, FloatArray, Link, Serving, compute_times
from largebatch.lab.protocols.rule import MiniBatches, Rule
from largebatch.lab.protocols.server import Arrivals
from largebatch.optional import require_simpy

if TYPE_CHECKING:
    import simpy


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of a simulation."""

    arrivals: tuple[Arrivals, ...]
    """Arrivals of every server."""

    ends: FloatArray
    """Seconds from the start until all servers have made an update, one for each update."""

    @property
    def seconds_per_update(self) -> float:
        """Mean seconds per update over the whole simulation."""
        return float(self.ends[-1] / len(self.ends))


def simulate(
    rule: Rule,
    cluster: Cluster,
    *,
    servers: int | None,
    updates: int,
    seed: int,
) -> Simulation:
    """Simulate a number of updates of a cluster, in which each server makes its part of every one.

    `servers` is the number of hosts with shares of the weights, equal ones unless the cluster has
    others; None: every learner's host holds a share, which that learner reaches without a link.

    Raises ValueError if rule and cluster have different numbers of learners, and for shares of
    another number of servers.
    """
    if rule.learners != cluster.learners:
        raise ValueError(f"the rule has {rule.learners} learners, the cluster {cluster.learners}")
    engine = _Engine(rule, cluster, servers=servers, seed=seed)
    engine.run(updates)
    takes = rule.gradients
    ends = [np.frombuffer(server.seconds)[takes - 1 :: takes] for server in engine.servers]
    return Simulation(
        arrivals=tuple(server.arrivals() for server in engine.servers),
        ends=np.max(ends, axis=0),
    )


class Direction:
    """One direction of a link: first come, first served."""

    __slots__ = ("_seconds_per_byte", "free_at")

    def __init__(self, bandwidth: float | None) -> None:
        self._seconds_per_byte = 0.0 if bandwidth is None else 1 / bandwidth
        self.free_at = 0.0
        """Time at which all messages so far have been sent."""

    def send(self, now: float, size: float) -> float:
        """Send a message of `size` bytes and return the time of its last byte."""
        begin = max(now, self.free_at)
        self.free_at = begin + size * self._seconds_per_byte
        return self.free_at


class _Host:
    """A machine and its link."""

    __slots__ = ("fair_inward", "fair_outward", "inward", "latency", "outward")

    def __init__(self, link: Link) -> None:
        self.inward, self.outward = Direction(link.bandwidth), Direction(link.bandwidth)
        ends = [[End(link.bandwidth)] if link.bandwidth else [] for _ in range(2)]
        self.fair_inward, self.fair_outward = ends
        self.latency = link.latency


class _Server:
    """The clock of one server, and the record of its gradients."""

    __slots__ = ("_columns", "_free_at", "arrived", "clock", "host", "pushed", "seconds", "share")

    def __init__(self, host: _Host, share: float) -> None:
        self.host, self.share = host, share
        self._free_at = 0.0
        self.arrived = 0
        """Number of gradients received, with those that wait for the server."""

        self.clock = 0
        """Number of updates made."""

        self.pushed: list[_Connection] = []
        """Connections whose gradients the next update has so far."""

        self.seconds = array("d")
        """Times at which gradients were taken."""

        self._columns = tuple(array("q") for _ in range(4))

    def serve(self, now: float, seconds: float) -> float:
        """Take some seconds once the server is free; return the time of the end."""
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at

    def record(self, connection: "_Connection", now: float) -> None:
        learners, mini_batches, clocks, updates = self._columns
        learners.append(connection.learner.number)
        mini_batches.append(connection.learner.mini_batch)
        clocks.append(connection.clock_read)
        updates.append(self.clock)
        self.seconds.append(now)

    def arrivals(self) -> Arrivals:
        learner, mini_batch, clock_read, update = (
            np.frombuffer(column, dtype=np.int64) for column in self._columns
        )
        return Arrivals(
            learner=learner, mini_batch=mini_batch, clock_read=clock_read, update=update
        )


class _Learner:
    """The state of a learner in its rounds of pull, compute and push."""

    __slots__ = (
        *("_asked", "_engine", "_missing", "_seconds", "connections", "mini_batch", "number"),
        "ready_at",
    )

    def __init__(self, number: int, engine: "_Engine", seconds: Iterator[float]) -> None:
        self.number, self._engine, self._seconds = number, engine, seconds
        self.connections: tuple[_Connection, ...] = ()
        """Connections to all servers."""

        self.mini_batch = -1
        """Number of the current mini-batch, from the first server."""

    def pull(self, begin: float) -> None:
        self._asked = 1
        self._ask(self.connections[:1], begin)

    def push(self) -> None:
        self._expect(len(self.connections))
        for connection in self.connections:
            connection.send_gradient()

    def take_weights(self, at: float) -> None:
        if not self._was_last(at):
            return
        if self._asked < len(self.connections):
            self._asked = len(self.connections)
            self._ask(self.connections[1:], self.ready_at)
            return
        self._engine.at(self.ready_at + next(self._seconds), self.push)

    def acknowledge(self, at: float) -> None:
        if self._was_last(at):
            self.pull(self.ready_at)

    def _ask(self, connections: Sequence["_Connection"], begin: float) -> None:
        self._expect(len(connections))
        for connection in connections:
            self._engine.at(begin + connection.latency, connection.read)

    def _expect(self, answers: int) -> None:
        self._missing, self.ready_at = answers, 0.0

    def _was_last(self, at: float) -> bool:
        self._missing -= 1
        self.ready_at = max(self.ready_at, at)
        return not self._missing


class _Connection:
    """The messages between one learner and one server."""

    __slots__ = ("_engine", "_host", "clock_read", "latency", "learner", "server")

    def __init__(self, engine: "_Engine", learner: _Learner, host: _Host, server: _Server) -> None:
        self._engine, self._host, self.learner, self.server = engine, host, learner, server
        self.clock_read = 0
        self.latency = 0.0 if host is server.host else host.latency + server.host.latency

    def read(self) -> None:
        engine = self._engine
        end = self.server.serve(engine.env.now, engine.pull_seconds * self.server.share)
        engine.at(end, self._answer)

    def _answer(self) -> None:
        engine, learner = self._engine, self.learner
        if self.server is engine.servers[0]:
            number = engine.mini_batches.next(learner.number)
            if number is None:
                return
            learner.mini_batch = number
        self.clock_read = self.server.clock
        self._send(self.server.host, self._host, learner.take_weights)

    def send_gradient(self) -> None:
        self._send(self._host, self.server.host, self._arrive)

    def _arrive(self, at: float) -> None:
        self._engine.at(at, self._receive)

    def _receive(self) -> None:
        engine, server = self._engine, self.server
        server.arrived += 1
        completes = server.arrived % engine.rule.gradients == 0
        seconds = engine.update_seconds * server.share if completes else 0.0
        end = server.serve(engine.env.now, seconds)
        engine.at(end, partial(engine.take, self))

    def _send(self, source: _Host, target: _Host, arrive: Callable[[float], None]) -> None:
        """Send one server's share of the weights; call `arrive` with the time of arrival."""
        engine, now = self._engine, self._engine.env.now
        if source is target:
            arrive(now)
            return
        share = self.server.share
        if engine.fair is not None:
            ends = [*source.fair_outward, *target.fair_inward]
            engine.fair.send(ends, share, lambda at: arrive(at + self.latency))
            return
        begin = source.outward.free_at
        sent = source.outward.send(now, share)

        def receive() -> None:
            received = target.inward.send(engine.env.now, share)
            arrive(max(sent, received) + self.latency)

        engine.at(begin, receive)


class _Engine:
    """The learners, the servers and the events between them."""

    def __init__(self, rule: Rule, cluster: Cluster, *, servers: int | None, seed: int) -> None:
        self.rule, self.env = rule, require_simpy().Environment()
        hosts = [_Host(cluster.link) for _ in range(cluster.learners)]
        link = cluster.server_link or cluster.link
        own = hosts if servers is None else [_Host(link) for _ in range(servers)]
        shares = cluster.shares or [cluster.model_bytes / len(own)] * len(own)
        self.servers = [_Server(host, share) for host, share in zip(own, shares, strict=True)]
        self.fair = FairLinks(self.env) if cluster.sharing == "fair" else None
        serving = cluster.serving or Serving()
        self.pull_seconds = serving.pull
        """Seconds per byte to copy weights, and to make an update of all its gradients."""

        self.update_seconds = rule.gradients * serving.gradient + serving.update
        self.learners = []
        for number, host in enumerate(hosts):
            factor = cluster.slow.get(number, 1.0)
            seconds = compute_times(cluster.compute, seed=seed, learner=number, factor=factor)
            learner = _Learner(number, self, seconds)
            learner.connections = tuple(
                _Connection(self, learner, host, server) for server in self.servers
            )
            self.learners.append(learner)

    def run(self, updates: int) -> None:
        self.mini_batches = MiniBatches(self.rule, range(updates))
        for learner in self.learners:
            learner.pull(0.0)
        self.env.run()

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call at a time; now if it is past."""
        delay = seconds - self.env.now
        if delay <= 0:
            call()
        else:
            self.env.timeout(delay).callbacks.append(lambda _: call())

    def take(self, connection: _Connection) -> None:
        server = connection.server
        server.record(connection, self.env.now)
        server.pushed.append(connection)
        free: Sequence[_Connection] = () if self.rule.waits else (connection,)
        if len(server.pushed) == self.rule.gradients:
            free = server.pushed if self.rule.waits else free
            server.pushed = []
            server.clock += 1
        for each in free:
            each.learner.acknowledge(self.env.now + each.latency)


Arrive = Callable[[float], object]
"""Called with the time at which the last byte arrives."""

_ROUNDING = 1e-9
"""Share of a message that is left by rounding when it ends."""


class End:
    """One direction of the link of a host."""

    __slots__ = ("bandwidth",)

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        """Bytes per second."""


class _Message:
    __slots__ = ("arrive", "ends", "left", "rate", "size")

    def __init__(self, ends: Sequence[End], size: float, arrive: Arrive) -> None:
        self.ends, self.size, self.arrive = ends, size, arrive
        self.left, self.rate = size, 0.0


class FairLinks:
    """The messages under way between hosts, which share links as TCP connections do.

    Rates are max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): the end of a link
    with the least for each of its messages fixes their rates, then the next one among the rest.
    """

    def __init__(self, env: "simpy.Environment") -> None:
        self._env = env
        self._under_way: list[_Message] = []
        self._at = 0.0
        """Time up to which what is left of the messages is known."""

        self._plans = 0
        """Number of times that the rates were set or are about to be; older events do nothing."""

    def send(self, ends: Sequence[End], size: float, arrive: Arrive) -> None:
        """Send a message over the ends of links; without any it arrives immediately."""
        if not ends or not size:
            arrive(self._env.now)
            return
        self._advance()
        self._under_way.append(_Message(ends, size, arrive))
        self._plan(0.0)

    def _advance(self) -> None:
        passed, self._at = self._env.now - self._at, self._env.now
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


def _set_rates(messages: Sequence[_Message]) -> None:
    users: dict[End, list[_Message]] = {}
    for message in messages:
        for end in message.ends:
            users.setdefault(end, []).append(message)
    free = {end: end.bandwidth for end in users}
    while users:
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
