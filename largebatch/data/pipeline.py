"""Batches of images for one worker in every stage, in order.

Everything here is a function of the recipe, the plan and the worker's rank; the chosen decoder
only turns the requests into tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from largebatch import accelerator
from largebatch.data.augment import clean_request, train_request, translated
from largebatch.data.index.folder import describe
from largebatch.data.index.index import (
    Index,
    check_classes,
    index_of,
    open_content,
    share_index,
)
from largebatch.data.order import Stream, divide, samples_at
from largebatch.data.types import Batches, Decode, IntArray, Request, Resources, View
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import available_cores
from largebatch.errors import DataError
from largebatch.optional import require_dali, require_torchvision
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.data import Data
from largebatch.recipe.execution import Cache, Execution
from largebatch.recipe.recipe import Recipe
from largebatch.storage import Progress, silent

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the images on a GPU, by the recipe's precision."""

READS = 64
"""Images that a worker reads at a time, at most; fast storage uses fewer threads, down to one."""

MIN_EPOCHS = 2
"""Passes over the data from which decoding all images beforehand pays."""

OpenDecoder = Callable[[Index, View], AbstractContextManager[Decode]]
OpenWith = Callable[..., AbstractContextManager[Decode]]  # of an index, a view and `resources`
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Batches of every stage for one worker."""

    seed: int
    plan: Plan
    rank: int
    evaluated_samples: IntArray  # rows of the validation data that an evaluation measures
    held_out_samples: IntArray
    """Training samples excluded from training and statistics; they decide which stages are kept."""

    data: Data
    train_index: Index
    val_index: Index
    open_decoder: OpenDecoder
    channels_last: bool = False  # True if images are stored channels last, like the model's weights
    dtype: torch.dtype = torch.float32  # type of the images
    idle: dict[Split, tuple[ExitStack, Decode]] = field(default_factory=dict)
    """Open decoders of clean images that are not in use: opening one starts threads and, with DALI,
    builds a pipeline and allocates memory; all evaluations share one."""

    chosen: list[str] = field(default_factory=list)
    """Remarks about what was chosen for this machine."""

    @property
    def splits(self) -> dict[str, dict[str, object]]:
        """Identity of the images of each split."""
        return {"train": self.train_index.identity, "val": self.val_index.identity}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, by label."""
        return self.val_index.classes

    @property
    def remarks(self) -> list[str]:
        """Remarks that are logged at the start of a run: choices, and the ignored files."""
        described = (describe(index.ignored, where=w) for w, index in self._indexes().items())
        return [*self.chosen, *filter(None, described)]

    def _indexes(self) -> dict[str, Index]:
        val = {} if self.val_index is self.train_index else {"val": self.val_index}
        return {"train": self.train_index, **val}

    def training(self, steps: range, *, clean: bool) -> Batches:
        """Yield the device batches of these updates, `accumulation` per update."""
        return self.at(self.positions(steps), clean=clean)

    def at(self, parts: Iterable[range], *, clean: bool) -> Batches:
        """Yield a batch for each of these ranges of positions, in the image size of its first.

        Clean images are prepared like validation images, in the same order of samples. Augmented
        images may change size during the run, with one decoder per size.
        """
        usual = self.data.image_size

        def size_of(part: range) -> int:
            return usual if clean else self.plan.image_size(part.start, otherwise=usual)

        for size, several in groupby(parts, key=size_of):
            requests = (self.training_request(part, clean=clean) for part in several)
            yield from self.decode(self.train_index, requests, image_size=size)

    def decode(
        self, index: Index, requests: Iterable[Request], *, image_size: int | None = None
    ) -> Batches:
        """Yield a batch for each request, decoded to this size; the default is evaluation's."""
        with self.open_decoder(index, self.view(image_size)) as decode:
            yield from decode(requests)

    def view(self, image_size: int | None = None) -> View:
        """Return how images become the model's input, at this size or the evaluation's."""
        return View(
            image_size=image_size or self.data.image_size,
            mean=self.data.mean,
            std=self.data.std,
            interpolation=self.data.interpolation,
            channels_last=self.channels_last,
            dtype=self.dtype,
        )

    def training_samples(self, positions: range) -> IntArray:
        """Return the images at these positions of the run: each once per epoch, none held out."""
        index = self.train_index
        return samples_at(positions, seed=self.seed, num_samples=len(index), trained=index.trained)

    def clean(self, split: Split, parts: Iterator[IntArray]) -> Batches:
        """Yield batches of these images, prepared as in validation."""
        index = self.train_index if split == "train" else self.val_index
        requests = (self.clean_request(index, part) for part in parts)
        if split in self.idle:
            stack, decode = self.idle.pop(split)
        else:
            stack = ExitStack()
            decode = stack.enter_context(self.open_decoder(index, self.view()))
        with stack:  # closes the decoder if it has batches that nobody used
            yield from decode(requests)
            if split not in self.idle:
                self.idle[split] = stack.pop_all(), decode

    def close(self) -> None:
        """Release the decoders that stay open between evaluations."""
        while self.idle:
            self.idle.popitem()[1][0].close()

    def training_request(self, positions: range, *, clean: bool) -> Request:
        """Return the training request for these positions of the run."""
        if clean:
            return self.clean_request(self.train_index, self.training_samples(positions))
        return train_request(
            self.train_index,
            positions,
            seed=self.seed,
            area=self.data.crop_area,
            aspect=self.data.crop_aspect,
            flip=self.data.flip,
            translate=self.data.translate,
        )

    def clean_request(self, index: Index, samples: np.ndarray) -> Request:
        """Return the request for these samples, prepared as in validation."""
        size, resize = self.data.image_size, self.data.eval_resize
        return clean_request(index, samples, image_size=size, resize=resize)

    def validation(self) -> Batches:
        """Yield this worker's share of the validation samples, which may be empty."""
        return self.clean("val", self._dealt(self.evaluated_samples, size=self._evaluated_at_once))

    def statistics(self, num_samples: int) -> Batches:
        """Yield this worker's share of the first `num_samples` of the training order, clean.

        Every batch holds whole BatchNorm spans, even if several workers share a span in training.
        """
        samples = self.training_samples(range(num_samples))
        return self.clean("train", self._dealt(samples, size=self.plan.statistics_batch))

    def held_out(self) -> Batches:
        """Yield this worker's share of the held-out training samples, clean; it may be empty."""
        return self.clean("train", self._dealt(self.held_out_samples, size=self._evaluated_at_once))

    @property
    def validation_samples(self) -> IntArray:
        """Rows of the validation data in this worker's share, in the order of `validation`."""
        samples = self.evaluated_samples
        parts = self._dealt(samples, size=self._evaluated_at_once)
        return np.concatenate([*parts, samples[:0]])

    @property
    def _evaluated_at_once(self) -> int:
        return self.plan.evaluation_batch or self.plan.device_batch

    def positions(self, steps: range) -> Iterator[range]:
        """Yield the positions of this worker's device batches in these updates, in order."""
        for part, _, accumulation in self.plan.within(steps):
            for step, micro in product(part, range(accumulation)):
                yield self.plan.positions(step, micro, self.rank)

    def _dealt(self, samples: IntArray, *, size: int) -> Iterator[IntArray]:
        """Yield every n-th batch of `size` for n workers; only the very last may be smaller."""
        for start in range(self.rank * size, len(samples), self.plan.workers * size):
            yield samples[start : start + size]


