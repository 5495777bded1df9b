"""Links that all their messages share at the same time, as TCP connections do, on simpy's events.

Rates are max-min fair (Bertsekas and Gallager, Data Networks, section 6.5.2): the end of a link
with the least for each of its messages fixes their rates, then the next one among the rest.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import simpy

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
    """The messages under way between hosts."""

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
                self._go_on()

        self._env.timeout(delay).callbacks.append(fire)

    def _go_on(self) -> None:
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
