"""Measure images per second of training images from a server with latency, beside the local disk.

    LARGEBATCH_DATA=DIR python -m benchmarks.speed.storage [--rounds 5] [--peers PYTHON]

Full-size ImageNet JPEGs in shards, random crop of 224 pixels, flip, normalise. The server is nginx
behind the proxy of tests/support, which answers a request after 0, 20 or 50 milliseconds; both are
on this machine, so they take processor time of the same cores. In a round every rival reads two
epochs, in random order, each with an empty cache on disk: the first epoch fetches every block, the
second none. The disk is read by the same pipeline. Shares are of rates in the same round; ratios to
other libraries are of times, ours first.

The images are fewer than a reader looks ahead, so blocks are large. FAR is the same with a shorter
look ahead, so that blocks are as small as those of a set in a random order that is larger.

The peers are mosaicml-streaming, which reads S3's protocol, and WebDataset, which reads the web
server with curl; both keep whole shards on the disk. They need packages that this one does not:
`--peers` is the interpreter of a virtual environment with them (without it they are not measured).

    python -m venv PEERS && PEERS/bin/pip install mosaicml-streaming webdataset torchvision

Then: updates per second of a run of digits with --mirror to a folder, and without, in pairs; each
writes three checkpoints.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.speed.measuring import ROOT, paired_ratio, spread, write
from benchmarks.speed.storage_peers import MOSAICML, PACKAGES, SHARDS, WEBDATASET
from largebatch import load_recipe, run
from largebatch.address import place_of
from largebatch.data.datasets import import_data
from largebatch.data.decoders import host_cache
from largebatch.data.index.index import make
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import HostCache
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.replacing import replaced
from largebatch.storage import silent

RECIPE = "resnet50_1024_nus"
CPU = torch.device("cpu")
SHARD_BYTES = 2**23
LATENCIES = (0, 20, 50)
COMPARED = 20
"""Milliseconds before a response: 20 is usual of object storage. The peers are read with it."""

FAR = f"{COMPARED} ms, far"
"""Rival with COMPARED milliseconds and FAR_BYTES of look ahead."""

FAR_BYTES = 2**25

TARGET = 0.9
"""Share of the disk's rate with COMPARED milliseconds."""

CHECKPOINTS = 3
"""Checkpoints of a run that is measured with and without a mirror."""

EPOCHS = ("first epoch", "second epoch")
DISK = "disk"


def write_shards(samples: Path, folder: Path, copies: int) -> tuple[int, int]:
    """Write each image as a class of `copies` into shards; return the classes and the shards."""
    with zipfile.ZipFile(samples) as archive, tempfile.TemporaryDirectory(dir=folder) as scratch:
        names = archive.namelist()
        for name in names:
            for split, number in (("train", copies), ("val", 1)):
                place = Path(scratch) / split / Path(name).stem
                place.mkdir(parents=True)
                for copy in range(number):
                    (place / f"{copy}{Path(name).suffix}").write_bytes(archive.read(name))
        import_data(
            "webdataset",
            Path(scratch),
            folder / "shards",
            shard_bytes=SHARD_BYTES,
            progress=silent,
        )
    return len(names), len(list((folder / "shards" / "train").glob("*.tar")))


class Server(NamedTuple):
    """A server of the shards in other processes, and what it has done once it has ended."""

    address: str
    counts: dict[str, float]


