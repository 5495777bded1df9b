"""The pictures of one run: which batches one worker sees, in which order, in every stage.

Everything here is a function of the recipe, the plan and the worker's rank; the decoder that was
chosen only turns the requests into tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from largebatch.backends import broadcast_bytes
from largebatch.contracts import Backend, Batches, Request
from largebatch.data import clean_request, dali, digits, synthetic, torchvision, train_request
from largebatch.data.index import Index, check_same_classes, from_bytes, load_or_read, to_bytes
from largebatch.data.order import sample_ids
from largebatch.errors import DataError
from largebatch.plan import Plan
from largebatch.recipe import Data, Recipe
from largebatch.workers import available_cores

Decode = Callable[[Index, Iterator[Request]], Batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Opens the batches of every stage for one worker."""

    recipe: Recipe
    plan: Plan
    rank: int
    train_index: Index
    val_index: Index
    decode: Decode

    def training(self, steps: range, *, clean: bool) -> Batches:
        """Return the device batches of these updates, `accumulation` for each.

        Clean pictures are prepared like validation pictures, in the same order of samples.
        """
        return self.decode(self.train_index, self._training_requests(steps, clean=clean))

    def validation(self) -> Batches:
        """Return this worker's share of the validation pictures, which may be none."""
        return self.decode(self.val_index, self._clean(self.val_index, np.arange(self._val_size)))

    def statistics(self, num_samples: int) -> Batches:
        """Return this worker's share of the first `num_samples` of the training order, clean."""
        samples = sample_ids(
            range(num_samples), seed=self.recipe.seed, num_samples=self.plan.train_samples
        )
        return self.decode(self.train_index, self._clean(self.train_index, samples))

    @property
    def _val_size(self) -> int:
        return len(self.val_index)

    def _training_requests(self, steps: range, *, clean: bool) -> Iterator[Request]:
        data, seed = self.recipe.data, self.recipe.seed
        for step in steps:
            for micro in range(self.plan.accumulation):
                positions = self.plan.positions(step, micro, self.rank)
                if clean:
                    samples = sample_ids(positions, seed=seed, num_samples=self.plan.train_samples)
                    yield self._clean_request(self.train_index, samples)
                else:
                    yield train_request(
                        self.train_index,
                        positions,
                        seed=seed,
                        area=data.crop_area,
                        aspect=data.crop_aspect,
                        flip=data.flip,
                    )

    def _clean(self, index: Index, samples: np.ndarray) -> Iterator[Request]:
        """Deal device batches out to the workers in turn; only the very last may be smaller."""
        size = self.plan.device_batch
        for start in range(self.rank * size, len(samples), self.plan.workers * size):
            yield self._clean_request(index, samples[start : start + size])

    def _clean_request(self, index: Index, samples: np.ndarray) -> Request:
        data = self.recipe.data
        return clean_request(index, samples, image_size=data.image_size, resize=data.eval_resize)


def open_pipeline(
    recipe: Recipe, plan: Plan, backend: Backend, *, folder: Path | None, decoder: str | None
) -> Pipeline:
    """Find the pictures a recipe names and prepare to decode them on this worker's device.

    Worker 0 reads and judges the folder and gives the index to the others. Raises DataError where
    the folder is not what the recipe describes, MissingPackageError where the decoder is missing.
    """
    data = recipe.data
    _refuse_unused(data, folder, decoder)
    train, val = _open_indexes(data, backend, folder)
    decode = partial(
        _choose_decode(data, decoder),
        image_size=data.image_size,
        mean=data.mean,
        std=data.std,
        device=backend.device,
        threads=max(1, available_cores() // backend.local_size),
        batch_size=plan.device_batch,
    )
    decode(train, iter(())).close()  # a missing decoder is found out here, not in the run
    return Pipeline(
        recipe=recipe,
        plan=plan,
        rank=backend.rank,
        train_index=train,
        val_index=val,
        decode=decode,
    )


def _choose_decode(data: Data, decoder: str | None) -> Callable[..., Batches]:
    if data.source == "synthetic":
        return synthetic.decode
    return dali.decode if (decoder or data.decoder) == "dali" else torchvision.decode


def _refuse_unused(data: Data, folder: Path | None, decoder: str | None) -> None:
    if folder is not None and data.source != "folder":
        raise DataError(
            f"--data {folder} would not be read: the recipe's data.source is {data.source}"
        )
    if decoder is not None and data.source == "synthetic":
        raise DataError(f"--decoder {decoder} would not be used: the pictures are synthetic")


def _open_indexes(data: Data, backend: Backend, folder: Path | None) -> tuple[Index, Index]:
    if data.source == "synthetic":
        sizes = (data.train_samples, data.val_samples)
        train, val = (synthetic.synthetic_index(n, data.classes, data.image_size) for n in sizes)
        return train, val
    contents: list[bytes | None] = [None, None]
    if backend.rank == 0:
        root = _root(data, folder)
        train, val = (load_or_read(root, split) for split in ("train", "val"))
        _check(data, train, val)
        contents = [to_bytes(train), to_bytes(val)]
    train, val = (from_bytes(broadcast_bytes(content, backend)) for content in contents)
    return train, val


def _root(data: Data, folder: Path | None) -> Path:
    if data.source == "digits":
        return digits.write_digits()
    if folder is None:
        raise DataError(
            "this recipe reads pictures from a folder: say which with --data DIR "
            "(DIR/train/<class>/* and DIR/val/<class>/*)"
        )
    return folder


def _check(data: Data, train: Index, val: Index) -> None:
    """Refuse pictures that are not the ones the recipe was written for."""
    check_same_classes(train, val)
    found = {
        "classes": len(train.classes),
        "train_samples": len(train),
        "val_samples": len(val),
    }
    wrong = {key: number for key, number in found.items() if number != getattr(data, key)}
    if wrong:
        expected = ", ".join(f"{key} {getattr(data, key)}" for key in wrong)
        actual = ", ".join(f"{key} {number}" for key, number in wrong.items())
        change = " ".join(f"--set data.{key}={number}" for key, number in wrong.items())
        raise DataError(
            f"{train.root}: the recipe describes {expected}, the folder has {actual}; if that is "
            f"meant, add {change}"
        )