def divide_samples(
    recipe: Recipe, num_train: int, num_val: int
) -> tuple[IntArray | None, IntArray, IntArray]:
    """Return the training samples (None: all), the validation samples and the deciding ones.

    The validation samples are training samples if the recipe holds some out for validation; the
    deciding ones decide which stages of polishing are kept.
    """
    trained, evaluated, decides = None, np.arange(num_val), np.empty(0, dtype=np.int64)
    section = recipe.data.held_out
    if section is not None:
        trained, evaluated = divide(
            num_train, held_out=section.samples, seed=section.seed, stream=Stream.VALIDATION
        )
    number = recipe.polish.held_out if recipe.polish else None
    if number is not None:
        rows = np.arange(num_train) if trained is None else trained
        kept, chosen = divide(len(rows), held_out=number, seed=recipe.seed)
        trained, decides = rows[kept], rows[chosen]
    return trained, evaluated, decides


def open_images(  # noqa: PLR0913 -- of the run, and how it is shown
    recipe: Recipe,
    plan: Plan,
    backend: Backend,
    *,
    folder: Path | str | None,
    dataset: str | None = None,
    progress: Progress = silent,
    fit: Callable[[], tuple[Plan, str]] | None = None,
) -> Pipeline:
    """Open the images of a recipe and prepare to decode them on this worker's device.

    They come from `folder` or from `dataset`, a function as in datasets/own.py. `progress` reports
    the indexing of a folder without an index and the decoding of cached images. `fit` returns the
    plan to use in place of `plan`, and a remark; it is called when cached images are on the device.

    Worker 0 reads and checks the folder and sends the index to the others. Raises DataError if
    the folder does not match the recipe, MissingPackageError if the decoder is not installed.
    """
    data, execution = recipe.data, recipe.execution
    folder = None if folder is None else Path(folder)
    recipe.refuse_folder(folder)
    device, threads = backend.device, max(1, available_cores() // backend.local_size)
    chosen: list[str] = []
    cache = execution.cache
    opened: OpenWith | None = None
    if dataset is not None:
        train, val, open_with = _open_own(data, execution, dataset, folder, backend)
    else:
        # Where pixels are cached, training reads no files: all are compared with the index now.
        open_indexes = partial(_open_indexes, data, backend, folder, progress=progress)
        train, val = open_indexes(every_file=cache in {"memory", "device"})
        if cache is None and data.source != "synthetic":
            cache = _choose_cache(recipe, plan, [train, val], backend)
            if cache is not None:
                train, val = open_indexes(every_file=True)
        if cache == "device" and not accelerator.is_remote(device):
            cache = "memory"  # the host's memory is the device's
        if cache in {"memory", "device"}:
            open_cached = partial(_open_cached, [train, val], backend, threads, progress)
            if execution.cache is not None:
                opened = open_cached(cache)
            else:
                cache, opened, remark = _open_chosen(cache, open_cached, [train, val], backend)
                chosen.append(remark)
        open_with = opened or _decoder(data, execution)
    plan, *reasons = (plan,) if fit is None else fit()
    chosen += reasons
    largest = max(plan.device_batch, plan.statistics_batch)
    resources = Resources(device, threads, largest, reads=execution.reads or READS)
    open_decoder: OpenDecoder = partial(open_with, resources=resources)
    if cache != "device":  # which moves images itself
        open_decoder = partial(_moving, open_decoder)
    trained, evaluated, held_out = divide_samples(recipe, len(train), len(val))
    train = replace(train, trained=trained)
    return Pipeline(
        seed=recipe.seed,
        plan=plan,
        rank=backend.rank,
        data=data,
        train_index=train,
        val_index=val if data.held_out is None else train,
        open_decoder=open_decoder,
        channels_last=execution.channels_last(device.type),
        # On a GPU the first layer would convert them itself; so they take half of its memory.
        dtype=DTYPES[recipe.precision] if accelerator.is_remote(device) else torch.float32,
        evaluated_samples=evaluated,
        held_out_samples=held_out,
        chosen=chosen,
    )


def _moving(open_decoder: OpenDecoder, index: Index, view: View) -> AbstractContextManager[Decode]:
    return translated(open_decoder(index, view))


def _choose_cache(
    recipe: Recipe, plan: Plan, indexes: Sequence[Index], backend: Backend
) -> Cache | None:
    """Return where to cache the pixels of a recipe that leaves it open, the same on every worker.

    On a GPU `device` if they are of one size and take an eighth of what is free. Otherwise `memory`
    if they fit the host's, on a CPU only where no image is resized, which changes roundings.
    """
    from largebatch.data.decoders import pixel_cache

    data, execution = recipe.data, recipe.execution
    is_remote = accelerator.is_remote(backend.device)
    sizes = {pixel_cache.one_size(index) for index in indexes}
    total = sum(map(pixel_cache.num_bytes, indexes))
    fits_device = is_remote and total <= accelerator.free_memory_bytes(backend.device) / 8
    resizes = data.crop_area or data.eval_resize or data.resolution
    same_bits = not resizes and sizes == {(data.image_size, data.image_size)}
    pays = plan.epoch(plan.updates) >= MIN_EPOCHS and "mlperf" not in recipe.tracking.trackers
    if not pays or execution.decoder or execution.reads or not (is_remote or same_bits):
        return None
    choices: list[Cache | None] = [None, "memory", "device"]
    own = int(pixel_cache.fits_host(indexes))
    if fits_device and None not in sizes:
        own = max(own, 2 * pixel_cache.fits_host(indexes, on_disk=True))
    of_workers = backend.all_gather(torch.tensor(own).to(backend.device))
    return choices[int(of_workers.min())]  # sync: once, before training


def _open_own(
    data: Data,
    execution: Execution,
    dataset: str,
    folder: Path | None,
    backend: Backend,
) -> tuple[Index, Index, OpenWith]:
    from largebatch.data.datasets import own

    unused = {
        f"data.source: {data.source}": data.source != "folder",
        f"--data {folder}": folder is not None,
        f"execution.cache: {execution.cache}": execution.cache not in {None, "none"},
        f"execution.reads: {execution.reads}": execution.reads is not None,
        "execution.decoder: dali": execution.decoder == "dali",
    }
    for setting, is_set in unused.items():
        if is_set:
            raise DataError(f"--dataset {dataset} opens the images: {setting} would not be used")
    items = own.open_own(dataset)
    train, val = (own.index_items(split, classes=data.classes, backend=backend) for split in items)
    _check(data, train, val)
    split_of = {train.digest: items[0], val.digest: items[1]}
    return (
        train,
        val,
        lambda index, view, resources: own.open_decoder(
            split_of[index.digest], index, view, resources
        ),
    )


def _decoder(data: Data, execution: Execution) -> OpenWith:
    if data.source == "synthetic":
        from largebatch.data.decoders import synthetic

        return synthetic.open_decoder
    if execution.decoder == "dali":
        from largebatch.data.decoders import dali

        require_dali()  # a missing decoder is an error here, not in the run
        return dali.open_decoder
    from largebatch.data.decoders import torchvision

    require_torchvision()
    return torchvision.open_decoder


def _open_chosen(
    cache: Cache,
    open_cached: Callable[[Cache], OpenWith],
    indexes: Sequence[Index],
    backend: Backend,
) -> tuple[Cache | None, OpenWith | None, str]:
    """Open the chosen cache, or the next one where there is no room; the same on every worker.

    A GPU may have less memory than when it was chosen: other programs use it too.
    """
    from largebatch.data.decoders import pixel_cache

    try:
        opened = open_cached(cache)
    except pixel_cache.UnwritableError as error:
        return None, None, f"images are decoded each time: {error}"
    except pixel_cache.DeviceFullError as error:
        fits = torch.tensor(pixel_cache.fits_host(indexes)).to(backend.device)
        if not backend.all_gather(fits).all():  # sync: once, before training
            return None, None, f"images are decoded each time: {error}"
        opened = open_cached("memory")
        return "memory", opened, f"images are decoded once and kept in memory: {error}"
    return cache, opened, f"images are decoded once and kept (execution.cache: {cache})"


def _open_cached(
    indexes: Sequence[Index],
    backend: Backend,
    threads: int,
    progress: Progress,
    cache: Cache,
) -> OpenWith:
    """Open cached pixels; raise UnwritableError or DeviceFullError on all workers or on none."""
    from largebatch.data.decoders import pixel_cache

    caches = {
        index.digest: pixel_cache.open_cache(
            index, backend=backend, threads=threads, progress=progress
        )
        for index in indexes
    }
    if cache == "memory":
        return lambda index, view, resources: pixel_cache.open_decoder(
            caches[index.digest], view, resources
        )
    uploaded: dict[str, pixel_cache.Uploaded] = {}
    problem: pixel_cache.DeviceFullError | None = None
    try:
        for key, each in caches.items():
            uploaded[key] = pixel_cache.upload(each, backend.device)
    except pixel_cache.DeviceFullError as error:
        problem = error
    failed = torch.tensor(problem is not None).to(backend.device)
    if backend.all_gather(failed).any():  # sync: once, before training
        uploaded.clear()  # also the split that did fit
        raise problem or pixel_cache.DeviceFullError(
            "decoded images do not fit on the device of another worker; use execution.cache: memory"
        )
    return lambda index, view, **_: nullcontext(
        partial(pixel_cache.decode_on_device, uploaded[index.digest], view)
    )


def _open_indexes(
    data: Data, backend: Backend, folder: Path | None, *, every_file: bool, progress: Progress
) -> tuple[Index, Index]:
    if data.source == "synthetic":
        from largebatch.data.decoders import synthetic

        sizes = (data.train_samples, data.val_samples)
        train, val = (synthetic.synthetic_index(n, data.classes, data.image_size) for n in sizes)
        return train, val
    if backend.rank > 0:
        return share_index(None, None, backend), share_index(None, None, backend)
    root = root_of(data, folder)
    contents = [
        open_content(root, split, every_file=every_file, progress=progress)
        for split in ("train", "val")
    ]
    _check(data, *(index_of(content, root) for content in contents))
    train, val = (share_index(root, content, backend) for content in contents)
    return train, val


def root_of(data: Data, folder: Path | None) -> Path:
    """Return the folder of the images; raise DataError if it must be given and is not."""
    if data.source == "digits":
        from largebatch.data.datasets.digits import write_digits

        return write_digits()
    if folder is None:
        raise DataError(
            "this recipe reads a folder; pass --data DIR with train and val of <class>/* or *.tar"
        )
    return folder


def _check(data: Data, train: Index, val: Index) -> None:
    check_classes(train.root, train.classes, val.classes)
    counts = {"classes": len(train.classes), "train_samples": len(train), "val_samples": len(val)}
    wrong = {key: number for key, number in counts.items() if number != getattr(data, key)}
    if wrong:
        expected = ", ".join(f"{key} {getattr(data, key)}" for key in wrong)
        change = " ".join(f"--set data.{key}={number}" for key, number in wrong.items())
        raise DataError(
            f"{train.root}: the recipe describes {expected}; if the images are right, add {change}"
        )