@contextmanager
def served(folder: Path, *, milliseconds: int) -> Iterator[Server]:
    """Serve a folder from other processes."""
    script = ROOT / "tests" / "support" / "web_server.py"
    command = [sys.executable, str(script), str(folder), "--latency", str(milliseconds / 1000)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise SystemExit("the server did not start; it needs nginx")
            server = Server(f"http://127.0.0.1:{port}", {})
            yield server
        finally:
            process.stdin.close()
        server.counts.update(json.loads(process.stdout.read()))


def pipeline(place: str, cache: Path | None, classes: int, args: argparse.Namespace) -> Pipeline:
    """Open the images as a run does."""
    recipe = load_recipe(
        RECIPE,
        [
            *(f"data.classes={classes}", f"data.val_samples={classes}"),
            f"data.train_samples={classes * args.copies}",
            f"batch={{global_batch: {args.batch}, bn_span: {args.batch}}}",
            *(f"execution.device_batch={args.batch}", "execution.decoder=torchvision"),
            *("execution.cache=none", "schedule.warmup=null", "polish=null"),
        ],
    )
    kept = None if cache is None else HostCache(cache, None, worker=0, workers=1)
    return open_images(recipe, make_plan(recipe), Serial(CPU), folder=place_of(place), cache=kept)


def two_epochs(place: str, cache: Path | None, classes: int, args: argparse.Namespace) -> Any:  # noqa: ANN401 -- JSON
    """Read two epochs as a run does; return what storage_peers.epochs does."""
    images = pipeline(place, cache, classes, args)
    # In whole batches, as an update takes them.
    in_epoch = classes * args.copies // args.batch
    times = [time.perf_counter()]
    cpu = [time.process_time()]
    batches = images.training(range(2 * in_epoch), clean=False)
    for number, _ in enumerate(batches, start=1):
        if number % in_epoch == 0:
            times.append(time.perf_counter())
            cpu.append(time.process_time())
    return {
        "images": 2 * in_epoch * args.batch,
        "seconds": [end - start for start, end in pairwise(times)],
        "processor seconds": cpu[-1] - cpu[0],
        "processor seconds of epochs": [end - start for start, end in pairwise(cpu)],
    }


def peer(args: argparse.Namespace, *words: object) -> str:
    """Run storage_peers.py with the interpreter of the peers; return what it prints."""
    command = [args.peers, "-m", "benchmarks.speed.storage_peers", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=args.peer_seconds,
    )
    return done.stdout.splitlines()[-1] if done.stdout else ""


def peer_epochs(name: str, address: str, cache: Path, args: argparse.Namespace) -> Any:  # noqa: ANN401 -- JSON
    """Read two epochs with a peer."""
    options = ["--batch", args.batch, "--threads", args.threads]
    return json.loads(peer(args, name, address, cache, *options))


def in_rounds(
    measured: Callable[[str, Path], Any],
    versions: dict[str, str],
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, list[Any]]:
    """Return the results of every rival, round by round.

    A peer that takes too long is left out, and `versions` then has the reason.
    """
    peers = _installed(versions)
    rivals = [DISK, *map(_ours, LATENCIES), FAR, *peers]
    runs: dict[str, list[Any]] = {}
    draw = random.Random(0)
    for number in range(args.rounds):
        for name in draw.sample(rivals, k=len(rivals)):
            if name in PACKAGES and name not in peers:
                continue
            cache = folder / "cache"
            cache.mkdir()
            try:
                result = measured(name, cache)
            except subprocess.TimeoutExpired:
                if name not in peers:
                    raise
                # Measured in no round, so that every ratio has the same rounds.
                versions[name] += f": no result after {args.peer_seconds:g} s"
                peers.remove(name)
                runs.pop(name, None)
                continue
            finally:
                shutil.rmtree(cache, ignore_errors=True)
            runs.setdefault(name, []).append(result)
            print(number, name, json.dumps(result), flush=True)
    return runs


def _installed(versions: dict[str, str]) -> list[str]:
    return [name for name, version in versions.items() if version[0].isdigit()]


def images_a_second(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every rival in rounds."""
    samples = args.data / "imagenet_samples" / "samples.zip"
    classes, shards = write_shards(samples, folder, args.copies)
    missing = dict.fromkeys(PACKAGES, "not measured: --peers names no interpreter")
    versions = missing if args.peers is None else json.loads(peer(args, "versions"))
    if MOSAICML in _installed(versions):
        peer(args, "mds", folder / "shards" / "train", folder / "mds")
    seconds_to_index = {}
    with ExitStack() as stack:
        servers = {
            latency: stack.enter_context(served(folder, milliseconds=latency))
            for latency in LATENCIES
        }
        for latency, server in servers.items():
            start = time.perf_counter()
            for split in ("train", "val"):
                make(place_of(f"{server.address}/shards"), split)
            seconds_to_index[_ours(latency)] = time.perf_counter() - start

        def measured(name: str, cache: Path) -> Any:  # noqa: ANN401 -- JSON
            if name == DISK:
                return two_epochs(str(folder / "shards"), None, classes, args)
            if name == WEBDATASET:
                address = f"{servers[COMPARED].address}/shards/train"
                (cache / SHARDS).write_text(str(shards))
                return peer_epochs(name, address, cache, args)
            if name == MOSAICML:
                return peer_epochs(name, f"{servers[COMPARED].address}/mds", cache, args)
            if name == FAR:
                with replaced(host_cache, "LOOKAHEAD_BYTES", FAR_BYTES):
                    return two_epochs(f"{servers[COMPARED].address}/shards", cache, classes, args)
            (address,) = (
                server.address for latency, server in servers.items() if _ours(latency) == name
            )
            return two_epochs(f"{address}/shards", cache, classes, args)

        runs = in_rounds(measured, versions, folder, args)
    counts = {_ours(latency): server.counts for latency, server in servers.items()}
    return {
        "peers": versions,
        "seconds to index": seconds_to_index,
        "servers": counts,
        **_compared(runs),
    }


def _ours(latency: int) -> str:
    return f"{latency} ms"


def _compared(runs: dict[str, list[Any]]) -> dict[str, Any]:
    """Return rates, shares of the disk's rate, ratios to peers, and processor time."""
    result: dict[str, Any] = {}
    ours = _ours(COMPARED)
    for epoch, title in enumerate(EPOCHS):
        rates = {
            name: [one["images"] / 2 / one["seconds"][epoch] for one in results]
            for name, results in runs.items()
        }
        result[title] = {
            "images a second": {name: spread(values) for name, values in rates.items()},
            "shares": {
                f"{name} / {DISK}": paired_ratio(rates[name], rates[DISK])
                for name in rates
                if name != DISK and name not in PACKAGES
            },
            "ratios": {
                f"ours / {name}": paired_ratio(rates[name], rates[ours])
                for name in rates
                if name in PACKAGES
            },
        }
        cpu = {
            name: [one["processor seconds of epochs"][epoch] for one in results]
            for name, results in runs.items()
            if name not in PACKAGES
        }
        # What the share would be if only the process that reads used the processor.
        result[title]["processor seconds"] = {
            f"{DISK} / {name}": paired_ratio(cpu[DISK], cpu[name]) for name in cpu if name != DISK
        }
        result[title]["met"] = result[title]["shares"][f"{ours} / {DISK}"]["median"] >= TARGET
    result["processor milliseconds an image"] = {
        name: spread([1000 * one["processor seconds"] / one["images"] for one in results])
        for name, results in runs.items()
    }
    return result


def mirror(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the updates per second of a run of digits with a mirror and without."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    draw = random.Random(0)
    for number in range(args.mirror_rounds):
        for name in draw.sample(list(rates), k=len(rates)):
            target = f"file://{folder}/mirror-{number}" if name == "with" else None
            summary = run(
                "digits_96",
                out=folder / f"{name}-{number}",
                mirror=target,
                max_steps=args.mirror_steps,
                report=False,
                overrides=[
                    "polish=null",
                    f"execution.checkpoints.every_steps={args.mirror_steps // CHECKPOINTS}",
                ],
            )
            assert summary.images_per_second is not None
            rates[name].append(summary.images_per_second / summary.global_batch)
    return {
        "updates a second": {name: spread(values) for name, values in rates.items()},
        # Of times: the rates are their inverses.
        "ratios": {"with / without": paired_ratio(rates["without"], rates["with"])},
    }


def main() -> None:
    """Measure, then print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    data = os.environ.get("LARGEBATCH_DATA")
    parser.add_argument("--data", type=Path, default=data, required=data is None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=10, help="of each of 100 images")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="worker processes of the peers")
    parser.add_argument("--peer-seconds", type=float, default=120, help="of a peer's two epochs")
    parser.add_argument("--mirror-rounds", type=int, default=7)
    parser.add_argument("--mirror-steps", type=int, default=120, help="updates of each run")
    parser.add_argument(
        "--peers", default=os.environ.get("BENCHMARK_PEERS"), help="a Python that has the peers"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        settings = {**vars(args), "data": "LARGEBATCH_DATA", "peers": args.peers is not None}
        result: dict[str, Any] = {"settings": settings, **images_a_second(Path(scratch), args)}
        result["mirror"] = mirror(Path(scratch), args)
    print(json.dumps(result, indent=2))
    print(write("storage", result))


if __name__ == "__main__":
    main()
