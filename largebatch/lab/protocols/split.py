"""Divides tensors over servers: each has an equal part of every tensor, however large.

Servers hold whole tensors by default, because LARS needs their norms; where one tensor is most of a
model, so is the part of its server. SGD changes each number by itself, so its servers may hold any
part of a tensor, and an update has the same bits.

The parts are views, so the exchange of whole tensors is used as it is.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from largebatch.lab.protocols.server import MOMENTUM, divide
from largebatch.lab.protocols.service import Gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHANNELS_LAST = (0, 2, 3, 1)


def server_bytes(weights: Sequence[Tensor], servers: int, *, split: bool) -> list[int]:
    """Return the bytes of the weights on each server.

    >>> matrix, bias = torch.zeros(10, 3), torch.zeros(4)
    >>> server_bytes([matrix, bias], 2, split=False), server_bytes([matrix, bias], 2, split=True)
    ([120, 16], [68, 68])
    """
    held = [part for weight in weights for part in _parts(weight, servers)] if split else weights
    sizes = [part.nbytes for part in held]
    return [sum(sizes[number] for number in own) for own in divide(sizes, servers)]


@contextmanager
def split_over(
    servers: int, weights: Sequence[Tensor], optimizer: Optimizer, gradient: Gradient
) -> "Iterator[tuple[list[Tensor], Optimizer, Gradient]]":
    """Yield the parts of some weights, an optimizer that holds these, and the gradients of these.

    The parts share the memory of `weights`. The momentum of `optimizer`, which is an SGD, is
    divided too, and put together again at the end.
    """
    assert isinstance(optimizer, SGD)
    parts = {weight: _parts(weight.detach(), servers) for weight in weights}
    groups = [
        {**group, "params": [part for weight in group["params"] for part in parts.get(weight, ())]}
        for group in optimizer.param_groups
    ]
    own = SGD(groups, lr=0.0)
    for weight, pieces in parts.items():
        if (momentum := optimizer.state.get(weight, {}).get(MOMENTUM)) is not None:
            for piece, values in zip(pieces, _parts(momentum, servers, like=weight), strict=True):
                own.state[piece][MOMENTUM] = values

    def of(mini_batch: int) -> tuple[list[Tensor], float]:
        found, loss = gradient(mini_batch)
        pairs = zip(found, weights, strict=True)
        return [part for one, like in pairs for part in _parts(one, servers, like=like)], loss

    yield [part for pieces in parts.values() for part in pieces], own, of
    for weight, pieces in parts.items():
        if MOMENTUM in own.state.get(pieces[0], {}):
            momentum = torch.empty_like(weight)
            held = [own.state[piece][MOMENTUM] for piece in pieces]
            _flat(momentum, like=weight).copy_(torch.cat(held))
            optimizer.state[weight][MOMENTUM] = momentum


def _parts(tensor: Tensor, number: int, *, like: Tensor | None = None) -> list[Tensor]:
    """Return a tensor in equal flat parts, fewer for one with fewer numbers."""
    flat = _flat(tensor, like=tensor if like is None else like)
    return list(flat.tensor_split(min(number, len(flat))))


def _flat(tensor: Tensor, *, like: Tensor) -> Tensor:
    """Return the numbers of a tensor in the order of the memory of `like`; a view where they are.

    A convolution's weight in the channels-last format is not contiguous.
    """
    if like.ndim == len(_CHANNELS_LAST) and not like.is_contiguous():
        tensor = tensor.permute(_CHANNELS_LAST)
    return tensor.reshape(-1)
