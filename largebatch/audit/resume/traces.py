"""Digests and sketches of tensors, and digests of anything that a script saves or reads.

A sketch is a count sketch (Charikar, Chen and Farach-Colton 2002): each element is added to one of
16 sums, with a sign; place and sign are random functions of the element's position, equal in all
processes. The squared length of the difference of two sketches is an unbiased estimate of that of
the tensors.
"""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from largebatch.audit.resume.record import SKETCH, Trace

_SIZE = 12
"""Bytes of a digest."""

_BLOCK = 1 << 20
"""Elements of which places and signs are drawn together."""


def trace_of(tensor: Tensor) -> Trace:
    """Return digest, norm and sketch of a tensor on any device."""
    values = _on_host(tensor)
    digest = digest_of_tensor(values)
    flat = values.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    numbers = flat.double().numpy()
    sums = np.zeros(SKETCH)
    for block, start in enumerate(range(0, len(numbers), _BLOCK)):
        part = numbers[start : start + _BLOCK]
        places, signs = _random_of_block(block)
        count = len(part)
        sums += np.bincount(places[:count], part * signs[:count], minlength=SKETCH)
    # Six digits are enough for a distance, and halve the record.
    sketch = tuple(float(f"{value:.6g}") for value in sums)
    return Trace(digest=digest, norm=float(np.linalg.norm(numbers)), sketch=sketch)


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a digest of type, shape and bits of a tensor."""
    values = _on_host(tensor)
    content = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
    digest = hashlib.blake2b(f"{values.dtype} {tuple(values.shape)}".encode(), digest_size=_SIZE)
    digest.update(content)
    return digest.hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """Return a digest of bytes."""
    return hashlib.blake2b(content, digest_size=_SIZE).hexdigest()


def digest_of(value: object) -> str:
    """Return a digest of the keys, tensors, arrays, numbers and words in an object.

    Other objects count by their class only.
    """
    digest = hashlib.blake2b(digest_size=_SIZE)
    for path, leaf in tree_flatten_with_path(value)[0]:
        digest.update(f"{path} ".encode())
        digest.update(_leaf(leaf).encode())
    return digest.hexdigest()


def rows_of(tensor: Tensor) -> list[str]:
    """Return a digest of each row of a tensor with one dimension or more."""
    values = _on_host(tensor)
    return [digest_of_tensor(row) for row in values]


def _leaf(value: object) -> str:
    if isinstance(value, Tensor):
        return digest_of_tensor(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype} {value.shape} {digest_of_bytes(value.tobytes())}"
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    return type(value).__qualname__


def _on_host(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    if hasattr(values, "to_local"):  # a DTensor: this worker's part
        values = values.to_local()
    if values.is_sparse:
        values = values.to_dense()
    return values.cpu().contiguous().resolve_conj().resolve_neg()


@lru_cache(maxsize=64)
def _random_of_block(block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
    draws = np.random.Generator(np.random.Philox(key=block)).integers(
        0, 2 * SKETCH, _BLOCK, dtype=np.uint8
    )
    places = (draws % SKETCH).astype(np.int64)
    signs = np.where(draws < SKETCH, 1, -1).astype(np.int8)
    return places, signs
