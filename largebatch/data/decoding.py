"""Where the pixels of a run come from: a cache of decoded images, or a decoder.

All workers choose the same: with different decoders their pixels would differ, and a worker that
waits for a cache that another does not open would wait without end.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from largebatch import accelerator, registry
from largebatch.data.images import Images, read_indexes
from largebatch.data.index.index import Index
from largebatch.data.types import Decode, Resources, View
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import available_cores
from largebatch.recipe.data import Data
from largebatch.recipe.execution import DEFAULT_DECODER, Cache, Execution
from largebatch.recipe.recipe import Recipe
from largebatch.storage import ReadProgress, silent

if TYPE_CHECKING:
    from largebatch.data.datasets.own import Items

MIN_EPOCHS = 2
"""Passes over the data from which decoding all images beforehand pays."""

OpenDecoder = Callable[[Index, View, Resources], AbstractContextManager[Decode]]


class Decoding(NamedTuple):
    """How the images of a run are decoded on this worker."""

    open: OpenDecoder
    remark: str | None = None
    """What was chosen for this machine, and why; None if the recipe or the data left no choice."""


def choose_decoding(
    recipe: Recipe,
    images: Images,
    backend: Backend,
    *,
    passes: float,
    progress: ReadProgress = silent,
) -> Decoding:
    """Open a cache of decoded images or choose a decoder, the same kind on all workers.

    Cached pixels take memory of the device from here on. `passes` over the training data decide
    whether a cache pays; `progress` reports its decoding. Raises MissingPackageError if the decoder
    is not installed, UnwritableError or DeviceFullError if a cache that the recipe asks for cannot
    be made.
    """
    if images.items:
        return Decoding(partial(_open_own, images.items))
    data = recipe.data
    execution = recipe.execution
    cache = execution.cache
    is_free = cache is None and data.source != "synthetic"
    if is_free:
        cache = _choose_cache(recipe, images, backend, passes=passes)
        if cache is not None:  # see read_images: training will read no files
            read_indexes(data, backend, images.train.root, every_file=True, progress=progress)
    if cache == "device" and not accelerator.is_remote(backend.device):
        cache = "memory"  # the host's memory is the device's
    if cache is None or cache == "none":
        return Decoding(_decoder(data, execution))
    threads = decoding_threads(backend)
    indexes = [images.train, images.val]
    open_cached = partial(_open_cached, indexes, backend, threads, progress)
    if not is_free:
        return Decoding(open_cached(cache))
    opened, remark = _open_chosen(cache, open_cached, indexes, backend)
    return Decoding(opened or _decoder(data, execution), remark)


def decoding_threads(backend: Backend) -> int:
    """Return the number of threads that a worker decodes with: its share of the host's cores."""
    return max(1, available_cores() // backend.local_size)


def _choose_cache(
    recipe: Recipe, images: Images, backend: Backend, *, passes: float
) -> Cache | None:
    """Return where to cache the pixels of a recipe that leaves it open, the same on every worker.

    On a GPU `device` if they are of one size and take an eighth of what is free. Otherwise `memory`
    if they fit the host's, on a CPU only where no image is resized, which changes roundings.
    """
    from largebatch.data.decoders import pixel_cache

    data = recipe.data
    execution = recipe.execution
    indexes = [images.train, images.val]
    is_remote = accelerator.is_remote(backend.device)
    sizes = {pixel_cache.one_size(index) for index in indexes}
    resizes = data.crop_area or data.eval_resize or data.resolution
    same_bits = not resizes and sizes == {(data.image_size, data.image_size)}
    # MLPerf's clock runs while a cache is written, and its entries decode in every epoch.
    pays = passes >= MIN_EPOCHS and not recipe.tracking.logs_mlperf
    if not pays or execution.decoder or execution.reads or not (is_remote or same_bits):
        return None
    total = sum(pixel_cache.num_bytes(index) for index in indexes)
    fits_device = is_remote and total <= accelerator.free_memory_bytes(backend.device) / 8
    # In rising order of what they need: all workers take the least of what each has room for.
    choices: list[Cache | None] = [None, "memory", "device"]
    best = 0
    if pixel_cache.fits_host(indexes):
        best = choices.index("memory")
    if fits_device and None not in sizes and pixel_cache.fits_host(indexes, on_disk=True):
        best = choices.index("device")
    of_workers = backend.all_gather(torch.tensor(best).to(backend.device))
    return choices[int(of_workers.min())]  # sync: once, before training


def _open_own(
    items: "Mapping[str, Items]", index: Index, view: View, resources: Resources
) -> AbstractContextManager[Decode]:
    from largebatch.data.datasets.own import open_decoder

    return open_decoder(items[index.digest], index, view, resources)


def _decoder(data: Data, execution: Execution) -> OpenDecoder:
    if data.source == "synthetic":
        from largebatch.data.decoders import synthetic

        return synthetic.open_decoder
    # It says that a package is missing here, not when the run has begun.
    require: Callable[[], OpenDecoder] = registry.load(
        "decoders", execution.decoder or DEFAULT_DECODER
    )
    return require()


def _open_chosen(
    cache: Cache,
    open_cached: Callable[[Cache], OpenDecoder],
    indexes: Sequence[Index],
    backend: Backend,
) -> tuple[OpenDecoder | None, str]:
    """Open the chosen cache, or the next one where there is no room; None to decode each time.

    The result is the same on every worker. A GPU may have less memory than when the cache was
    chosen: other programs use it too.
    """
    from largebatch.data.decoders import pixel_cache

    try:
        opened = open_cached(cache)
    except pixel_cache.UnwritableError as error:
        return None, f"images are decoded each time: {error}"
    except pixel_cache.DeviceFullError as error:
        fits = torch.tensor(pixel_cache.fits_host(indexes)).to(backend.device)
        if not backend.all_gather(fits).all():  # sync: once, before training
            return None, f"images are decoded each time: {error}"
        opened = open_cached("memory")
        return opened, f"images are decoded once and kept in memory: {error}"
    return opened, f"images are decoded once and kept (execution.cache: {cache})"


def _open_cached(
    indexes: Sequence[Index],
    backend: Backend,
    threads: int,
    progress: ReadProgress,
    cache: Cache,
) -> OpenDecoder:
    """Open cached pixels; raise UnwritableError or DeviceFullError on all workers or on none."""
    from largebatch.data.decoders import pixel_cache

    # By digest: an index that a stage has changed, such as one without held-out images, is a copy.
    caches = {
        index.digest: pixel_cache.open_cache(
            index, backend=backend, threads=threads, progress=progress
        )
        for index in indexes
    }

    def open_in_memory(
        index: Index, view: View, resources: Resources
    ) -> AbstractContextManager[Decode]:
        return pixel_cache.open_decoder(caches[index.digest], view, resources)

    if cache == "memory":
        return open_in_memory
    uploaded: dict[str, pixel_cache.Uploaded] = {}
    problem: pixel_cache.DeviceFullError | None = None
    try:
        for digest, pixels in caches.items():
            uploaded[digest] = pixel_cache.upload(pixels, backend.device)
    except pixel_cache.DeviceFullError as error:
        problem = error
    failed = torch.tensor(problem is not None).to(backend.device)
    if backend.all_gather(failed).any():  # sync: once, before training
        uploaded.clear()  # also the split that did fit
        raise problem or pixel_cache.DeviceFullError(
            "decoded images do not fit on the device of another worker; use execution.cache: memory"
        )

    def open_on_device(index: Index, view: View, _: Resources) -> AbstractContextManager[Decode]:
        return nullcontext(partial(pixel_cache.decode_on_device, uploaded[index.digest], view))

    return open_on_device
