"""What an update sends by where the weights are, counted message by message."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

from largebatch.lab.studies.servers.traffic import Traffic, beside, central, ring

Message = tuple[int, int, float]
"""From one host to another one, and its bytes."""


def pushes_and_pulls(servers: Sequence[tuple[int, int]], *, learners: int) -> Iterator[Message]:
    """Yield every gradient and every weight; `servers` are hosts with the bytes of each part."""
    for learner in range(learners):
        for host, part in servers:
            yield learner, host, part
            yield host, learner, part


def ring_steps(bytes_: int, *, workers: int) -> Iterator[Message]:
    """Yield the parts of a ring: each goes around once to be summed, and once with the sum."""
    for _ in range(2 * (workers - 1)):
        for worker in range(workers):
            yield worker, (worker + 1) % workers, bytes_ / workers


def links(messages: Iterator[Message], *, hosts: int) -> list[Traffic]:
    received, sent = defaultdict[int, float](float), defaultdict[int, float](float)
    for source, target, bytes_ in messages:
        if source != target:  # what stays on a host crosses no link
            received[target] += bytes_
            sent[source] += bytes_
    return [Traffic(received[host], sent[host]) for host in range(hosts)]


@pytest.mark.parametrize("parts", [[60], [40, 20], [7, 50, 3]], ids=str)
def test_central_servers_carry_the_model_once_for_each_learner_and_direction(
    parts: list[int],
) -> None:
    servers = list(enumerate(parts, start=5))
    counted = links(pushes_and_pulls(servers, learners=5), hosts=5 + len(parts))
    assert central(parts, learners=5) == counted
    assert sum(sum(link) for link in counted[5:]) == 2 * 5 * 60  # 2 lambda M


@pytest.mark.parametrize("parts", [[30, 30], [15, 15, 15, 15], [40, 10, 6, 4]], ids=str)
def test_what_goes_to_the_server_beside_a_learner_crosses_no_link(parts: list[int]) -> None:
    counted = links(pushes_and_pulls(list(enumerate(parts)), learners=len(parts)), hosts=len(parts))
    assert beside(parts) == counted


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_equal_parts_beside_the_learners_send_what_a_ring_sends(workers: int) -> None:
    counted = links(ring_steps(24 * workers, workers=workers), hosts=workers)
    assert ring(24 * workers, workers=workers) == counted == beside([24] * workers)
