"""Validation samples that are training samples: the same number of one data set, or equal bytes.

Accuracy on samples that were trained on says nothing about new ones. Numbers are compared where
both loaders read one data set. Copies have equal bytes before any transform, so transforms are
taken out of a copy of the data set, and files are compared without decoding them.
"""

import copy
import hashlib
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from largebatch.audit.ranks import Ranks, unable
from largebatch.audit.restoring import generators_of
from largebatch.audit.rules import data as rules
from largebatch.audit.samples import (
    NoNumbersError,
    SampleNumbers,
    epochs_of,
    fingerprint,
    torch_loader,
    whole,
)
from largebatch.audit.subject import Subject
from largebatch.distributed.backend import sum_over_workers
from largebatch.models.inputs import IMAGE_KEYS
from largebatch.rules import Finding, decide

_SECONDS = 20.0  # longest time for which a worker reads samples of each of the two data sets

_FILE_LISTS = ("samples", "imgs", "files", "paths", "image_paths")
"""Attributes of data sets, torchvision's first, that list a file for each sample."""

Digest = Callable[[int], int]
"""Function from a sample's number to a number that only equal images have."""


def check_overlap(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Compare the samples of the validation loader with those that are trained on."""
    if subject.val_loader is None:
        return []

    def read() -> tuple[Any, SampleNumbers, Any, SampleNumbers] | str:
        try:
            trained = epochs_of(subject.loader, 2, subject.set_epoch)
            validated = epochs_of(subject.val_loader, 1)
        except NoNumbersError as error:
            return str(error)
        numbers = np.unique(np.concatenate([it.samples for it in trained]))
        return (
            *_source_of(subject.loader, numbers),
            *_source_of(subject.val_loader, np.unique(validated[0].samples)),
        )

    sources = ranks.attempt("held-out samples", "drawing sample numbers", read)
    problems = [it for it in ranks.gather(sources if isinstance(sources, str) else "") if it]
    if problems or isinstance(sources, str):
        remedy = "give the audit DataLoaders whose data sets have a length"
        return [unable("held-out samples", problems[0], remedy)]
    training, trained, validation, validated = sources
    # Numbers decide where both loaders read one data set; else only content shows copies.
    if all(ranks.gather(training is validation)):
        size = max(ranks.gather(len(training)))
        counts = torch.zeros(2, size, dtype=torch.int32)
        counts[0, trained] = 1
        counts[1, validated] = 1
        sum_over_workers(counts, ranks.backend)
        common = int(((counts[0] > 0) & (counts[1] > 0)).sum())
        numbers = rules.CommonNumbers(common, int((counts[1] > 0).sum()))
        if findings := decide(numbers, rules.COMMON_NUMBERS):
            return findings
    return _compare_content(training, trained, validation, validated, ranks)


def _source_of(loader: object, numbers: SampleNumbers) -> tuple[Any, SampleNumbers]:
    """Return the innermost data set of a loader, and the places in it of its samples.

    A data set of the script that holds one other of equal length only transforms its samples.
    """
    base = torch_loader(loader)
    assert base is not None  # its sample numbers were drawn
    dataset: Any = whole(base.dataset)[0]
    while True:
        held: list[Any] = [*getattr(dataset, "__dict__", {}).values()]
        inner = [it for it in held if isinstance(it, Dataset) and hasattr(it, "__len__")]
        if len(inner) != 1 or len(inner[0]) != len(dataset):
            return dataset, numbers
        dataset = inner[0]
        if isinstance(dataset, Subset):
            dataset, places = whole(dataset)
            numbers = places[numbers]


def _compare_content(
    training: Any,  # noqa: ANN401 -- data sets of any kind
    trained: SampleNumbers,
    validation: Any,  # noqa: ANN401
    validated: SampleNumbers,
    ranks: Ranks,
) -> list[Finding]:
    """Compare the bytes of images, or of files if both data sets have lists of them."""
    files = (_files_of(training), _files_of(validation))
    has_files = all(ranks.gather(None not in files))
    sizes: set[int] = set()
    if has_files:  # files of other sizes are not read: most training files are of another size
        own_sizes = sorted({_size(files[1], number) for number in validated.tolist()})
        sizes = set().union(*ranks.gather(own_sizes))

    def digests() -> list[Digest | None]:
        if has_files:
            return [_digest_of_files(it, sizes) for it in files]
        return [_digest_of_images(training, trained), _digest_of_images(validation, validated)]

    of_training, of_validation = ranks.attempt("held-out samples", "a sample", digests)
    if not all(ranks.gather(None not in (of_training, of_validation))):
        text = "samples differ at each reading, so copies of them cannot be found"
        remedy = "give the data sets an attribute `transform`, which is taken out to compare them"
        return [unable("held-out samples", text, remedy)]
    assert of_training is not None
    assert of_validation is not None

    def read() -> tuple[list[int], list[int]]:
        restore = generators_of()
        try:
            return _read(of_validation, validated), _read(of_training, trained)
        finally:
            restore()

    own_validation, own_training = ranks.attempt("held-out samples", "a sample", read)
    is_whole = len(own_validation) == len(validated) and len(own_training) == len(trained)
    all_validation = [it for of_rank in ranks.gather(own_validation) for it in of_rank]
    images = np.unique(np.array(all_validation, dtype=np.int64))
    hits = torch.from_numpy(np.isin(images, own_training).astype(np.int32))
    sum_over_workers(hits, ranks.backend)
    # Files of a size that no validation file has were not read: their digest is 0.
    of_workers = ranks.gather([len(own_training), len(set(own_training) - {0}), is_whole])
    evidence = rules.CommonImages(
        common=int((hits > 0).sum()),
        validated=len(images),
        repeated=max(1 - distinct / max(1, number) for number, distinct, _ in of_workers),
        are_files=has_files,
        is_whole=all(whole_set for *_, whole_set in of_workers),
        seconds=_SECONDS,
    )
    return decide(evidence, rules.COMMON_IMAGES)


def _read(digest: Digest, numbers: SampleNumbers) -> list[int]:
    """Return the digests of samples, of as many as are read in `_SECONDS`."""
    end = time.monotonic() + _SECONDS
    digests = []
    for number in numbers.tolist():
        digests.append(digest(number))
        if time.monotonic() > end:
            break
    return digests


def _files_of(dataset: Any) -> list[Path] | None:  # noqa: ANN401 -- a data set of any kind
    """Return the file of each sample; None for a data set that lists none."""
    for name in _FILE_LISTS:
        entries = getattr(dataset, name, None)
        if not isinstance(entries, (list, tuple)) or not entries or len(entries) != len(dataset):
            continue
        paths = [it[0] if isinstance(it, (list, tuple)) and it else it for it in entries]
        if all(isinstance(it, (str, Path)) for it in paths) and Path(paths[0]).is_file():
            return [Path(it) for it in paths]
    return None


def _size(files: list[Path] | None, number: int) -> int:
    assert files is not None
    return files[number].stat().st_size


def _digest_of_files(files: list[Path] | None, sizes: set[int]) -> Digest:
    """Return the digest of files; one whose size no validation file has is not read, and is 0."""

    def digest(number: int) -> int:
        assert files is not None
        if _size(files, number) not in sizes:
            return 0
        content = files[number].read_bytes()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest())

    return digest


def _digest_of_images(dataset: Any, numbers: SampleNumbers) -> Digest | None:  # noqa: ANN401
    """Return the digest of images before transforms; None if two readings differ."""
    if not len(numbers):
        return lambda _: 0
    twin = copy.copy(dataset)
    for name in ("transform", "transforms", "target_transform"):
        if getattr(twin, name, None) is not None:
            setattr(twin, name, lambda *it: it[0] if len(it) == 1 else it)
    restore = generators_of()
    try:
        for source in (twin, dataset):
            try:
                readings = [
                    _digest_with_seed(source, int(numbers[0]), seed=seed) for seed in (0, 1)
                ]
            except Exception:  # noqa: S112 -- a transform that is called with names, as albumentations'
                continue
            if readings[0] == readings[1]:
                return partial(_digest_with_seed, source, seed=0)
    finally:
        restore()
    return None


def _digest_with_seed(dataset: Any, number: int, *, seed: int) -> int:  # noqa: ANN401
    for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
        seed_generator(seed)
    sample = dataset[number]
    if isinstance(sample, Mapping):
        sample = next((sample[key] for key in IMAGE_KEYS if key in sample), sample)
    elif isinstance(sample, (tuple, list)) and sample:
        sample = sample[0]
    return fingerprint(sample)
