"""Images in class folders, in a folder, a zip or a tar; their bytes are kept.

A path is `<split>/<class>/<image>`, with any folders around it, or below the class. The split may
be the name of the archive, such as `train.zip`, and a tar in a tar is read as a folder, as in
ImageNet's archives. Images in no class folders, such as ImageNet's val, have a list of their
classes. Only the path and position of each file stay in memory: there may be a million.
"""

import hashlib
import os
import posixpath
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from largebatch.data.datasets.copies import digest_of
from largebatch.data.datasets.packing import TRAIN, VAL, DataSet, Sample, in_parts
from largebatch.data.index.folder import by_suffix, describe, is_image, visible
from largebatch.data.index.headers import measure_bytes
from largebatch.data.index.index import check_classes
from largebatch.data.index.shards import Unusable, has_bytes, members
from largebatch.errors import DataError, shorten
from largebatch.formatting import plural

_File = TypeVar("_File")

_MAX_RATIO = 100  # of an archive's unpacked to packed bytes; images hardly compress
_ALWAYS = 2**28  # unpacked bytes that are allowed whatever the ratio

LAYOUT = (
    "expected train/<class>/*.jpg and val/<class>/*.jpg, in a folder, in one zip or uncompressed "
    "tar, or in a folder with train.zip and val.zip (or .tar; for ImageNet: "
    "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar). If val has another name: --val-name "
    "test; to divide train/<class>/*.jpg, or only <class>/*.jpg: --val-fraction 0.1"
)


class _Image(NamedTuple):
    archive: Path
    path: str  # path in the archive
    name: str  # path within its class
    files: "_Files"  # of the archive


class _Files(NamedTuple):
    """The files of a folder, a zip or a tar."""

    paths: list[str]
    read: Callable[[str], bytes]
    num_bytes: Callable[[str], int]  # length of a file, without reading it


Classes = dict[str, list[_Image]]  # images of a split by class name


@contextmanager
def open_archives(
    source: Path, *, val_name: str = VAL, val_fraction: float | None = None, seed: int = 0
) -> Iterator[DataSet]:
    """List the images of `source`: a folder, an archive, or a folder with one archive per split.

    `val_name` is the name of the validation split. With `val_fraction` that fraction of every
    class is used for validation, chosen by `seed` and the names; byte-equal images of a class stay
    together.
    """
    names = (TRAIN, val_name) if val_fraction is None else (TRAIN,)
    if val_name == TRAIN:
        raise DataError("--val-name train: that is the training split; choose another name")
    if val_fraction is not None and all((source / name).is_dir() for name in (TRAIN, val_name)):
        raise DataError(f"{source}: {TRAIN} and {val_name} already exist; remove --val-fraction")
    if not source.exists():
        raise DataError(f"{source}: there is no such file or folder; {LAYOUT}")
    with ExitStack() as stack:
        splits, ignored = _list_images(source, names, stack)
        # From here on an error may come from files that were ignored.
        stack.enter_context(_explaining(ignored))
        for split in names:
            if not splits[split]:
                raise DataError(f"{source}: there are no images of {split}; {LAYOUT}")
        train, val = splits[TRAIN], splits[names[-1]]
        remarks = [*ignored, *_without_images(source, train)]
        if val_fraction is not None:
            val = _split_off(train, val_fraction, seed)
            remarks.append(
                f"val: {val_fraction:.4g} of every class, at least one image: the names with the "
                f"smallest hashes with seed {seed}; the same names give the same division, and "
                "copies of an image in one class are on one side"
            )
        classes, of_val = (sorted(images, key=os.fsencode) for images in (train, val))
        check_classes(source, classes, of_val)
        # In the order of class folders, so that the numbers of samples are those of the folder.
        images_of = {
            split: [
                (image, label)
                for label, name in enumerate(classes)
                for image in sorted(images[name], key=lambda image: os.fsencode(image.name))
            ]
            for split, images in {TRAIN: train, VAL: val}.items()
        }

        def samples(split: str, rows: Sequence[int]) -> Iterator[Sample | Unusable]:
            images = images_of[split]
            return in_parts(lambda row: _read(*images[row]), rows)

        def name(split: str, row: int) -> str:
            return images_of[split][row][0].path

        sizes = {split: len(images) for split, images in images_of.items()}
        yield DataSet(classes, sizes, samples, remarks, name)


def _list_images(
    source: Path, names: Sequence[str], stack: ExitStack
) -> tuple[dict[str, Classes], list[str]]:
    """Return the images of each split, and a line about ignored files if there are some."""
    splits: dict[str, Classes] = {name: {} for name in names}
    unread: list[str] = []
    archives = _archives(source, names)
    for archive, split in archives.items():
        try:
            files = _open_files(archive, stack)
        except DataError:
            raise
        except Exception as error:  # each of their modules raises many types
            raise DataError(
                f"{archive}: not a whole, readable zip or uncompressed tar ({error})"
            ) from error
        visible_paths = [path for path in files.paths if all(map(visible, path.split("/")))]
        images = [path for path in visible_paths if is_image(path.rpartition("/")[2])]
        placed = _placed(archive, images, (split,) if split else names)
        for path, (name, class_name, rest) in placed.items():
            image = _Image(archive, path, rest, files)
            splits[name].setdefault(class_name, []).append(image)
        unread += [path for path in visible_paths if path not in placed]
    unpacked = source if source.is_dir() and source in archives else None
    ignored = describe(by_suffix(unread), where=str(source), folder=unpacked)
    return splits, [ignored] if ignored else []


