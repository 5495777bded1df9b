"""Blocks of a bucket on a host's disk, beside the same images read from a folder."""

import errno
import fcntl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from class_folders import imported, png
from decoding import section, view
from s3_server import Storage, connected, upload
from slow_proxy import Proxy

from largebatch import storage
from largebatch.address import place_of
from largebatch.bucket import ChangedError, open_bucket
from largebatch.data.augment import train_request
from largebatch.data.decoders import host_cache
from largebatch.data.decoders.host_cache import Blocks, block_bytes, next_positions
from largebatch.data.decoders.reader import open_reader, read, read_ahead
from largebatch.data.index.index import Index, load_or_read
from largebatch.data.order import sample_ids, samples_at
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import HostCache, TrainingOrder
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.data import Order
from largebatch.recipe.loading import load_recipe

PLACE = place_of("s3://photos/small")
NUMBER = 96
WHOLE = section(crop_area=None, flip=False)
DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 96 and 24 images of 32 x 32 pixels; a block has one or two of them."""
    root = tmp_path_factory.mktemp("folders")
    for split, number in (("train", NUMBER), ("val", 24)):
        for image in range(number):
            path = root / "classes" / split / "ab"[image % 2] / f"{image:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(1000 * len(split) + image, side=32))
    return imported(root / "classes", root / "shards", name="webdataset", size=150_000)


@pytest.fixture
def server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> Iterator[tuple[Storage, Proxy]]:
    """The bucket with the shards and their index, behind a proxy that has seen nothing yet."""
    for length in ("BLOCK_BYTES", "LARGE_BLOCK_BYTES"):
        monkeypatch.setattr(host_cache, length, 8192)
    with connected(monkeypatch) as (objects, proxy):
        upload(folder, objects, to="small")
        for split in ("train", "val"):
            load_or_read(PLACE, split)
        proxy.seen.clear()
        yield objects, proxy
    host_cache._keeper.cache_clear()


def cached(tmp_path: Path, *, share: int | None = None, worker: int = 0, workers: int = 1) -> Index:
    """Return the index of the training images in the bucket, with a cache of this host."""
    index = load_or_read(PLACE, "train")
    order = TrainingOrder(
        seed=0,
        num_samples=NUMBER,
        trained=None,
        repeats=1,
        order=None,
        device_batch=8,
        ranks=range(workers),
        workers=workers,
    )
    return replace(index, cache=HostCache(tmp_path / "blocks", share, worker, workers, order))


def contents(index: Index, *, batches: range, worker: int = 0, workers: int = 1) -> list[bytes]:
    """Read these batches of 8 images in the order of training, those of one worker."""
    requests = (
        train_request(index, range(8 * batch, 8 * batch + 8), WHOLE, view(), seed=0)
        for batch in batches[worker::workers]
    )
    found = []
    with open_reader(index, 8) as reader:
        for reading in read_ahead(requests, reader):
            found += [content.tobytes() for content in reading.contents]
            reader.release(reading)
    return found


def expected(folder: Path, *, batches: range) -> list[bytes]:
    index = load_or_read(folder, "train")
    positions = range(8 * batches.start, 8 * batches.stop)
    samples = sample_ids(positions, seed=0, num_samples=NUMBER).tolist()
    return [read(index.locate(sample)) for sample in samples]


def test_an_epoch_is_that_from_disk_and_each_block_is_fetched_once(
    folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    _, proxy = server
    index = cached(tmp_path)
    assert contents(index, batches=range(24)) == expected(folder, batches=range(24))
    assert set(Counter(proxy.ranges).values()) == {1}
    # A second run starts warm: nothing is asked of the bucket.
    proxy.seen.clear()
    host_cache._keeper.cache_clear()
    assert contents(index, batches=range(12)) == expected(folder, batches=range(12))
    assert not proxy.ranges


@pytest.mark.parametrize("workers", [2, 8])
def test_the_workers_of_a_host_fetch_each_block_once(
    workers: int, folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    _, proxy = server
    proxy.latency = 0.01
    indexes = [cached(tmp_path, worker=n, workers=workers) for n in range(workers)]
    proxy.seen.clear()

    def work(worker: int) -> list[bytes]:
        return contents(indexes[worker], batches=range(24), worker=worker, workers=workers)

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(work, range(workers)))
    whole = expected(folder, batches=range(24))
    for worker in range(workers):
        starts = range(8 * worker, len(whole), 8 * workers)
        assert found[worker] == [image for start in starts for image in whole[start : start + 8]]
    assert set(Counter(proxy.ranges).values()) == {1}


def test_less_room_than_images_needs_few_more_reads_than_the_best_possible(
    folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    """Beside Belady's rule and least recently used, simulated on the blocks of the same order."""
    _, proxy = server
    index = cached(tmp_path)
    blocks = Blocks(index, index.cache)  # type: ignore[arg-type]  # it has one
    blocks.close()
    host_cache._keeper.cache_clear()
    sizes = (blocks._lengths + 4).tolist()
    share = sum(sizes) // 2
    order = sample_ids(range(4 * NUMBER), seed=0, num_samples=NUMBER)
    sequence = blocks._block_of[order].tolist()
    proxy.seen.clear()
    index = cached(tmp_path / "small", share=share)
    assert contents(index, batches=range(48)) == expected(folder, batches=range(48))
    fetched = len(proxy.ranges)
    best = misses(sequence, sizes, share, furthest_use)
    # Blocks that are expected are kept, and read before their use, so the numbers are not equal.
    assert fetched == pytest.approx(best, rel=0.15)
    assert misses(sequence, sizes, share, least_recent) > 1.5 * best
    files = (tmp_path / "small").rglob("*")
    assert 0 < sum(path.stat().st_size for path in files if path.is_file()) <= share


