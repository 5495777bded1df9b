"""Digests of samples: equal exactly if the samples have the same bits."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from largebatch.audit.restoring import global_states


def fingerprint(sample: object) -> int:
    """Return a number of 56 bits: a digest of the tensors, arrays, images and values in a sample.

    >>> fingerprint((torch.zeros(2), 1)) == fingerprint((torch.zeros(2), 1))
    True
    >>> fingerprint((torch.zeros(2), 1)) == fingerprint((torch.zeros(2), 2))
    False
    """
    digest = hashlib.blake2b(digest_size=7)
    for leaf in tree_leaves(sample):
        digest.update(type(leaf).__name__.encode())
        digest.update(_content(leaf))
    return int.from_bytes(digest.digest())


def _content(leaf: object) -> bytes:
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        return str(tuple(leaf.shape)).encode() + flat.view(torch.uint8).numpy().tobytes()
    if hasattr(leaf, "tobytes"):  # arrays of NumPy and images of Pillow
        content: bytes = leaf.tobytes()
        return content
    return repr(leaf).encode()


def seed_generators() -> None:
    """Seed Python's, NumPy's and torch's generators with 0."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@contextmanager
def same_generators() -> Iterator[None]:
    """Seed Python's, NumPy's and torch's generators with 0 in this block, and restore them."""
    restores = global_states()
    seed_generators()
    try:
        yield
    finally:
        for restore in restores:
            restore()