@contextmanager
def _explaining(ignored: Sequence[str]) -> Iterator[None]:
    """Add the line about ignored files to an error, of which they may be the cause."""
    try:
        yield
    except DataError as error:
        raise DataError("\n".join([str(error), *ignored])) from error


def _split_off(classes: Classes, fraction: float, seed: int) -> Classes:
    """Move the images of every class whose names have the smallest hashes into the result.

    Copies of an image move together, as the first of them, if not too many. Adding images to one
    class does not change another.
    """
    moved: Classes = {}
    for name, images in classes.items():
        # By class, so that rare classes are in validation, too.
        number = max(1, round(fraction * len(images)))
        if number >= len(images):
            raise DataError(
                f"class {name} has {plural(len(images), 'image')}, of which {number} would be used "
                "for validation and none for training: add images, or lower --val-fraction"
            )
        # Not by a generator: adding an image must not divide the others in another way.
        ranked = sorted(images, key=partial(_hash, f"{seed}/{name}/"))
        groups = _with_copies(ranked)
        of_val: list[_Image] = []
        of_train: list[_Image] = []
        for copies in groups:
            fits = len(of_val) + len(copies) <= number
            (of_val if fits else of_train).extend(copies)
        if not of_val:  # every image has more copies than are to be moved
            of_val = min(groups, key=len)
            of_train = [image for image in ranked if image not in of_val]
        if not of_train:
            raise DataError(
                f"class {name}: its {len(images)} images are copies of one, byte for byte, which "
                "cannot be used for both training and validation: add other images"
            )
        moved[name] = of_val
        classes[name] = of_train
    return moved


def _with_copies(images: Sequence[_Image]) -> list[list[_Image]]:
    """Group the images that are equal byte for byte, in the order of the first of each group."""
    lengths = [_num_bytes(image) for image in images]
    shared = Counter(lengths)
    groups: dict[object, list[_Image]] = {}
    for image, length in zip(images, lengths, strict=True):
        # Only images of equal length can be equal, so few are read.
        key: object = image.path  # an image of a length of its own is not read
        if length and shared[length] > 1:
            key = digest_of(image.files.read(image.path))
        groups.setdefault(key, []).append(image)
    return list(groups.values())


def _num_bytes(image: _Image) -> int:
    """Return the length of an image; 0 if it cannot be read, which is reported when it is."""
    try:
        return image.files.num_bytes(image.path)
    except OSError:
        return 0


def _hash(before: str, image: _Image) -> bytes:
    return hashlib.blake2b(os.fsencode(before + image.name), digest_size=16).digest()


