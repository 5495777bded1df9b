"""Images in class folders, in a folder, a zip or a tar; their bytes are kept.

A path is `<split>/<class>/<image>`. A class may have subfolders, whose images belong to it. The
archive may have other folders around the splits. With one archive per split, such as `train.zip`
and `val.tar.gz`, the paths may omit the split. Without splits, or with train only, a fraction of
every class can be used for validation.
"""

import csv
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from largebatch.data.datasets.archives import DAMAGED, Files, fault, open_files, reason
from largebatch.data.datasets.packing import SPLITS, TRAIN, VAL, DataSet, Sample, in_parts
from largebatch.data.index.folder import EXTENSIONS, by_kind, describe, is_system, kind_of, visible
from largebatch.data.index.headers import BadImageError, measure_bytes
from largebatch.data.index.index import check_same_classes
from largebatch.data.index.shards import Unusable
from largebatch.errors import DataError, shorten

ENDINGS = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")

LAYOUT = (
    "expected train/<class>/*.jpg and val/<class>/*.jpg, in a folder, in one zip or tar, or in a "
    "folder with train.zip and val.zip (or .tar, .tar.gz, ...; for ImageNet: "
    "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, or the unpacked archive of Kaggle). If "
    "val has another name: --val-name test; to divide train/<class>/*.jpg, or only <class>/*.jpg: "
    "--val-fraction 0.1"
)

KAGGLE = "ILSVRC/Data/CLS-LOC"
"""Folder of ImageNet's splits as Kaggle packs them; the images of val are in no class folders."""

SOLUTION = "LOC_val_solution.csv"  # Kaggle's list of the classes of val, beside ILSVRC


@dataclass(frozen=True, slots=True)
class Division:
    """Fraction of every class that is used for validation, chosen by names and a seed.

    The order, time and content of the files do not matter: the same names give the same division
    on every machine, and adding images to one class does not change another.
    """

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
                "validation and none for training: add images, or lower --val-fraction"
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


class _Image(NamedTuple):
    files: Files
    path: str  # path in the archive
    start: int  # position in the path of the image's name within its class

    @property
    def name(self) -> str:
        return self.path[self.start :]

    def __str__(self) -> str:
        return f"{self.files.archive}: {self.path}"


Classes = dict[str, list[_Image]]  # images of a split by class name

_Placed = Iterator[tuple[str, str, _Image]]  # split, class and image


class _Layout(NamedTuple):
    names: tuple[str, ...]
    """Names of the splits: training, then validation unless training is divided."""

    divided: bool  # True if a fraction of the training images is used for validation


@contextmanager
def open_archives(
    source: Path,
    *,
    scratch: Path,
    val_name: str = VAL,
    val_fraction: float | None = None,
    seed: int = 0,
) -> Iterator[DataSet]:
    """List the images of `source`: a folder, an archive, or a folder with one archive per split.

    `val_name` is the name of the validation split. With `val_fraction` that fraction of every
    class is used for validation, chosen by `seed` and the names. A compressed tar is unpacked into
    the folder `scratch`.
    """
    inside = (KAGGLE, KAGGLE.partition("/")[2])
    source = next((source / name for name in inside if (source / name).is_dir()), source)
    divided = val_fraction is not None
    layout = _Layout((TRAIN,) if divided else (TRAIN, val_name), divided)
    if val_name == TRAIN:
        raise DataError("--val-name train: that is the training split; choose another name")
    if divided and (source / TRAIN).is_dir() and (source / val_name).is_dir():
        raise DataError(f"{source}: {TRAIN} and {val_name} already exist; remove --val-fraction")
    with ExitStack() as stack:
        splits: dict[str, Classes] = {name: {} for name in layout.names}
        unread: list[str] = []
        for archive in _archives(source, layout):
            try:
                below = layout.names if (archive / TRAIN).is_dir() else ("",)
                files = stack.enter_context(open_files(archive, below=below, scratch=scratch))
            except DAMAGED as error:
                raise fault(archive, error, expected="zip or tar") from error
            shown = [name for name in files.names if is_system(name) or _is_shown(name, layout)]
            wanted = [name for name in shown if kind_of(name) in EXTENSIONS]
            if not wanted:
                found = shorten(sorted(files.names))
                raise DataError(f"{archive}: contains no images; {LAYOUT}; found {found}")
            unread += sorted(set(shown) - set(wanted))
            for name, class_name, image in _images(files, wanted, layout):
                splits[name].setdefault(class_name, []).append(image)
        remarks = describe(by_kind((kind_of(path), path) for path in unread), where=str(source))
        if (source / TRAIN).is_dir():
            folders = sorted(path.name for path in source.iterdir() if path.is_dir())
            others = [name for name in folders if name[0] != "." and name not in layout.names]
            remarks += [f"{source}: not imported: {shorten(others)}"] if others else []
        images = {TRAIN: splits[TRAIN], VAL: splits[layout.names[-1]]}
        if val_fraction is not None:
            division = Division(val_fraction, seed)
            images = {TRAIN: {}, VAL: {}}
            for name, members in splits[TRAIN].items():
                chosen = division.validating(name, [image.name for image in members])
                images[TRAIN][name] = [image for image in members if image.name not in chosen]
                images[VAL][name] = [image for image in members if image.name in chosen]
            remarks.append(division.describe())
        yield _data_set(source, images, remarks)


