"""The requests of one worker of up to 16,384 do not grow with the number of workers.

Each request of a worker to the store, and each note that it reads, is multiplied by the number of
workers, for all of them do the same at the same time.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from one_of_many import CountingStore, Counts, Waits, one_of_many
from short_runs import DIGITS

from largebatch import load_recipe, run
from largebatch.distributed.flight_recorder import HangWatch
from largebatch.distributed.torch_distributed import require_one_type
from largebatch.errors import MismatchError

BATCH = 16_384
"""Also the largest number of workers."""

RECIPE = load_recipe(
    DIGITS,
    [
        "model={name: cifar_resnet9, arguments: {width: 2}}",
        f"batch={{global_batch: {BATCH}, bn_span: 2}}",
        (
            "data={source: synthetic, classes: 10, image_size: 8, eval_resize: null, flip: false, "
            f"crop_area: [0.35, 1.0], train_samples: {2 * BATCH}, val_samples: {BATCH}}}"
        ),
        *("duration={steps: 2}", "schedule.warmup=null", "evaluation={every_epochs: 0.5}"),
        f"polish={{statistics: {{samples: {2 * BATCH}}}}}",
        "execution={compare_every: 1}",
    ],
)
"""Two updates, two evaluations on the way, statistics, and weights that are compared."""


class Asked(NamedTuple):
    """Requests of a worker in a whole run."""

    requests: int
    groups: int
    collectives: Counter[str]
    received: int
    files: list[str]


@pytest.fixture(scope="module", autouse=True)
def without_requests_by_time() -> Iterator[None]:
    """The watch for hangs asks the store every few seconds, in a run of any number of workers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HangWatch, "_follow", lambda _: None)
        yield


def asked(counts: Counts) -> Asked:
    return Asked(
        counts.store.requests,
        counts.groups,
        Counter(counts.collectives),
        counts.received,
        sorted(
            re.sub("[0-9a-f]{32}", "HEX", Path(file).name)  # of a file until it is whole
            for file in counts.files
            if not file.startswith("/proc/")
        ),
    )


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Asked]:
    """A worker in the middle of each number of workers, from joining the others to leaving them."""
    found = {}
    # The first run opens what Python loads late.
    for workers in (512, 64, 2048, BATCH):
        with one_of_many(workers // 2 + 1, workers) as counts:
            run(RECIPE, out=tmp_path_factory.mktemp("runs") / "run")
        found[workers] = asked(counts)
    return found


def test_the_work_per_worker_is_the_same_for_64_and_8192_workers(
    whole_runs: dict[int, Asked],
) -> None:
    """All of it: from the first request to the store to the evaluation at the end."""
    few, many = whole_runs[64], whole_runs[2048]
    assert many == few
    assert few.requests <= 8
    assert not few.files
    assert "all_gather" not in few.collectives  # whose result grows with the workers


def test_workers_that_share_spans_add_one_group_and_what_its_members_exchange(
    whole_runs: dict[int, Asked],
) -> None:
    few, shared = whole_runs[64], whole_runs[BATCH]
    assert (few.groups, shared.groups) == (0, 1)
    more = shared.collectives - few.collectives
    assert more.keys() <= {"all_gather", "all_reduce"}
    assert (shared.requests, shared.files) == (few.requests, few.files)
    assert shared.received < 1.1 * few.received


@pytest.fixture(scope="module")
def of_first(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Asked, Asked]]:
    """The first worker, which writes: its run until it is stopped, and the rest, resumed."""
    found = {}
    for workers in (64, 2048):
        folder = tmp_path_factory.mktemp("runs") / "run"
        with one_of_many(0, workers) as begun:
            run(RECIPE, out=folder, max_steps=1)
        with one_of_many(0, workers) as resumed:
            run(RECIPE, out=folder, resume=True)
        found[workers] = asked(begun), asked(resumed)
    return found


def test_the_first_worker_saves_and_resumes_alike_for_any_number(
    of_first: dict[int, tuple[Asked, Asked]],
) -> None:
    for few, many in zip(of_first[64], of_first[2048], strict=True):
        assert (many.requests, many.groups, many.collectives) == (
            few.requests,
            few.groups,
            few.collectives,
        )
        assert many.files == few.files
        assert many.received < 1.01 * few.received  # a plan has longer numbers


@pytest.mark.parametrize("workers", [8, BATCH])
def test_comparing_device_types_takes_a_few_requests_per_worker(workers: int) -> None:
    store, most = CountingStore(), 0
    for rank in range(workers):
        before = store.keys
        with suppress(Waits):
            require_one_type(store, "cpu", rank=rank, world_size=workers)
        most = max(most, store.keys - before)
    assert most <= 6
    assert store.content["difference"] == b""


@pytest.mark.parametrize("workers", [8, 2048])
def test_one_worker_compares_device_types_and_all_raise_the_same_error(workers: int) -> None:
    store, messages = CountingStore(), []
    types = ["cuda"] * workers
    types[5] = "cpu"
    for rank in range(workers):
        with suppress(Waits):
            require_one_type(store, types[rank], rank=rank, world_size=workers)
            pytest.fail("others have not come")
        if rank == workers - 2:
            break
    store.set("informed", "0")
    last = workers - 1
    with pytest.raises(MismatchError, match='device: "cuda".*"cpu".* 5;') as error:
        require_one_type(store, types[last], rank=last, world_size=workers)
    messages.append(str(error.value))
    before = store.keys
    store.content["arrived"] = b"0"  # as it was when another one came
    with pytest.raises(MismatchError) as error:
        require_one_type(store, "cuda", rank=3, world_size=workers)
    assert str(error.value) == messages[0]
    assert store.keys - before <= 6
