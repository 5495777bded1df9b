"""Checks that all workers have the same command, recipe, packages and weights.

The workers sum checksums of fixed size, so the exchange works for any difference and any number of
workers. All see the same sum and so take the same branch: continue, or exchange the facts
themselves and raise one error.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend, Group
from largebatch.errors import DesynchronizedError, MismatchError, shorten
from largebatch.formatting import dotted

Facts = Mapping[str, object]
"""Plain values by key, nested like a recipe. None is equivalent to a missing key."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 64
"""Words that are summed before they are weighted by their place."""

_REMEDY = "start every worker with the same command, recipe, packages and type of device"


def require_agreement(
    facts: Facts, group: Group, device: torch.device, *, remedy: str = _REMEDY
) -> None:
    """Raise MismatchError on every worker unless all of them have the same facts.

    If they do, this is one all-reduce of 512 bytes. `device` is that of the group's tensors.
    """
    if group.world_size == 1:
        return
    own = {key: it for key, it in sorted(dotted(facts)) if it not in (None, {})}
    everyone = gather_unequal(own, group, device)
    if everyone is not None:
        require_same(everyone, remedy=remedy)


def gather_unequal(own: object, group: Group, device: torch.device) -> list[Any] | None:
    """Return the plain values of every worker, by rank; None if all are equal, by checksums.

    The checksums are compared by one all-reduce: n sum(b^2) = sum(b)^2 holds only for equal numbers
    (Cauchy-Schwarz), and integer sums are exact.
    """
    content = json.dumps(own, default=str)
    digest = [*hashlib.sha256(content.encode()).digest()]
    numbers = torch.tensor([digest, [byte**2 for byte in digest]])
    sums = numbers.to(device)  # the rest is computed by the host, which reads the sums anyway
    group.all_reduce(sums).wait()
    total, squares = sums.tolist()  # sync: once, before training or in many updates
    pairs = zip(total, squares, strict=True)
    if all(group.world_size * square == byte**2 for byte, square in pairs):
        return None
    return gather_values(json.loads(content), group, device)


def agree(
    refusals: Mapping[str, str | None], group: Group, device: torch.device
) -> dict[str, str | None]:
    """Return why any worker refuses each subject; None if all of them accept it.

    Every worker gets the same result for its subjects, with the reason of the lowest worker that
    refuses. If all are equal, this is one all-reduce of 512 bytes. `device` is that of
    the group's tensors.

    >>> from largebatch.distributed.serial import Serial
    >>> cpu = torch.device("cpu")
    >>> agree({"kernels": None, "graph": "too slow"}, Serial(cpu), cpu)
    {'kernels': None, 'graph': 'too slow'}
    """
    if group.world_size == 1:
        return dict(refusals)
    everyone = gather_unequal(refusals, group, device)
    if everyone is None:
        return dict(refusals)
    agreed: dict[str, str | None] = {}
    for subject in refusals:
        reasons = {rank: own[subject] for rank, own in enumerate(everyone) if own.get(subject)}
        agreed[subject] = next((f"{it} (worker {rank})" for rank, it in reasons.items()), None)
    return agreed


def gather_values(own: object, group: Group, device: torch.device) -> list[Any]:
    """Return the plain values of every worker, by rank; they are sent as JSON."""
    content = json.dumps(own).encode("ascii")
    sizes = group.all_gather(torch.tensor(len(content), device=device))
    size = int(sizes.max().item())  # sync: before training or between updates
    texts = group.all_gather(_tensor(content.ljust(size), device))  # JSON may end in spaces
    return [json.loads(text.numpy().tobytes()) for text in texts.cpu()]  # sync: as above


def share_weights(model: nn.Module, backend: Backend, *, facts: Facts) -> None:
    """Send worker 0's weights and buffers to every worker.

    Raises MismatchError on every worker if their models or the other `facts` differ: tensors of
    different shapes would be waited for without end.
    """
    tensors = model.state_dict()
    shapes = {name: shape(tensor) for name, tensor in tensors.items()}
    require_agreement({**facts, "state_dict": shapes}, backend, backend.device)
    for tensor in tensors.values():
        backend.broadcast(tensor)


def require_same(facts: Sequence[Mapping[str, Any]], *, remedy: str = _REMEDY) -> None:
    """Raise MismatchError unless the facts of all workers, ordered by rank, are equal.

    >>> require_same([{"seed": 1}, {"seed": 2}, {"seed": 1}])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    largebatch.errors.MismatchError: workers disagree on seed: 1 on workers 0, 2 and 2 on ...
    """
    different = []
    for key in sorted({key for own in facts for key in own}):
        ranks: dict[str, list[str]] = {}
        for rank, own in enumerate(facts):
            value = json.dumps(own.get(key), ensure_ascii=False, sort_keys=True)
            ranks.setdefault(value, []).append(str(rank))
        if len(ranks) > 1:
            values = [
                f"{value} on worker{'s' if len(workers) > 1 else ''} {shorten(workers)}"
                for value, workers in ranks.items()
            ]
            different.append(f"{key}: {shorten(values, between=' and ')}")
    if different:
        shown = shorten(different, between="\n  ")
        raise MismatchError(f"workers disagree on {shown}; {remedy}")


def require_same_bits(
    tensors: Iterable[Tensor],
    group: Group,
    device: torch.device,
    *,
    when: str,
) -> None:
    """Raise DesynchronizedError on every worker unless all of them hold the same tensors.

    Sums of the bits are compared, so any single different bit is found. This is one pass over the
    tensors and an all-reduce of 512 bytes.
    """
    if group.world_size == 1:
        return
    remedy = "a machine or a library computes incorrectly; the weights were equal in the last "
    remedy += "checkpoint: check the machines of the fewer workers, and continue with --resume"
    facts = {f"sum of the weights' bits at {when}": sum_of_bits(tensors)}
    try:
        require_agreement(facts, group, device, remedy=remedy)
    except MismatchError as error:
        raise DesynchronizedError(str(error)) from None


def sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Return the sum of the digests of tensors, which is independent of their order."""
    digests = [digest(it) for it in tensors]
    return int(sum(it.to(digests[0].device) for it in digests))  # sync: once in many updates


def digest(tensor: Tensor) -> Tensor:
    """Return an integer that any single different bit of a tensor changes: 0-d, int64.

    It is computed on the tensor's device, over 8 bytes at a time in the order of its memory. Sums
    of rows are weighted by odd numbers modulo 2^64, so that equal errors of opposite sign in two
    rows do not cancel.
    """
    numbers = in_memory_order(tensor)
    in_word = 8 // numbers.element_size()
    if numbers.storage_offset() % in_word:
        numbers = numbers.clone()  # words begin where the tensor does
    whole = len(numbers) // in_word * in_word
    words = numbers[:whole].view(torch.int64)
    if whole == len(numbers) and len(words) <= _ROW:
        return words.sum()
    in_rows = len(words) // _ROW * _ROW
    rows = words[:in_rows].view(-1, _ROW).sum(1)
    rest = numbers[whole:].view(_INTEGERS[numbers.element_size()])
    ends = torch.stack([words[in_rows:].sum(), rest.sum(dtype=torch.int64)])
    sums = torch.cat([rows, ends])
    weights = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return (sums * weights).sum()


def in_memory_order(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor, flat and real; a view of its memory where it has no gaps."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1).contiguous()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the names and contents of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {shape(tensor)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def shape(tensor: Tensor) -> str:
    """Format a tensor's dtype and shape.

    >>> shape(torch.zeros(64, 3, dtype=torch.float16))
    'float16 [64, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tensor(content: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
