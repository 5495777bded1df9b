"""Split images into training and validation: a fraction of every class, by names and a seed.

The order, time and content of the files do not matter. So the same names give the same division on
every machine, and adding images to one class does not change another.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from largebatch.errors import DataError


@dataclass(frozen=True, slots=True)
class Division:
    """Fraction of every class that is used for validation."""

    fraction: float
    seed: int

    def validating(self, class_name: str, names: Sequence[str]) -> set[str]:
        """Return the validation images of a class: at least one, the names of smallest hashes.

        Raises DataError if none would be left for training.
        """
        number = max(1, round(self.fraction * len(names)))
        if number >= len(names):
            raise DataError(
                f"class {class_name} has {len(names)} images, of which {number} would be used for "
                "validation; expected at least one for training: add images, or lower "
                "--val-fraction"
            )

        def key(name: str) -> bytes:
            text = os.fsencode(f"{self.seed}/{class_name}/{name}")
            return hashlib.blake2b(text, digest_size=16).digest()

        return set(sorted(names, key=key)[:number])

    def describe(self) -> str:
        """Return a line that describes the division."""
        return (
            f"val: {self.fraction:.4g} of every class, at least one image: the names with the "
            f"smallest hashes with seed {self.seed}; the same names give the same division"
        )