@pytest.mark.parametrize("is_near", [True, False])
def test_blocks_are_large_where_they_are_fetched_ahead_anyway(
    is_near: bool,
    folder: Path,
    server: tuple[Storage, Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, proxy = server
    monkeypatch.setattr(host_cache, "LARGE_BLOCK_BYTES", 2**16)
    if not is_near:
        monkeypatch.setattr(host_cache, "LOOKAHEAD_BYTES", 10_000)
    index = cached(tmp_path)
    assert contents(index, batches=range(24)) == expected(folder, batches=range(24))
    assert index.offsets is not None
    length = 2**16 if is_near else 8192
    cells = {(index.paths[row], int(index.offsets[row]) // length) for row in range(NUMBER)}
    assert len(proxy.ranges) == len(set(proxy.ranges)) == len(cells)


PHOTOS = {"num_samples": 1_281_167, "num_bytes": 140 * 10**9}
THUMBNAILS = {"num_samples": 50_000, "num_bytes": 125 * 10**6}


@pytest.mark.parametrize(
    ("images", "order", "share", "workers", "is_large"),
    [
        pytest.param(PHOTOS, None, None, 2, False, id="the whole set is out of reach"),
        pytest.param(THUMBNAILS, None, None, 2, True, id="the whole set is in reach"),
        pytest.param(PHOTOS, Order(chunk=16, window=64), None, 2, True, id="a window is in reach"),
        pytest.param(PHOTOS, Order(chunk=256, window=64), None, 2, False, id="a window is not"),
        pytest.param(PHOTOS, Order(chunk=1, window=64), None, 2, False, id="no chunks"),
        pytest.param(THUMBNAILS, Order(chunk=256, window=999), None, 2, True, id="one window"),
        pytest.param(THUMBNAILS, None, 62 * 10**6, 2, False, id="no room"),
        pytest.param(THUMBNAILS, None, 63 * 10**6, 2, True, id="room"),
        pytest.param(THUMBNAILS, None, None, 4, False, id="another host has the other workers"),
    ],
)
def test_the_length_of_blocks(
    images: dict[str, int],
    order: Order | None,
    share: int | None,
    workers: int,
    is_large: bool,
    tmp_path: Path,
) -> None:
    of_training = TrainingOrder(
        seed=0,
        num_samples=images["num_samples"],
        trained=None,
        repeats=1,
        order=order,
        device_batch=64,
        ranks=range(2),
        workers=workers,
    )
    cache = HostCache(tmp_path, share, worker=1, workers=2, order=of_training)
    length = 2**20 if is_large else 2**18
    assert block_bytes(cache, **images) == length
    # Validation reads images in their order.
    assert block_bytes(replace(cache, order=None), **images) == 2**20


def misses(
    sequence: list[int],
    sizes: list[int],
    share: int,
    worst: Callable[[list[int], int, set[int]], int],
) -> int:
    """Count the reads of a cache with room for `share` bytes."""
    kept: set[int] = set()
    number = 0
    for place, block in enumerate(sequence):
        if block not in kept:
            number += 1
            while kept and sum(sizes[one] for one in kept) + sizes[block] > share:
                kept.remove(worst(sequence, place, kept))
            kept.add(block)
    return number


def furthest_use(sequence: list[int], place: int, kept: set[int]) -> int:
    later = sequence[place:]
    return max(kept, key=lambda block: later.index(block) if block in later else len(later))


def least_recent(sequence: list[int], place: int, kept: set[int]) -> int:
    before = sequence[:place][::-1]
    return max(kept, key=before.index)


def test_a_damaged_block_is_fetched_again(
    folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    _, proxy = server
    index = cached(tmp_path)
    contents(index, batches=range(12))
    path = next((tmp_path / "blocks").glob("*/*/*"))
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    proxy.seen.clear()
    host_cache._keeper.cache_clear()
    assert contents(index, batches=range(12)) == expected(folder, batches=range(12))
    assert len(proxy.ranges) == 1


KILLED = """
import fcntl, sys, time
file = open(sys.argv[1], "ab", buffering=0)
fcntl.flock(file, fcntl.LOCK_EX)
file.write(b"half of a block")
print("locked", flush=True)
time.sleep(60)
"""


def test_a_worker_that_is_killed_during_a_fetch_does_not_stop_the_others(
    folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    index = cached(tmp_path)
    blocks = Blocks(index, index.cache)  # type: ignore[arg-type]  # it has one
    blocks.close()
    path = blocks._path(0)
    Path(path).parent.mkdir(parents=True)
    command = [sys.executable, "-c", KILLED, f"{path}.partial"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            job = pool.submit(contents, index, batches=range(12))
            with pytest.raises(TimeoutError):
                job.result(0.3)  # it waits for the other worker
        finally:
            process.kill()
        assert job.result(60) == expected(folder, batches=range(12))
    assert not list((tmp_path / "blocks").rglob("*.partial"))


def test_a_full_disk_is_no_missing_image(
    folder: Path,
    server: tuple[Storage, Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = cached(tmp_path)

    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(host_cache, "checksum", full)  # when a file is written
    assert contents(index, batches=range(12)) == expected(folder, batches=range(12))
    assert not list((tmp_path / "blocks").glob("*/*/*"))


def test_a_changed_shard_is_refused_and_not_mixed_with_old_blocks(
    folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    objects, _ = server
    index = cached(tmp_path)
    name = "small/train/000000.tar"
    objects.objects[name] = objects.objects[name][:-1] + b"x"
    with pytest.raises(DataError, match=f"s3://photos/{name}: was changed since it was indexed"):
        contents(index, batches=range(12))


def test_a_shard_that_is_removed_is_one_line(
    server: tuple[Storage, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, _ = server
    index = cached(tmp_path)
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    del objects.objects["small/train/000000.tar"]
    with pytest.raises(DataError, match=r"000000\.tar.*there is no such object"):
        contents(index, batches=range(12))


def test_every_kind_of_version_binds_a_read(server: tuple[Storage, Proxy]) -> None:
    """Also one that no condition can have: a weak ETag, one of Azure's lists, and a time."""
    bucket = open_bucket(PLACE)
    name = "train/000000.tar"
    tag = bucket.object(name).version
    whole = bytes(bucket.read_range(name, 0, 9, version=tag))
    same = [f"W/{tag}", tag.strip('"'), "2026-01-01T00:00:00+00:00"]
    assert [bytes(bucket.read_range(name, 0, 9, version=one)) for one in same] == [whole] * 3
    for other in ('"x"', 'W/"x"', "x", "2026-01-01T00:00:01+00:00"):
        with pytest.raises(ChangedError, match=name):
            bucket.read_range(name, 0, 9, version=other)


def test_a_block_is_expected_until_its_images_have_been_read(
    server: tuple[Storage, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that fails and is repeated does not give up the room of the next image."""
    index = cached(tmp_path)
    blocks = Blocks(index, index.cache)  # type: ignore[arg-type]  # it has one
    first, last = blocks._first_rows[:2]
    request = train_request(index, range(NUMBER), WHOLE, view(), seed=0)
    blocks.expect(request)
    location = index.locate(0)
    content = np.empty(location.num_bytes, dtype=np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "_read_block", Mock(side_effect=OSError("a moment")))
        with pytest.raises(OSError, match="a moment"):
            blocks.read(content, location)
    assert blocks._expected[0] == last - first
    blocks.read(content, location)
    assert blocks._expected[0] == last - first - 1
    blocks.close()


def test_uses_of_files_need_no_memory(tmp_path: Path) -> None:
    keeper = host_cache.Keeper(tmp_path, share=None, worker=0, workers=1)
    for use in range(1000):
        keeper.add(str(tmp_path / str(use % 10)), 5, next_use=use)
    assert len(keeper._queue) <= 2 * 10
    assert keeper._total == 50


def test_a_file_that_is_expected_goes_after_its_use(tmp_path: Path) -> None:
    keeper = host_cache.Keeper(tmp_path, share=20, worker=0, workers=1)
    last, first, second = (str(tmp_path / name) for name in ("last", "first", "second"))
    keeper.pin(last)
    for path, next_use in ((last, 90), (first, 10), (second, 20)):
        keeper.add(path, 10, next_use=next_use)
    # The farthest use is that of the expected file, so the next one went.
    assert (keeper.owns(last), keeper.owns(first), keeper.owns(second)) == (True, True, False)
    keeper.add(second, 10, next_use=20)
    assert keeper.owns(last)
    keeper.unpin(last)
    keeper.add(second, 10, next_use=20)
    assert not keeper.owns(last)


def test_files_without_a_known_use_go_as_is_best_for_images_that_are_read_in_turn(
    tmp_path: Path,
) -> None:
    sequence = 4 * [*range(6)]
    keeper = host_cache.Keeper(tmp_path, share=3, worker=0, workers=1)
    fetched = 0
    for number in sequence:
        path = str(tmp_path / str(number))
        keeper.pin(path)
        fetched += not keeper.owns(path)
        keeper.add(path, 1, next_use=None)
        keeper.unpin(path)
    sizes = 6 * [1]
    best = misses(sequence, sizes, 3, furthest_use)
    assert fetched == best < misses(sequence, sizes, 3, least_recent)


def test_a_file_that_was_removed_has_no_use_and_no_size(tmp_path: Path) -> None:
    keeper = host_cache.Keeper(tmp_path, share=10, worker=0, workers=1)
    removed, kept = (str(tmp_path / name) for name in ("removed", "kept"))
    keeper.add(removed, 10, next_use=90)
    keeper.add(kept, 10, next_use=20)
    keeper.use(removed, next_use=1)
    assert (keeper.owns(removed), keeper.owns(kept), keeper._total) == (False, True, 10)


@pytest.mark.parametrize("fault", ["503", "reset", "cut"])
def test_requests_that_fail_are_repeated(
    fault: str, folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    _, proxy = server
    index = cached(tmp_path)
    numbers = iter(range(10**6))
    proxy.fault = lambda _: fault if next(numbers) % 7 == 0 else None  # type: ignore[assignment,return-value]
    assert contents(index, batches=range(12)) == expected(folder, batches=range(12))
    assert proxy.faults[fault] > 2


def test_a_cache_that_cannot_be_written_is_one_line(
    server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    (tmp_path / "blocks").write_text("a file")
    with pytest.raises(DataError, match=r"--cache-dir: .*; choose another"):
        contents(cached(tmp_path), batches=range(1))


def test_a_cache_that_becomes_read_only_is_not_taken_for_a_network_error(
    server: tuple[Storage, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = cached(tmp_path)

    def lock(path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(host_cache, "_locked", lock)
    with pytest.raises(DataError, match=r"--cache-dir: .*Read-only file system.*; choose"):
        contents(index, batches=range(1))


def test_a_file_system_without_locks_is_refused_before_training(
    server: tuple[Storage, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", lock)
    with pytest.raises(DataError, match=r"--cache-dir: .*Function not implemented.*; choose"):
        contents(cached(tmp_path), batches=range(1))


def stages(place: object, rank: int, workers: int, cache: HostCache | None) -> Pipeline:
    """Return the pipeline of a worker on the images of a folder or a bucket."""
    recipe = load_recipe(
        DIGITS,
        [
            *("data.source=folder", "data.classes=2", f"data.train_samples={NUMBER}"),
            *("data.val_samples=24", "batch.global_batch=48", "batch.bn_span=6"),
            *("polish.statistics.samples=48", "execution.decoder=torchvision"),
        ],
    )
    plan = make_plan(recipe.with_execution(device_batch=6), workers=workers)
    serial = Serial(torch.device("cpu"))
    opened = open_images(recipe, plan, serial, folder=place, cache=cache)  # type: ignore[arg-type]  # a fixture
    return replace(opened, rank=rank)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_every_stage_has_the_images_of_the_folder_on_any_number_of_workers(
    workers: int, folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    _, proxy = server
    for rank in range(workers):
        cache = HostCache(tmp_path / "blocks", None, rank, workers)
        ours, theirs = (
            stages(place, rank, workers, of_place)
            for place, of_place in ((PLACE, cache), (folder, None))
        )
        with closing(ours), closing(theirs):
            for name in ("training", "validation", "statistics"):
                arguments = {"training": (range(3),), "statistics": (48,)}.get(name, ())
                words = {"clean": False} if name == "training" else {}
                pairs = zip(
                    getattr(ours, name)(*arguments, **words),
                    getattr(theirs, name)(*arguments, **words),
                    strict=True,
                )
                number = 0
                for one, other in pairs:
                    number += 1
                    assert torch.equal(one.images, other.images)
                    assert torch.equal(one.labels, other.labels)
                assert number or name == "validation"
    assert set(Counter(proxy.ranges).values()) == {1}


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("is_part", [False, True])
def test_the_next_use_is_that_of_this_hosts_workers(repeats: int, is_part: bool) -> None:
    """Workers 2 and 3 of four, with batches of three: searched for in the order itself."""
    trained = np.array([row for row in range(NUMBER) if row % 4]) if is_part else None
    order = TrainingOrder(
        seed=3,
        num_samples=NUMBER,
        trained=trained,
        repeats=repeats,
        order=None,
        device_batch=3,
        ranks=range(2, 4),
        workers=4,
    )
    number = order.num_trained * repeats
    samples = samples_at(
        range(6 * number), seed=3, num_samples=NUMBER, trained=trained, repeats=repeats
    )
    own = [sample if place % 12 >= 6 else -1 for place, sample in enumerate(samples.tolist())]
    firsts = np.arange(0, NUMBER - 3, 5)
    ends = firsts + np.arange(len(firsts)) % 3 + 1  # ranges of one, two and three rows
    for after in (0, 5, 100, number - 1, number, 3 * number + 7):
        end = (after // number + 2) * number  # two epochs are looked at
        found = next_positions(order, firsts, ends, after=after).tolist()
        for first, stop, next_use in zip(firsts.tolist(), ends.tolist(), found, strict=True):
            rows = range(first, stop)
            uses = [place for place in range(after + 1, end) if own[place] in rows]
            assert next_use == (uses[0] if uses else host_cache.NEVER)
