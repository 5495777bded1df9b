"""Divide images off for validation: a part of every class, decided by names and a seed alone.

Neither the order nor the time nor the content of a file matters, so the same names give the same
division on every machine, and more images in one class change nothing in another.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.errors import DataError


@dataclass(frozen=True, slots=True)
class Division:
    """Which part of every class validates."""

    fraction: float
    seed: int

    def validating(self, class_name: str, names: Sequence[str]) -> set[str]:
        """Return those of the names of a class whose hashes are the smallest, at least one.

        Raises DataError where none would be left to train on.
        """
        number = max(1, round(self.fraction * len(names)))
        if number >= len(names):
            raise DataError(
                f"class {class_name} has {len(names)} images, and {number} of them would validate; "
                "expected at least one to train on: add images, or lower --val-fraction"
            )
        return set(sorted(names, key=lambda name: self._hash(class_name, name))[:number])

    def describe(self) -> str:
        """Return what was done, in words."""
        return (
            f"val: {self.fraction:.4g} of every class, at least one image: those whose names have "
            f"the smallest hashes with seed {self.seed}; the same names give the same again"
        )

    def _hash(self, class_name: str, name: str) -> bytes:
        key = os.fsencode(f"{self.seed}/{class_name}/{name}")
        return hashlib.blake2b(key, digest_size=16).digest()
