"""Copies of images in a data set: byte for byte, and near copies.

A validation image that is also a training image says nothing about new images, and one image in
two classes teaches neither. Near copies are photographs that were saved again or resized: their
grey images of SIDE x SIDE pixels are almost equal. On Imagenette the correlation of these is above
0.99 for copies and at most 0.94 for other pairs. They are compared only where that takes little
time, and only of images that are large enough to be photographs.
"""

import hashlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from largebatch.data.decoders.reader import read
from largebatch.data.index.headers import is_heic
from largebatch.data.index.index import Index
from largebatch.data.types import Bytes, IntArray
from largebatch.errors import shorten
from largebatch.formatting import plural
from largebatch.optional import require_heif
from largebatch.storage import THREADS

SIDE = 16  # height and width of the grey images that are compared, in pixels
DIGEST_BYTES = 16

MOST = 50_000
"""Maximum number of images of a data set whose looks are compared: 1.25e9 pairs, half a minute."""

SMALLEST = 40  # shorter side in pixels from which an image is compared by its looks
CONTRAST = 8.0  # standard deviation in grey levels (of 255) from which it is
CORRELATION = 0.97  # of two near copies, at least
DIFFERENCE = 4.0  # of the means and of the deviations of two near copies in grey levels, at most

AT_ONCE = 256  # rows of the matrix of correlations that are in memory
SHOWN = 3  # pairs in a line


class Fingerprint(NamedTuple):
    """What is compared of an image."""

    digest: bytes
    """BLAKE2b of its bytes."""

    look: Bytes | None
    """Grey levels, SIDE x SIDE; None if it is not compared by its looks."""


def fingerprint(content: bytes, *, looks: bool = True) -> Fingerprint:
    """Return the fingerprint of an encoded image, without its look if it cannot be decoded."""
    digest = digest_of(content)
    try:
        return Fingerprint(digest, _look(content) if looks else None)
    except Exception:  # Pillow raises many types; whatever decodes the image reports it
        return Fingerprint(digest, None)


