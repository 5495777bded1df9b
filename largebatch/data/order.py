"""The order of samples: a pure function of the seed and the position in the run.

Position p is sample permutation(seed, epoch p // N)[p % N]; with `data.order` the permutation is
of chunks, and of samples within windows of chunks; with repeated augmentation, blocks of the order
follow several times. Random numbers are counter-based:
Philox (Salmon et al. 2011, doi 10.1145/2063384.2063405) keyed by the seed and the purpose. NumPy
guarantees its raw words always, but not `Generator.permutation`, which is computed here.
"""

import enum
import functools
import math
from threading import Thread

import numpy as np
import numpy.typing as npt

from largebatch.data.types import FloatArray, IntArray
from largebatch.recipe.data import REPEATED, Order

WORDS_PER_BLOCK = 4  # number of 64-bit words per value of Philox's counter


class Stream(enum.IntEnum):
    """Purpose of random numbers; half of the key, so no two purposes share numbers."""

    ORDER = 0
    CROP = 1
    FLIP = 2
    NOISE = 3
    PATTERN = 4
    HELD_OUT = 5
    VALIDATION = 7
    COMPUTE_TIME = 8
    FIRST_FLIP = 9
    TRANSLATION = 10
    MIX = 11
    MIX_BOX = 12
    OPERATIONS = 13
    ERASE = 14
    ERASE_NOISE = 15
    CHUNKS = 16
    IMPORT = 17


