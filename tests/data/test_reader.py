"""Reads that fail, hang or return bytes that are not an image."""

import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decoding import Decode, both_decoders, photograph, run
from PIL import Image

from largebatch import storage
from largebatch.data.decoders import pixel_cache, torchvision
from largebatch.data.decoders import reader as reading
from largebatch.data.index.file import Paths
from largebatch.data.index.index import Index, Location, load_or_read
from largebatch.data.types import Bytes, Request
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError

READS = 8
TIMES = 4
"""Number of attempts of a read."""


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.03))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(24):
        place = tmp_path / "train" / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photograph(60, 80)).save(place / f"{number:02d}.jpg")
        os.utime(place / f"{number:02d}.jpg", ns=(0, 0))
    return load_or_read(tmp_path, "train")


def whole(index: Index, size: int = 6) -> list[Request]:
    """Request every image in turn."""
    boxes, flips = np.tile([0, 0, 60, 80], (size, 1)), np.zeros(size, dtype=np.bool_)
    starts = range(0, len(index), size)
    return [Request(np.arange(start, start + size), boxes, flips) for start in starts]


class Failing:
    """An os.preadv that fails for one image, a number of times or always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, times: float) -> None:
        self.identity, self.times, self.failed = path.stat().st_ino, times, 0
        self.real: Callable[[int, list[bytearray], int], int] = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, file: int, buffers: list[bytearray], offset: int) -> int:
        if os.fstat(file).st_ino == self.identity and self.failed < self.times:
            self.failed += 1
            raise OSError(5, "Input/output error")
        return self.real(file, buffers, offset)


@both_decoders
def test_a_read_that_fails_three_times_is_retried(
    decode: Decode, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [batch.images.clone() for batch in run(decode, folder, whole(folder))]
    failing = Failing(monkeypatch, folder.locate(8).path, TIMES - 1)
    found = [batch.images for batch in run(decode, folder, whole(folder))]
    assert failing.failed == TIMES - 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@both_decoders
def test_a_read_that_keeps_failing_ends_the_run_with_its_path(
    decode: Decode, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder.locate(8).path
    failing = Failing(monkeypatch, path, float("inf"))
    with pytest.raises(DataError, match=f"{path}: cannot be read .*Input/output error.*4 times"):
        list(run(decode, folder, whole(folder)))
    assert failing.failed == TIMES


@both_decoders
def test_a_removed_or_changed_image_is_named(decode: Decode, folder: Index) -> None:
    path = folder.locate(8).path
    content = path.read_bytes()
    for changed in (content[:-10], content + b"more"):
        overwrite(path, changed)
        wrong = f"{path}: .*it has {len(changed):,} bytes, it had {len(content):,}"
        with pytest.raises(DataError, match=wrong):
            list(run(decode, folder, whole(folder)))
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: .*it was changed .*, it had been changed"):
        list(run(decode, folder, whole(folder)))
    path.unlink()
    with pytest.raises(DataError, match=f"{path}: cannot be read .*No such file"):
        list(run(decode, folder, whole(folder)))


def test_files_of_a_sent_index_may_have_other_times(folder: Index) -> None:
    """A machine's own copy of the folder; only the lengths of its files are compared."""
    path = folder.locate(8).path
    content = path.read_bytes()
    os.utime(path, ns=(0, 1))
    elsewhere = replace(folder, mtimes=None)
    assert reading.read(elsewhere.locate(8)) == content
    path.write_bytes(content + b"more")
    with pytest.raises(DataError, match=f"it has {len(content) + 4:,} bytes"):
        reading.read(elsewhere.locate(8))


def test_partial_reads_are_completed(folder: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    location = folder.locate(8)
    content = location.path.read_bytes()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, buffers, at: real(f, [buffers[0][:7]], at))
    assert reading.read(location) == content


@pytest.fixture
def soon_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SLOW_SECONDS", 0.2)


