"""One order of samples and one box for each position, however a run is divided or interrupted.

The reference is written out here: epochs of argsorted random words one after the other, and a box
asked for alone. Samples are followed through real decoders by their colour.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding import has_dali, noting, section, view, worker
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from largebatch.data.augment import train_request
from largebatch.data.decoders import dali, prefetch
from largebatch.data.pipeline import open_images
from largebatch.data.types import Request
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
CPU = Serial(torch.device("cpu"))

Seen = list[tuple[int, tuple[int, ...], bool]]
"""Sample, box and flip, position after position."""


def a_recipe(**changes: object) -> Recipe:
    settings = {"source": "synthetic", **changes}
    batch = settings.pop("global_batch", 96)
    machine = {"decoder", "cache"} & settings.keys()
    words = [f"execution.{key}={settings.pop(key)}" for key in machine]
    words += [f"data.{key}={value}" for key, value in settings.items()]
    others = ["batch.bn_span=null", "polish=null", f"batch.global_batch={batch}"]
    others += ["schedule.warmup=null"]  # which must be shorter than a run may be here
    return load_recipe(DIGITS, [*words, *others, "data.crop_area=[0.2, 1]", "data.flip=true"])


def seen(
    recipe: Recipe, steps: range, *, workers: int = 1, device_batch: int | None = None
) -> Seen:
    """Collect the requests of all workers in these steps, micro-batch by micro-batch."""
    by_worker: list[list[Request]] = [[] for _ in range(workers)]
    for rank, asked in enumerate(by_worker):
        pipeline = worker(recipe, workers=workers, rank=rank, device_batch=device_batch)
        list(noting(pipeline, asked).training(steps, clean=False))
    return [
        (sample, tuple(box), flip)
        for together in zip(*by_worker, strict=True)
        for one in together
        for sample, box, flip in zip(
            one.samples.tolist(), one.boxes.tolist(), one.flips.tolist(), strict=True
        )
    ]


def order_by_hand(seed: int, num_samples: int, length: int) -> list[int]:
    """Sort the numbers of the samples by random words, afresh for every epoch."""
    order: list[int] = []
    for epoch in range(-(-length // num_samples)):
        generator = np.random.Philox(key=[seed, 0], counter=[0, epoch, 0, 0])
        words = [int(generator.random_raw()) for _ in range(num_samples)]
        order += sorted(range(num_samples), key=words.__getitem__)
    return order[:length]


divisions = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
"""Workers, micro-batches and device batch."""


@given(
    division=divisions,
    num_samples=st.integers(2, 90),
    begin=st.integers(0, 12),
    length=st.integers(1, 8),
)
def test_every_division_and_every_resume_see_the_reference_order(
    division: tuple[int, int, int], num_samples: int, begin: int, length: int
) -> None:
    workers, accumulation, device_batch = division
    batch = workers * accumulation * device_batch
    recipe = a_recipe(train_samples=num_samples, classes=2, global_batch=batch)
    found = seen(recipe, range(begin, begin + length), workers=workers, device_batch=device_batch)
    order = order_by_hand(recipe.seed, num_samples, (begin + length) * batch)
    assert [sample for sample, _, _ in found] == order[begin * batch :]
    assert found == seen(recipe, range(begin + length))[begin * batch :]


@given(positions=st.lists(st.integers(0, 10**9), min_size=1, max_size=5))
def test_a_box_depends_only_on_its_position(positions: list[int]) -> None:
    recipe = a_recipe(train_samples=1437)
    index = worker(recipe, workers=1, rank=0, device_batch=None).train_index
    data = section(crop_area=(0.2, 1.0), crop_aspect=(0.5, 2.0))

    def request(positions: range) -> Request:
        return train_request(index, positions, data, view(), seed=recipe.seed)

    for position in positions:
        alone = request(range(position, position + 1))
        among = request(range(max(0, position - 3), position + 4))
        place = min(3, position)
        for field in ("samples", "boxes", "flips"):
            assert (getattr(alone, field)[0] == getattr(among, field)[place]).all()


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one colour each, which encodes their number."""
    root = tmp_path_factory.mktemp("colours")
    for split, number in (("train", 30), ("val", 2)):
        for sample in range(number):
            place = root / split / str(sample % 2)
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20 + sample, 31), (sample, 2 * sample, 0)).save(
                place / f"{sample:02d}.png"
            )
    return root


WAYS = [
    "decoder=torchvision",
    pytest.param("decoder=dali", marks=pytest.mark.skipif(not has_dali, reason="no DALI")),
    "cache=memory",
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("ahead", "workers"), [(1, 1), (1, 2), (4, 2)])
def test_decoders_keep_that_order_at_any_prefetch_depth(
    way: str,
    ahead: int,
    workers: int,
    colours: Path,
    own_cache: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch, "AHEAD", ahead)
    monkeypatch.setattr(dali, "AHEAD", ahead)
    key, value = way.split("=")
    size = {"train_samples": 30, "val_samples": 2, "classes": 2, "global_batch": 12}
    changes = {"source": "folder", "mean": "[0, 0, 0]", "std": "[1, 1, 1]", **size, key: value}
    recipe = a_recipe(**changes)
    plan = make_plan(recipe.with_execution(device_batch=3), workers=workers)
    opened = open_images(recipe, plan, CPU, folder=colours)

    def numbers(rank: int) -> Iterator[list[int]]:
        for images, labels in replace(opened, rank=rank).training(range(4, 9), clean=False):
            red = (images[:, 0].mean(dim=(1, 2)) * 255).round().int().tolist()
            assert [number % 2 for number in red] == labels.tolist()
            yield red

    by_rank = zip(*(numbers(rank) for rank in range(workers)), strict=True)
    found = [number for together in by_rank for part in together for number in part]
    place = {int(Path(path).stem): row for row, path in enumerate(opened.train_index.paths)}
    order = order_by_hand(recipe.seed, 30, 9 * 12)[4 * 12 :]
    assert [place[number] for number in found] == order