def _without_images(source: Path, classes: Iterable[str]) -> Iterator[str]:
    folder = source / TRAIN if (source / TRAIN).is_dir() else source
    below = {path.name for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
    others = sorted(filter(visible, below - {TRAIN, *classes}))
    if others and below & set(classes):
        yield f"folders without images, which are not classes: {shorten(others)}"


def _archives(source: Path, names: Sequence[str]) -> dict[Path, str | None]:
    """Return the folder or archive; or the archives of the splits, and the split of each."""
    if source.is_file() or all((source / name).is_dir() for name in names):
        return {source: None}
    archives = {}
    for path in sorted(source.iterdir()):
        # The last word of the archive's name.
        split = path.stem.rpartition("_")[2]  # `train` of ILSVRC2012_img_train.tar
        if path.is_file() and path.suffix.lower() in {".zip", ".tar"} and split in names:
            archives[path] = split
    return dict(archives) if sorted(archives.values()) == sorted(names) else {source: None}


def _placed(
    archive: Path, paths: Sequence[str], names: Sequence[str]
) -> dict[str, tuple[str, str, str]]:
    """Return split, class and path within it for each image of these splits.

    A single split may be missing in all paths.
    """
    inside: dict[str, tuple[str, list[str]]] = {}  # split and path below it, by path
    around: dict[tuple[str, ...], str] = {}
    for path in paths:
        parts = path.split("/")
        # The outermost folder with the name of a split: a class may be called so, too.
        depth = next((n for n, part in enumerate(parts[:-1]) if part in names), None)
        if depth is not None:
            inside[path] = parts[depth], parts[depth + 1 :]
            around[tuple(parts[:depth])] = path
    if len(around) > 1:
        raise DataError(
            f"{archive}: {' and '.join(list(around.values())[:2])} are not in the same "
            f"folder of splits; {LAYOUT}"
        )
    if not inside and len(names) == 1:
        outer = {path.partition("/")[0] for path in paths}
        # One folder around all classes, as archives of a folder have it; in a folder of classes
        # the only one is a class.
        is_around = len(outer) == 1 and all(path.count("/") > 1 for path in paths)
        start = int(is_around and not archive.is_dir())
        inside = {path: (names[0], path.split("/")[start:]) for path in paths}
    classes: dict[str, str] = {}
    for name in names:
        bare = [path for path, (split, below) in inside.items() if split == name and not below[1:]]
        classes |= _listed_classes(archive, name, bare) if bare else {}
    return {
        path: (split, classes.get(path, below[0]), "/".join(below[1:] or below))
        for path, (split, below) in inside.items()
    }


def _listed_classes(archive: Path, split: str, paths: list[str]) -> dict[str, str]:
    """Read the classes of images in no class folders from a file, as for ImageNet's val."""
    listed = (archive if archive.is_dir() else archive.parent) / f"{split}_labels.txt"
    try:
        classes = listed.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        classes = []
    if len(classes) != len(paths) or "" in classes:
        raise DataError(
            f"{archive}: {min(paths)} is not in a class folder; expected {listed} with the classes "
            f"of the {len(paths)} images that are not: one per line, in the order of their names "
            "(for ImageNet: imagenet_2012_validation_synset_labels.txt of "
            f"https://github.com/tensorflow/models); found {len(classes)} lines. Otherwise {LAYOUT}"
        )
    return dict(zip(sorted(paths, key=os.fsencode), classes, strict=True))


def _read(image: _Image, label: int) -> Sample | Unusable:
    try:
        content = image.files.read(image.path)
        measure_bytes(content)
    except Exception as error:  # as above
        return Unusable(f"{image.archive}: {image.path}", str(error) or type(error).__name__)
    return Sample(content, image.path.rpartition(".")[2], label)


def _open_files(archive: Path, stack: ExitStack) -> _Files:
    """Return the files in a folder, a zip or a tar; they can be read until the stack closes."""
    if archive.is_dir():
        return _Files(
            paths=list(_walk(archive)),
            read=lambda path: (archive / path).read_bytes(),
            num_bytes=lambda path: (archive / path).stat().st_size,
        )
    file = stack.enter_context(archive.open("rb"))
    # A zip begins so; a tar has no mark at its beginning.
    start = file.read(2)
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    if start != b"PK":
        locations = _unique(_tar_places(archive, file, end=length))
        return _Files(
            paths=list(locations),
            read=lambda path: os.pread(file.fileno(), *locations[path]),
            num_bytes=lambda path: locations[path][0],
        )
    opened = stack.enter_context(zipfile.ZipFile(file))
    files = [info for info in opened.infolist() if not info.is_dir()]
    infos = _unique((_clean(info.filename), info) for info in files)
    unpacked = sum(info.file_size for info in infos.values())
    # Before any of it is unpacked.
    if unpacked > max(_ALWAYS, _MAX_RATIO * length):
        raise DataError(
            f"{archive}: {length:,} bytes would unpack to {unpacked:,}, and images hardly compress "
            "(a decompression bomb?)"
        )
    return _Files(
        paths=list(infos),
        read=lambda path: opened.read(infos[path]),
        num_bytes=lambda path: infos[path].file_size,
    )


def _unique(files: Iterable[tuple[str, _File]]) -> dict[str, _File]:
    """Return files by their path; raise DataError for two images of one path."""
    by_path: dict[str, _File] = {}
    for path, file in files:
        if path in by_path and is_image(posixpath.basename(path)):
            raise DataError(f"{path}: the archive has two images of this path; unpack it")
        by_path[path] = file
    return by_path


def _walk(root: Path) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    seen: dict[str, str] = {}
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        other = seen.setdefault(os.path.realpath(folder), folder)
        if other != folder:  # a link: its images would have two labels, or the walk have no end
            raise DataError(f"{folder}: links to {other}, whose images would be imported twice")
        folders[:] = filter(visible, folders)
        yield from (os.path.relpath(f"{folder}/{name}", root) for name in names)


def _clean(path: str) -> str:
    return posixpath.normpath(f"/{path}").lstrip("/")


def _tar_places(
    archive: Path, file: IO[bytes], *, end: int, folder: str = ""
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path of each file, and the number of its bytes and their position."""
    for member in members(file, end):
        path = _clean(f"{folder}/{member.name}")
        if member.isdir():
            continue
        if not has_bytes(member):
            if is_image(posixpath.basename(path)):
                raise DataError(
                    f"{archive}: {path} is a link or another special file; unpack the archive and "
                    "import the folder"
                )
        # ImageNet's training archive has a tar for each class.
        elif path.endswith(".tar") and not folder:
            file.seek(member.offset_data)
            inner = member.offset_data + member.size
            yield from _tar_places(archive, file, end=inner, folder=path[:-4])
        else:
            yield path, (member.size, member.offset_data)
