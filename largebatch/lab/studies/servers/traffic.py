"""What an update sends over the link of each host, by where the weights are.

With lambda workers, one on each host, and a model of M bytes of weights, of which the k-th
parameter server has M_k:

    central server k, on a host of its own    receives lambda M_k, sends lambda M_k
    worker of central servers                 sends M, receives M
    worker k with server k beside it          sends M - M_k + (lambda - 1) M_k, receives as much
    worker of a ring                          sends 2 M (lambda - 1) / lambda, receives as much

A worker pushes its gradient to all servers, and pulls the weights from all; what goes to the server
beside it crosses no link. So the links of S central servers of equal parts carry 2 lambda M / S in
both directions together (Li et al., OSDI 2014; Jaeger et al., DIDL 2018), and with equal parts a
worker with a server beside it sends 2 M (lambda - 1) / lambda, which is what one of a ring sends
(Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). Servers hold whole tensors: where one
tensor is most of the model, so is the part of its server.

Bytes are those of payload, without headers, and `received` and `sent` are one direction each.

>>> [link.sent for link in central([4], learners=2)]
[4.0, 4.0, 8.0]
>>> [link.sent for link in beside([10, 1, 1])]
[22.0, 13.0, 13.0]
>>> ring(12, workers=3)[0]
Traffic(received=16.0, sent=16.0)
"""

from collections.abc import Sequence
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes of payload in an update, over the link of one host."""

    received: float
    sent: float


def central(parts: Sequence[int], *, learners: int) -> list[Traffic]:
    """Return the links of the learners and then of the servers, which have these bytes each."""
    whole = float(sum(parts))
    servers = [Traffic(float(learners * part), float(learners * part)) for part in parts]
    return [Traffic(whole, whole)] * learners + servers


def beside(parts: Sequence[int]) -> list[Traffic]:
    """Return the links of learners, beside each of which is a server with these bytes."""
    learners, whole = len(parts), sum(parts)
    each = [float(whole - part + (learners - 1) * part) for part in parts]
    return [Traffic(bytes_, bytes_) for bytes_ in each]


def ring(model_bytes: int, *, workers: int) -> list[Traffic]:
    """Return the links of workers that sum their gradients in a ring."""
    each = 2 * model_bytes * (workers - 1) / workers
    return [Traffic(each, each)] * workers
