"""Libraries that train from storage, as storage.py measures them, each in a process of its own.

    python -m benchmarks.speed.storage_peers versions
    python -m benchmarks.speed.storage_peers mds SHARDS FOLDER
    python -m benchmarks.speed.storage_peers NAME ADDRESS CACHE [--batch 64] [--threads 2]

The interpreter may be that of a virtual environment which has the libraries, and in which this
package need not be installed. The last form reads two epochs with the worker processes of a
DataLoader and prints, as JSON, the seconds of each and the processor seconds of both. Decoding is
that of torchvision's documentation: Pillow, RandomResizedCrop 224, flip, normalise.
"""

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from largebatch.optional import require_torchvision

MOSAICML = "mosaicml-streaming"
WEBDATASET = "WebDataset"
PACKAGES = {MOSAICML: ("mosaicml-streaming", "streaming"), WEBDATASET: ("webdataset", "webdataset")}
"""Distribution and module of each library."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHUFFLED = 500  # images among which WebDataset draws: a shard of each process holds fewer
SHARD_BYTES = 2**23
SHARDS = "shards"  # file in the cache with the number of shards, which WebDataset cannot list


def _library(name: str) -> Any:  # noqa: ANN401 -- libraries without types
    require_torchvision()  # the first import of torchvision, which these libraries import too
    return importlib.import_module(PACKAGES[name][1])


def versions() -> dict[str, str]:
    """Return the version of each library, or why it cannot be imported."""
    found = {}
    for name, (distribution, _) in PACKAGES.items():
        try:
            _library(name)
            found[name] = importlib.metadata.version(distribution)
        except Exception as error:  # the result names any
            found[name] = f"cannot be imported: {error}".split("\n", maxsplit=1)[0]
    return found


def _samples(shards: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the encoded images and labels of a folder of shards."""
    for path in sorted(shards.glob("*.tar")):
        with tarfile.open(path) as shard:
            by_name: dict[str, dict[str, bytes]] = {}
            for member in shard:
                file = shard.extractfile(member)
                assert file is not None
                stem, _, suffix = member.name.rpartition(".")
                by_name.setdefault(stem, {})[suffix] = file.read()
        for parts in by_name.values():
            (image,) = (content for suffix, content in parts.items() if suffix != "cls")
            yield image, int(parts["cls"])


def write_mds(shards: Path, folder: Path) -> None:
    """Write the images of shards in the format of mosaicml-streaming."""
    streaming = _library(MOSAICML)
    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as writer:
        for image, label in _samples(shards):
            writer.write({"image": image, "label": label})


class _Decoded:
    """Turns an encoded image into the input of a network."""

    def __init__(self) -> None:
        require_torchvision()
        from torchvision import transforms

        self._transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __call__(self, content: bytes) -> torch.Tensor:
        with Image.open(io.BytesIO(content)) as image:
            pixels: torch.Tensor = self._transform(image.convert("RGB"))
        return pixels


def _mosaicml(address: str, cache: Path, batch: int) -> Iterable[object]:
    streaming = _library(MOSAICML)
    # What a killed process has left there would make this one wait.
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()
    decoded = _Decoded()

    streaming_dataset: Any = streaming.StreamingDataset

    class Images(streaming_dataset):  # type: ignore[misc]  # no types
        def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(at)
            return decoded(sample["image"]), sample["label"]

    if address.startswith("http"):
        # It reads no web server, but S3's protocol, of which nginx answers what it needs.
        scheme, _, rest = address.partition("://")
        host, _, path = rest.partition("/")
        os.environ["S3_ENDPOINT_URL"] = f"{scheme}://{host}"
        os.environ["AWS_ACCESS_KEY_ID"] = "testing-key"
        os.environ["AWS_SECRET_ACCESS_KEY"] = "testing-secret"
        remote = f"s3://{path}"
        images = Images(remote=remote, local=str(cache), shuffle=True, batch_size=batch)
        for stream in images.streams:
            # The forked processes would share the connection that the index was read with: with
            # latency their responses mix, and shards are cut short or never complete.
            stream._downloader.clean_up()
        return images
    return Images(local=address, shuffle=True, batch_size=batch)


def _webdataset(address: str, cache: Path) -> Iterable[object]:
    webdataset = _library(WEBDATASET)
    decoded = _Decoded()
    shards = range(int((cache / SHARDS).read_text()))
    return (  # type: ignore[no-any-return]  # no types
        webdataset.WebDataset(
            [f"{address}/{number:06d}.tar" for number in shards],
            shardshuffle=len(shards),
            cache_dir=str(cache) if address.startswith("http") else None,
        )
        .shuffle(SHUFFLED)
        .to_tuple("jpg;jpeg;png", "cls")
        .map_tuple(decoded, int)
    )


def epochs(name: str, address: str, cache: Path, *, batch: int, threads: int) -> dict[str, Any]:
    """Read two epochs; return the images, the seconds of each, and the processor seconds of both.

    Starting the processes belongs to the first epoch, as it does in a run.
    """
    opened = _mosaicml(address, cache, batch) if name == MOSAICML else _webdataset(address, cache)
    loader: Any = torch.utils.data.DataLoader(
        opened,  # type: ignore[arg-type]  # no types
        batch_size=batch,
        num_workers=threads,
        persistent_workers=True,
    )
    cpu = os.times()
    seconds = []
    images = 0
    for _ in range(2):
        start = time.perf_counter()
        for pixels, _ in loader:
            images += len(pixels)
        seconds.append(time.perf_counter() - start)
    del loader  # ends and reaps the processes, whose processor seconds are known only then
    end = os.times()
    used = sum(end[:4]) - sum(cpu[:4])
    return {"images": images, "seconds": seconds, "processor seconds": used}


def main() -> None:
    """Print the versions, write a folder, or read two epochs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=["versions", "mds", *PACKAGES])
    parser.add_argument("address", nargs="?", default="")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.task == "versions":
        print(json.dumps(versions()))
    elif args.task == "mds":
        write_mds(Path(args.address), args.folder)
    else:
        result = epochs(
            args.task, args.address, args.folder, batch=args.batch, threads=args.threads
        )
        print(json.dumps(result))


if __name__ == "__main__":
    main()
