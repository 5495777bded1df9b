"""Convert published archives of data sets to shards, without loss.

The archives must be on disk: nothing is downloaded. Arrays become PNGs, files keep their bytes.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from largebatch.address import Address, Place
from largebatch.errors import DataError
from largebatch.storage import ReadProgress

if TYPE_CHECKING:
    from largebatch.data.datasets.packing import DataSet


def import_data(  # noqa: PLR0913 -- the options of the command line, one to one
    name: str,
    source: Place,
    out: Place,
    *,
    shard_bytes: int,
    progress: ReadProgress,
    drop_bad: bool = False,
    seed: int | None = 0,
    options: Mapping[str, Any] | None = None,
) -> Sequence[str]:
    """Write the data set `name` from `source`, an archive or its folder, to `out` as shards.

    `out` is a new folder or an address without objects; shards of `webdataset` may come from one.

    `seed` draws the order of the training images; None keeps the source's. `options` are the
    keyword arguments of its opener. Returns lines to print: the ignored files,
    the division, copies, and with `drop_bad` the images that cannot be used. Raises DataError if
    files are missing; the message says which are expected.
    """
    from largebatch.data.datasets import arrays, image_folder, parquet
    from largebatch.data.datasets.packing import open_packed, require_new_place, write_shards

    official = ("cifar10", "cifar100", "mnist", "fashion-mnist")
    openers: dict[str, Callable[..., AbstractContextManager[DataSet]]] = {
        **{name: partial(arrays.open_official, name=name) for name in official},
        "imagefolder": image_folder.open_archives,
        "parquet": parquet.open_parquet,
        "webdataset": open_packed,
    }
    if isinstance(source, Address) and name != "webdataset":
        raise DataError(
            f"{source}: import {name} reads files of this machine; only webdataset takes an address"
        )
    require_new_place(out)
    with warnings.catch_warnings(), openers[name](source, **(options or {})) as data_set:
        warnings.simplefilter("ignore")  # of Pillow, about images that are checked here
        remarks = write_shards(
            data_set,
            out,
            shard_bytes=shard_bytes,
            progress=progress,
            drop_bad=drop_bad,
            seed=seed,
        )
        return [*data_set.remarks, *remarks]