@both_decoders
@pytest.mark.usefixtures("ends", "soon_slow")
def test_a_read_that_hangs_ends_the_run_with_its_path(decode: Decode, folder: Index) -> None:
    path, _ = hang(folder, 8)
    try:
        with pytest.raises(DataError, match=rf"{path}: .*no answer in 0.2 seconds.*tried {TIMES}"):
            list(run(decode, folder, whole(folder)))
    finally:
        let_go(path)


@pytest.mark.usefixtures("soon_slow")
@pytest.mark.parametrize("hanging", [[8], list(range(READS + 4)), [0, 8, 16]])
def test_reads_that_hang_once_are_retried_by_other_threads(
    folder: Index, monkeypatch: pytest.MonkeyPatch, hanging: list[int]
) -> None:
    """More than there are threads in one batch, and several of one thread's."""
    expected = [reading.read(folder.locate(sample)) for sample in range(len(folder))]
    pipes = [hang(folder, sample) for sample in hanging]
    real, moved = reading._read_again, []

    def mend_first(location: Location, problem: OSError) -> Bytes:
        """The disk recovers after the first read was abandoned."""
        for path, content in pipes:
            moved.append(path.rename(path.with_suffix(".pipe")))
            overwrite(path, content)
        pipes.clear()
        return real(location, problem)

    monkeypatch.setattr(reading, "_read_again", mend_first)
    requests = whole(folder, len(folder)) * 3
    with reading.open_reader(folder, READS) as reader:
        for given in reading.read_ahead(requests, reader):
            assert all(a.tobytes() == b for a, b in zip(given.contents, expected, strict=True))
            reader.release(given)
        for path in moved:
            let_go(path)
        deadline = time.monotonic() + 120
        while alive(reader) > READS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive(reader) == READS, "one for each that was given up, and no more"
    assert len(moved) == len(hanging)


def test_the_number_of_threads_follows_the_previous_batch(
    folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,), real, seconds = whole(folder, len(folder)), os.preadv, 0.0
    clock = threading.local()  # of a disk that is as fast as the test says

    def slow(file: int, buffers: list[memoryview], offset: int) -> int:
        clock.now = now() + seconds
        return real(file, buffers, offset)

    def now() -> float:
        return getattr(clock, "now", 0.0)

    def sharing(reader: reading.Reader) -> int:
        given = reader.start(request)
        reader.finish(given)
        return len(given.shares)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(reading, "THREAD_SECONDS", 0.05)
    with reading.open_reader(folder, READS) as reader:
        assert sharing(reader) == READS  # nothing is known of the disk yet
        sharing(reader)
        seconds = 0.01
        assert sharing(reader) == 1
        assert sharing(reader) == 1 + int(0.01 * 24 / 0.05)
        seconds = 0.1
        sharing(reader)
        assert sharing(reader) == READS
        seconds = 0.0
        sharing(reader)
        assert sharing(reader) == 1