def _archives(source: Path, layout: _Layout) -> list[Path]:
    if all((source / name).is_dir() for name in layout.names) or source.is_file():
        return [source]
    if not source.exists():
        raise DataError(f"{source}: there is no such file or folder; {LAYOUT}")
    paths = sorted(source.glob("*"))
    archives = [
        path
        for path in paths
        if path.is_file()
        and path.name.lower().endswith(ENDINGS)
        and _split_of(path) in layout.names
    ]
    if sorted(map(_split_of, archives)) == sorted(layout.names):
        return archives
    if layout.divided:
        return [source]  # class folders without splits
    names = shorten([path.name for path in paths])
    raise DataError(f"{source}: no images to import; {LAYOUT}; found {names}")


def _split_of(archive: Path) -> str:
    """Return the last word of an archive's name: `train` of ILSVRC2012_img_train.tar."""
    return archive.name.partition(".")[0].rpartition("_")[2]


def _is_shown(path: str, layout: _Layout) -> bool:
    parts = path.split("/")
    return all(map(visible, parts[_place_of_split(parts, layout.names) or 0 :]))


def _place_of_split(parts: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the position of the split in a path: the first with a class and a file below it."""
    return next((place for place, part in enumerate(parts[:-2]) if part in names), None)


def _images(files: Files, wanted: Sequence[str], layout: _Layout) -> _Placed:
    around: dict[tuple[str, ...], str] = {}
    bare: list[str] = []
    for name in wanted:
        parts = name.split("/")
        place = _place_of_split(parts, layout.names)
        if place is None:
            bare.append(name)
        else:
            around.setdefault(tuple(parts[:place]), name)
    split = TRAIN if layout.divided else _split_of(files.archive)
    in_folders = files.archive.is_dir() and not layout.divided
    val = layout.names[-1]
    if bare and in_folders and bare == [name for name in wanted if name.startswith(f"{val}/")]:
        others = [name for name in wanted if not name.startswith(f"{val}/")]
        yield from _in_class_folders(files, others, depth=1)
        yield from _without_classes(files, bare, val)
    elif bare and not around and not in_folders and split in layout.names:
        yield from _without_split(files, wanted, split)
    elif bare:
        kaggle = f"unpack the archive of Kaggle, with {SOLUTION} beside ILSVRC"
        remedy = kaggle if KAGGLE in bare[0] else LAYOUT
        raise DataError(
            f"{files.archive}: {bare[0]} is not in a class folder of a split ({len(bare):,} images "
            f"are not); {remedy}"
        )
    elif len(around) > 1:
        raise DataError(
            f"{files.archive}: {' and '.join(list(around.values())[:2])} are not in the same "
            f"folder of splits; {LAYOUT}"
        )
    else:
        (outer,) = around
        yield from _in_class_folders(files, wanted, depth=len(outer) + 1)


def _in_class_folders(
    files: Files, paths: Sequence[str], *, depth: int, split: str = ""
) -> _Placed:
    """Yield the images; a path's component at `depth` is the class, the one before it the split."""
    for path in paths:
        parts = path.split("/", depth + 1)
        image = _Image(files, path, len(path) - len(parts[-1]))
        yield split or parts[depth - 1], parts[depth], image


def _without_split(files: Files, paths: Sequence[str], split: str) -> _Placed:
    """Yield the images of one split: in class folders, in one folder around these, or in none."""
    depths = {path.count("/") for path in paths}
    if depths == {0}:
        yield from _without_classes(files, paths, split)
        return
    if 0 in depths:
        bare = next(path for path in paths if "/" not in path)
        raise DataError(f"{files.archive}: {bare} is not in a class folder; move it into one")
    one_around = 1 not in depths and len({path.partition("/")[0] for path in paths}) == 1
    depth = int(one_around and not files.archive.is_dir())
    yield from _in_class_folders(files, paths, depth=depth, split=split)


def _without_classes(files: Files, paths: Sequence[str], split: str) -> _Placed:
    """Yield images in no class folders; their classes are in SOLUTION, or in a list."""
    paths = sorted(paths, key=os.fsencode)
    folder = files.archive.resolve()
    places = [place / SOLUTION for place in (folder, *folder.parents[:3])]
    solution = next(filter(Path.is_file, places), None) if folder.is_dir() else None
    if solution is None:
        beside = files.archive / split if folder.is_dir() else files.archive
        classes = _listed_classes(beside.with_name(f"{split}_labels.txt"), beside, len(paths))
    else:
        classes = _solved_classes(solution, [Path(path).stem for path in paths])
    for path, name in zip(paths, classes, strict=True):
        yield split, name, _Image(files, path, path.rfind("/") + 1)


def _solved_classes(path: Path, names: Sequence[str]) -> list[str]:
    """Read the classes of images from Kaggle's table; a row has an image, its class and boxes."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    if not rows or rows[0][:2] != ["ImageId", "PredictionString"]:
        raise DataError(f"{path}: expected a table with the columns ImageId, PredictionString")
    classes = {row[0]: row[1].partition(" ")[0] for row in rows[1:] if len(row) > 1}
    missing = [name for name in names if not classes.get(name)]
    if missing:
        raise DataError(f"{path}: has no class for {len(missing)} images: {shorten(missing)}")
    return [classes[name] for name in names]


def _listed_classes(path: Path, images: Path, number: int) -> list[str]:
    """Read the classes of images without class folders from a file, as for ImageNet's val."""
    try:
        classes = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        classes = []
    if len(classes) != number or "" in classes:
        raise DataError(
            f"{path}: found {len([c for c in classes if c])} classes; expected this file with the "
            f"classes of the {number} images of {images.name}, which are not in class folders: one "
            "per line, in the order of the images' names (for ImageNet that is "
            "imagenet_2012_validation_synset_labels.txt of https://github.com/tensorflow/models, "
            f"or Kaggle's {SOLUTION})"
        )
    return classes


def _data_set(source: Path, splits: dict[str, Classes], remarks: Sequence[str]) -> DataSet:
    """Return the images in the order of class folders, so that sample numbers are the same."""
    for split in SPLITS:
        if not splits[split]:
            raise DataError(f"{source}: there are no images of {split}; {LAYOUT}")
    classes, of_val = (sorted(splits[split], key=os.fsencode) for split in SPLITS)
    check_same_classes(source, classes, of_val, remedy=f"; {LAYOUT}")
    if len(classes) == 1:
        text = f"{source}: all images are of one class, {classes[0]}; if the class folders are "
        remarks = [*remarks, f"{text}below it, import that folder"]
    for images in (images for split in SPLITS for images in splits[split].values()):
        images.sort(key=lambda image: os.fsencode(image.name))
        for first, second in pairwise(images):
            if first.name == second.name:
                raise DataError(f"{first} and {second} have the same name; remove one of them")
    return DataSet(
        classes,
        {split: sum(map(len, splits[split].values())) for split in SPLITS},
        lambda split: _samples([splits[split][name] for name in classes]),
        remarks,
    )


def _samples(classes: Sequence[list[_Image]]) -> Iterator[Sample | Unusable]:
    images = [image for members in classes for image in members]
    labels = [label for label, members in enumerate(classes) for _ in members]
    contents = in_parts(lambda row: _read(images[row]), len(images))
    for image, label, content in zip(images, labels, contents, strict=True):
        if isinstance(content, bytes):
            yield Sample(content, image.path.rpartition(".")[2], label, image)
        else:
            yield Unusable(str(image), reason(content))


def _read(image: _Image) -> bytes | Exception:
    try:
        content = image.files.read(image.path)
        measure_bytes(content)
    except (*DAMAGED, BadImageError) as error:
        return error
    return content