def digest_of(content: bytes) -> bytes:
    """Return a hash that only byte-equal contents share."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _look(content: bytes) -> Bytes | None:
    if is_heic(content):
        require_heif()
    with Image.open(io.BytesIO(content)) as image:
        if min(image.size) < SMALLEST:
            return None
        # libjpeg scales by powers of two before it computes pixels; four times the size needed
        # leaves enough for the filter.
        image.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is decoded at a part of its size
        # A filter with weights: a box of whole pixels would differ with the size of the image.
        small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return np.asarray(ImageOps.exif_transpose(small), np.uint8)


def copies_in_folder(train: Index, val: Index) -> list[str]:
    """Return lines about copies in class folders that are used without an import.

    None for shards, whose import named them, and for more images than are compared by their looks.
    """
    indexes = {"train": train, "val": val}
    # An import has compared them already.
    is_imported = train.offsets is not None or val.offsets is not None
    if is_imported or len(train) + len(val) > MOST:
        return []
    copies = Copies(lambda split, row: indexes[split].paths[row])
    with (
        warnings.catch_warnings(),
        ThreadPoolExecutor(THREADS, thread_name_prefix="copies") as pool,
    ):
        warnings.simplefilter("ignore")  # of Pillow, about images that were checked
        for split, index in indexes.items():
            locations = map(index.locate, range(len(index)))
            fingerprints = pool.map(lambda location: fingerprint(read(location)), locations)
            for row, (label, of_row) in enumerate(zip(index.labels, fingerprints, strict=True)):
                copies.add(split, row, int(label), of_row)
    return list(copies.remarks())


class Copies:
    """Fingerprints of the images of a data set, and which of them are copies."""

    def __init__(self, name_of: Callable[[str, int], str]) -> None:
        self._name_of = name_of  # name of an image, by its split and its position there
        self._split_of: list[str] = []
        self._positions: list[int] = []
        self._labels: list[int] = []
        self._digests = bytearray()
        self._looks: list[Bytes] = []
        self._looking: list[int] = []  # images that `_looks` belong to

    def add(self, split: str, position: int, label: int, print_of_image: Fingerprint) -> None:
        """Add an image; those of training come first."""
        if print_of_image.look is not None:
            self._looks.append(print_of_image.look)
            self._looking.append(len(self._labels))
        self._split_of.append(split)
        self._positions.append(position)
        self._labels.append(label)
        self._digests += print_of_image.digest

    def remarks(self) -> Iterator[str]:
        """Yield lines about copies between the splits, between classes, and in one class."""
        originals = self._originals()
        copies = np.flatnonzero(originals != np.arange(len(originals)))
        equal = [(int(originals[copy]), int(copy)) for copy in copies]
        yield from self._describe(equal, how="byte for byte")
        near = self._near(originals)
        yield from self._describe(near, how="saved again or resized, by their looks")

    def _originals(self) -> IntArray:
        """Return the number of the first image with the same bytes, for each image."""
        digests = np.frombuffer(bytes(self._digests), f"V{DIGEST_BYTES}")
        _, first, which = np.unique(digests, return_index=True, return_inverse=True)
        originals: IntArray = first[which]
        return originals

    def _near(self, originals: IntArray) -> Iterator[tuple[int, int]]:
        """Yield pairs of images with almost the same looks and other bytes.

        A film has many images that look alike: each image comes at most once with one of the other
        split, of another class, and of its own class and split.
        """
        # Equal bytes have equal looks, and are reported already.
        is_first = originals[self._looking] == self._looking
        images = np.array(self._looking, dtype=np.int64)[is_first]
        grey = np.array(self._looks, np.float32).reshape(-1, SIDE * SIDE)[is_first]
        means = grey.mean(1)
        contrasts = grey.std(1)
        # Images of one colour correlate with anything.
        structured = contrasts >= CONTRAST
        images = images[structured]
        grey = grey[structured]
        means = means[structured]
        contrasts = contrasts[structured]
        unit = (grey - means[:, None]) / (SIDE * contrasts[:, None])  # of length 1
        splits = self._splits()[images]
        labels = np.array(self._labels)[images]
        for start in range(0, len(images), AT_ONCE):
            block = slice(start, start + AT_ONCE)
            before = slice(0, start + AT_ONCE)
            alike = unit[block] @ unit[before].T >= CORRELATION
            # Rows of the block begin at `start`, so the diagonal of the whole matrix is there.
            alike = np.tril(alike, k=start - 1)  # of each image the earlier ones
            rows = np.flatnonzero(alike.any(1))
            alike = alike[rows]
            numbers = rows + start
            # Correlation ignores brightness and contrast; a copy has kept both.
            alike &= np.abs(means[numbers, None] - means[before]) <= DIFFERENCE
            alike &= np.abs(contrasts[numbers, None] - contrasts[before]) <= DIFFERENCE
            is_across = splits[numbers, None] != splits[before]
            is_relabelled = labels[numbers, None] != labels[before]
            for kind in (is_across, is_relabelled, ~(is_across | is_relabelled)):
                chosen = alike & kind
                for row in np.flatnonzero(chosen.any(1)):
                    yield int(images[chosen[row].argmax()]), int(images[numbers[row]])

    def _splits(self) -> IntArray:
        """Return a number for the split of each image."""
        names = list(dict.fromkeys(self._split_of))
        return np.array([names.index(name) for name in self._split_of], dtype=np.int64)

    def _describe(self, pairs: Iterable[tuple[int, int]], *, how: str) -> Iterator[str]:
        across: dict[int, int] = {}  # original by copy, of each kind
        relabelled: dict[int, int] = {}
        within: dict[int, int] = {}
        for original, copy in pairs:
            is_across = self._split_of[original] != self._split_of[copy]
            is_relabelled = self._labels[original] != self._labels[copy]
            if is_across:
                across[copy] = original
            if is_relabelled:
                relabelled[copy] = original
            if not (is_across or is_relabelled):
                within[copy] = original
        for copies, text in (
            (across, "of validation also in training, where it is not new"),
            (relabelled, "in two classes"),
            (within, "twice in a class"),
        ):
            if copies:
                descriptions = [
                    f"{self._name(copy)} = {self._name(original)}"
                    for copy, original in islice(copies.items(), SHOWN + 1)
                ]
                number = plural(len(copies), "image")
                yield f"copies, {how}: {number} {text}: {shorten(descriptions, most=SHOWN)}"

    def _name(self, image: int) -> str:
        return self._name_of(self._split_of[image], self._positions[image])