@pytest.mark.usefixtures("soon_slow")
def test_memory_of_a_hanging_read_is_not_reused(
    folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abandoned read returns with other bytes during a later batch."""
    location, real, go_on = folder.locate(8), os.preadv, threading.Event()
    expected = [reading.read(folder.locate(sample)) for sample in range(len(folder))]
    identity, written = location.path.stat().st_ino, threading.Event()

    def late(file: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(file).st_ino == identity and not go_on.is_set():
            go_on.wait()
            buffers[0][:] = b"x" * len(buffers[0])
            written.set()
            return len(buffers[0])
        return real(file, buffers, offset)

    def again(location: Location, _: OSError) -> Bytes:
        return np.frombuffer(location.path.read_bytes(), dtype=np.uint8)

    monkeypatch.setattr(os, "preadv", late)
    monkeypatch.setattr(reading, "_read_again", again)
    with reading.open_reader(folder, READS) as reader:
        first, second = whole(folder, 12)
        replaced = reader.start(first)
        reader.finish(replaced)
        reader.release(replaced)
        later = reader.start(second)
        reader.finish(later)
        go_on.set()
        assert written.wait(120)
        found = [content.tobytes() for content in later.contents]
    assert [row for row, content in enumerate(expected[12:]) if found[row] != content] == []


@both_decoders
def test_the_requesting_thread_builds_no_path(
    decode: Decode, folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a path takes longer than this thread's other work per image."""
    real: Callable[[Paths, int], str] = Paths.__getitem__
    threads: list[threading.Thread] = []

    def note(paths: Paths, row: int) -> str:
        threads.append(threading.current_thread())
        return real(paths, row)

    def join(*_: object) -> Path:
        raise AssertionError("no path object is made of an image that can be read")

    monkeypatch.setattr(Paths, "__getitem__", note)
    monkeypatch.setattr(Index, "locate", join)
    batches = run(decode, folder, whole(folder))
    assert sum(len(batch.labels) for batch in batches) == len(folder) == len(threads)
    assert threading.current_thread() not in threads


def test_a_thread_gets_several_images_at_a_time(
    folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing one on takes ten microseconds."""
    real: Callable[..., object] = ThreadPoolExecutor.submit
    jobs: list[object] = []

    def count(pool: ThreadPoolExecutor, *job: object) -> object:
        jobs.append(job)
        return real(pool, *job)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", count)
    assert len(list(run(torchvision.open_decoder, folder, whole(folder, 24) * 2))) == 2
    assert len(jobs) == 2 * 2, "for either thread one, of 12 images, in each batch"


def test_concurrent_reads_do_not_exceed_the_recipes_limit(
    folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, threads = os.preadv, set()

    def note(file: int, buffers: list[memoryview], offset: int) -> int:
        threads.add(threading.current_thread())
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", note)
    monkeypatch.setattr(reading, "THREAD_SECONDS", 1e-9)  # so that all are brought in
    with reading.open_reader(folder, 3) as reader:
        for given in reading.read_ahead(whole(folder) * 3, reader):
            assert len(given.shares) == 3
            reader.release(given)
    assert len(threads) <= 3


def overwrite(path: Path, content: bytes) -> None:
    """Change a file's bytes and not its time."""
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))


def hang(index: Index, sample: int) -> tuple[Path, bytes]:
    """Replace an image with a pipe without a writer: opening it never returns."""
    path = index.locate(sample).path
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    return path, content


def alive(reader: reading.Reader) -> int:
    return sum(thread.is_alive() for thread in reader._threads)


def let_go(pipe: Path) -> None:
    """Open the other end of a pipe, which unblocks the waiting threads."""
    os.close(os.open(pipe, os.O_RDWR))


@both_decoders
@pytest.mark.parametrize("sample", [0, 8, 23])
def test_bytes_that_are_not_an_image_are_named(decode: Decode, folder: Index, sample: int) -> None:
    path = folder.locate(sample).path
    overwrite(path, bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"{path}: .*cannot decode this image"):
        list(run(decode, folder, whole(folder)))


@both_decoders
def test_a_shrunken_image_is_named(decode: Decode, folder: Index) -> None:
    path = folder.locate(8).path
    smaller = io.BytesIO()
    Image.fromarray(photograph(50, 70)).save(smaller, "JPEG")
    overwrite(path, smaller.getvalue().ljust(path.stat().st_size, b"\0"))
    with pytest.raises(DataError, match=f"{path}: .*(50 x 70.*60 x 80|60, 0..80.*50 x 70)"):
        list(run(decode, folder, whole(folder)))


def test_an_image_in_a_shard_is_named_with_its_offset(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(2000))
    with pytest.raises(
        DataError, match=r"0.tar \(byte 1536\): cannot be read \(its file has 464 of its 999"
    ):
        reading.read(Location(tmp_path / "0.tar", 1536, 999))
    assert reading.read(Location(tmp_path / "0.tar", 1000, 999)) == bytes(999)


def test_an_image_that_cannot_be_cached_is_named_and_nothing_is_left(
    folder: Index, tmp_path: Path
) -> None:
    path = folder.locate(8).path
    overwrite(path, bytes(path.stat().st_size))
    with pytest.raises(DataError, match=f"{path}: Pillow cannot decode"):
        pixel_cache.open_cache(folder, backend=Serial(torch.device("cpu")), threads=2)
    assert list((tmp_path / "cache/largebatch/pixels").iterdir()) == []
