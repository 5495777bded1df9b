"""Turn the archives that data sets are published as into shards, without loss.

The archives are on disk already: nothing is downloaded. Arrays become PNGs, files keep their bytes.
"""

from pathlib import Path

from largebatch.data.building import Progress
from largebatch.data.imports import cifar10, fashion_mnist, image_folder
from largebatch.data.packing import write_shards
from largebatch.errors import DataError


def import_data(
    name: str, source: Path, out: Path, *, shard_bytes: int, progress: Progress
) -> None:
    """Write the data set `name` from the archive `source`, or the folder it lies in, to `out`.

    Raises DataError that says which files are expected, and where to get them, if they are missing.
    """
    openers = {
        "fashion-mnist": fashion_mnist.open_archives,
        "cifar10": cifar10.open_archives,
        "imagefolder": image_folder.open_archives,
    }
    if name not in openers:
        raise ValueError(f"expected one of {', '.join(openers)}, got {name!r}")
    try:
        with openers[name](source) as data_set:
            write_shards(data_set, out, shard_bytes=shard_bytes, progress=progress)
    except EOFError as error:
        raise DataError(f"{source}: an archive is cut off ({error}); fetch it again") from None