def random_words(
    seed: int, stream: Stream, *, block: int, num_blocks: int, part: int = 0
) -> npt.NDArray[np.uint64]:
    """Return num_blocks x 4 words; row k depends only on (seed, stream, part, block + k)."""
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([block, part, 0, 0], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(num_blocks * WORDS_PER_BLOCK)
    return words.reshape(num_blocks, WORDS_PER_BLOCK)


def uniform(words: npt.NDArray[np.uint64]) -> FloatArray:
    """Convert random words to float64 in [0, 1), from their upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_ids(
    positions: range, *, seed: int, num_samples: int, order: Order | None = None
) -> IntArray:
    """Return the sample at each of these consecutive positions of the run.

    >>> [int(i) for i in sample_ids(range(8), seed=0, num_samples=4)]
    [0, 2, 1, 3, 0, 1, 3, 2]
    >>> [int(i) for i in sample_ids(range(3, 6), seed=0, num_samples=4)]
    [3, 0, 1]
    """
    assert num_samples > 0
    assert positions.step == 1
    if not positions:
        return np.empty(0, dtype=np.int64)
    parts = []
    for epoch in range(positions.start // num_samples, (positions.stop - 1) // num_samples + 1):
        first = epoch * num_samples
        permutation = _order_of_epoch(seed, epoch, num_samples, order)
        parts.append(permutation[max(0, positions.start - first) : positions.stop - first])
    return np.concatenate(parts, dtype=np.int64)


def samples_at(
    positions: range,
    *,
    seed: int,
    num_samples: int,
    trained: IntArray | None,
    repeats: int = 1,
    order: Order | None = None,
) -> IntArray:
    """Return the samples at these positions of the run, from `trained` or, if None, from all.

    Chunks of `order` are consecutive samples of `trained`. With `repeats`, each block of the order
    follows several times, as in `unrepeated`.
    """
    if trained is not None:
        num_samples = len(trained)
    if repeats == 1 or not positions:
        samples = sample_ids(positions, seed=seed, num_samples=num_samples, order=order)
    else:
        sources, _ = unrepeated(positions, num_samples=num_samples, repeats=repeats)
        first = int(sources.min())
        # The sources are in a few adjacent blocks, fewer than there are positions.
        around = range(first, int(sources.max()) + 1)
        samples = sample_ids(around, seed=seed, num_samples=num_samples, order=order)
        samples = samples[sources - first]
    return samples if trained is None else trained[samples]


def occurrences_at(positions: range, *, num_samples: int, repeats: int) -> IntArray:
    """Return how often the sample at each of these positions of the run occurred before."""
    sources, copies = unrepeated(positions, num_samples=num_samples, repeats=repeats)
    return sources // num_samples * repeats + copies


def unrepeated(positions: range, *, num_samples: int, repeats: int) -> tuple[IntArray, IntArray]:
    """Return the position in the order without repeats, and the number of the copy, of each one.

    Each pass over the samples is divided into blocks of REPEATED; the last block has the remaining
    samples too. A block follows `repeats` times: copy c has sample j * m of the block, modulo its
    size, at its place j, where m is the c-th number that has no common factor with the size. So
    neighbours in different copies have different distances in the block: in a pass no pair of
    neighbours occurs twice, and no sample is its own neighbour, at even and at odd positions and
    where one copy follows another.

    >>> sources, copies = unrepeated(range(64, 70), num_samples=640, repeats=3)
    >>> sources.tolist(), copies.tolist()
    ([0, 3, 6, 9, 12, 15], [1, 1, 1, 1, 1, 1])
    """
    passes, within = np.divmod(np.arange(positions.start, positions.stop), num_samples * repeats)
    if repeats == 1:  # any number of samples, also fewer than a block
        return passes * num_samples + within, np.zeros_like(passes)
    assert num_samples >= REPEATED, "the recipe requires a whole block"
    num_blocks = num_samples // REPEATED
    last_size = num_samples - (num_blocks - 1) * REPEATED
    blocks = np.minimum(within // (REPEATED * repeats), num_blocks - 1)
    is_last = blocks == num_blocks - 1
    sizes = np.where(is_last, last_size, REPEATED)
    copies, places = np.divmod(within - blocks * (REPEATED * repeats), sizes)
    multipliers = np.where(
        is_last, _coprimes(last_size, repeats)[copies], _coprimes(REPEATED, repeats)[copies]
    )
    sources = blocks * REPEATED + places * multipliers % sizes
    return passes * num_samples + sources, copies


@functools.lru_cache(maxsize=4)
def _coprimes(size: int, number: int) -> IntArray:
    """Return the first numbers from 1 to size / 2 without a common factor with `size`."""
    # Above size / 2 is the same distance in the other direction.
    coprimes = [factor for factor in range(1, size // 2 + 1) if math.gcd(factor, size) == 1]
    return np.array(coprimes[:number])


def divide(
    num_samples: int, *, held_out: int, seed: int, stream: Stream = Stream.HELD_OUT
) -> tuple[IntArray, IntArray]:
    """Return the samples to train on and the held-out ones, both in rising order.

    The result depends only on the seed, the stream and the two numbers.
    """
    if not 0 < held_out < num_samples:
        raise ValueError(f"held_out must be from 1 to {num_samples - 1}, got {held_out}")
    order = _draw(seed, stream, part=0, num_samples=num_samples)
    return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)


def import_order(num_samples: int, *, seed: int) -> IntArray:
    """Return the order in which an import writes training images, so that chunks are random."""
    return _draw(seed, Stream.IMPORT, part=0, num_samples=num_samples).astype(np.int64)


def _order_of_epoch(
    seed: int, epoch: int, num_samples: int, order: Order | None
) -> npt.NDArray[np.uint32]:
    """Return the order of one epoch; a thread starts to draw the order of the next.

    ImageNet's takes a fifth of a second. An epoch of 15 updates on thousands of GPUs takes less
    than one, so training must not wait for it.
    """
    thread = _drawing(seed, epoch, num_samples, order)
    _drawing(seed, epoch + 1, num_samples, order)
    thread.join()
    # Stored by the thread. A forked process has no such thread, and draws it here.
    return _draw(seed, Stream.ORDER, part=epoch, num_samples=num_samples, order=order)


@functools.lru_cache(maxsize=4)
def _drawing(seed: int, epoch: int, num_samples: int, order: Order | None) -> Thread:
    draw = functools.partial(
        _draw, seed, Stream.ORDER, part=epoch, num_samples=num_samples, order=order
    )
    thread = Thread(target=draw, name="order", daemon=True)
    thread.start()
    return thread


@functools.lru_cache(maxsize=4)  # two for training, two for statistics over the first epoch
def _draw(
    seed: int, stream: Stream, *, part: int, num_samples: int, order: Order | None = None
) -> npt.NDArray[np.uint32]:
    """Return a random order of the samples: 32-bit integers, 5 MB for ImageNet."""
    assert num_samples < 2**32, "more samples need wider integers"
    words = _words(seed, stream, part=part, number=num_samples)
    if order is not None and order.chunk > 1:
        windows = _windows(seed, order, part=part, num_samples=num_samples)
        bits = int(windows.max()).bit_length()
        if bits > 0:  # else one window has all samples, which is the order without `order`
            # Sorted by window first, then at random: the upper bits of a key are the window.
            words = (windows << np.uint64(64 - bits)) | (words >> np.uint64(bits))
    return np.argsort(words, kind="stable").astype(np.uint32)


def _windows(seed: int, order: Order, *, part: int, num_samples: int) -> npt.NDArray[np.uint64]:
    """Return the number of the window of each sample in an epoch, from 0 in the order of reading.

    Chunks are in a random order, the smaller last one too.
    """
    num_chunks = -(-num_samples // order.chunk)
    words = _words(seed, Stream.CHUNKS, part=part, number=num_chunks)
    windows = np.empty(num_chunks, dtype=np.uint64)
    windows[np.argsort(words, kind="stable")] = np.arange(num_chunks) // order.window
    return np.repeat(windows, order.chunk)[:num_samples]


def _words(seed: int, stream: Stream, *, part: int, number: int) -> npt.NDArray[np.uint64]:
    num_blocks = -(-number // WORDS_PER_BLOCK)
    words = random_words(seed, stream, block=0, num_blocks=num_blocks, part=part)
    return words.reshape(-1)[:number]
