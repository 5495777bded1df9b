"""Mixup and CutMix of pairs: images, labels and losses as written by hand, wherever a pair is.

The reference (plain_mixing.py) draws each pair by itself from Philox.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import accelerator
import numpy as np
import pytest
import torch
from decoding import worker
from on_forked_workers import on_forked_workers
from plain_mixing import CUTMIX, MIXUP, PROBABILITY, SWITCH, mixed_by_hand
from scipy import stats
from torch import Tensor

from largebatch.data.mixing import boxes_of, draw_pairs, mix, shares_of
from largebatch.data.order import Stream
from largebatch.data.types import Batch, Request
from largebatch.errors import PlanError, RecipeError
from largebatch.lab.measure.batch import at_constant_rate
from largebatch.lab.studies.study import of_few_updates
from largebatch.optional import require_torchvision
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.choices import OffTarget
from largebatch.recipe.data import Mix
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.training.loop import cross_entropy

DRAWS = 20_000
BOTH = Mix(mixup=MIXUP, cutmix=CUTMIX, probability=PROBABILITY, switch=SWITCH)
SECTION = f"data.mix={BOTH.model_dump_json()}"
SHORT = ("duration={steps: 8}", "schedule.warmup=null", "polish=null", "evaluation={}")
SMALL = (*SHORT, "data.image_size=12", "data.crop_area=[0.3, 1]", "execution.cache=memory")


def random_batch(num: int, *, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(num, 3, 9, 7, dtype=torch.float64, generator=generator).to(dtype)
    return Batch(images, torch.randint(5, (num,), generator=generator))


def mixed(batch: Batch, first: int, *, seed: int = 1) -> Batch:
    """Return a mixed copy of a batch."""
    positions = range(first, first + len(batch.images))
    copied = batch._replace(images=batch.images.clone())
    return mix(copied, draw_pairs(BOTH, positions, seed=seed, classes=5))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_images_and_labels_are_those_written_by_hand(order: torch.memory_format) -> None:
    batch = random_batch(80)
    batch = batch._replace(images=batch.images.contiguous(memory_format=order))
    found = mixed(batch, 10)
    images, labels = mixed_by_hand(*batch, first=10, seed=1)
    torch.testing.assert_close(found.images, images, rtol=0, atol=1e-10)
    assert found.images.is_contiguous(memory_format=order)
    expected = np.zeros((80, 5))
    for row, (share, own, partners) in enumerate(labels):
        expected[row, own] += share
        expected[row, partners] += 1 - share
    np.testing.assert_allclose(found.labels.numpy(), expected, rtol=0, atol=1e-10)
    kinds = {(share == 1, 0 < share < 1) for share, _, _ in labels}
    assert len(kinds) == 2


@pytest.mark.parametrize("off_target", ["all", "others"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_weighted_mean_of_both_labels_losses(
    smoothing: float, off_target: OffTarget
) -> None:
    batch = random_batch(80)
    found = mixed(batch, 10)
    logits = torch.randn(80, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    _, labels = mixed_by_hand(*batch, first=10, seed=1)

    def loss_of(row: int, label: int) -> float:
        values: list[float] = logits[row].tolist()
        total = math.log(sum(map(math.exp, values)))
        others = 5 if off_target == "all" else 4
        mass = [smoothing / others] * 5
        mass[label] = 1 - smoothing + (smoothing / 5 if off_target == "all" else 0)
        return sum(part * (total - value) for part, value in zip(mass, values, strict=True))

    expected = sum(
        share * loss_of(row, own) + (1 - share) * loss_of(row, partners)
        for row, (share, own, partners) in enumerate(labels)
    )
    criterion = cross_entropy(smoothing=smoothing, off_target=off_target)
    assert criterion(logits, found.labels).item() == pytest.approx(expected, rel=1e-10)
    plain = sum(loss_of(row, own) for row, (_, own, _) in enumerate(labels))
    assert criterion(logits, batch.labels).item() == pytest.approx(plain, rel=1e-10)


def test_pixels_of_a_shorter_type_are_rounded_once_and_labels_keep_float32() -> None:
    batch = random_batch(40, dtype=torch.bfloat16)
    found = mixed(batch, 0)
    exact = mixed(batch._replace(images=batch.images.float()), 0)
    assert found.images.dtype == torch.bfloat16
    assert torch.equal(found.images, exact.images.bfloat16())
    assert found.labels.dtype == torch.float32
    assert torch.equal(found.labels, exact.labels)


def _mix_there() -> list[tuple[bool, dict[str, int]]]:
    device = accelerator.simulate()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        batch = random_batch(80, dtype=dtype)
        pairs = draw_pairs(BOTH, range(80), seed=1, classes=5)
        there = Batch(batch.images.to(device), batch.labels.to(device))
        accelerator.COUNTS.clear()
        found = mix(there, pairs)
        counts = accelerator.COUNTS.totals()
        expected = mixed(batch, 0)
        is_equal = torch.equal(found.images.cpu(), expected.images)
        results.append((is_equal and torch.equal(found.labels.cpu(), expected.labels), counts))
    return results


def test_on_a_device_images_have_the_same_bits_and_the_host_does_not_wait() -> None:
    for is_equal, counts in on_forked_workers(_mix_there, workers=1):
        assert is_equal
        assert (counts["transfers"], counts["syncs"], counts["pageable"]) == (1, 0, 0)
        assert counts["launches"] < 30  # of any number of pairs


def two_samples(ours: np.ndarray, theirs: np.ndarray, *, edges: Sequence[float]) -> float:
    """Return the p value of a chi-square test that two samples have one distribution."""
    counts = [np.histogram(values, edges)[0] for values in (ours, theirs)]
    assert all(each.sum() == DRAWS for each in counts)
    filled = np.sum(counts, axis=0) > 0
    return float(stats.chi2_contingency([each[filled] for each in counts]).pvalue)


@pytest.mark.parametrize("concentration", [0.1, 0.8, 2.0])
def test_shares_are_distributed_as_timms(concentration: float) -> None:
    require_torchvision()
    from timm.data.mixup import Mixup

    np.random.seed(5)  # timm's generator
    timms, _ = Mixup(mixup_alpha=concentration, prob=0.7)._params_per_elem(DRAWS)
    section = Mix(mixup=concentration, probability=0.7)
    ours = draw_pairs(section, range(2 * DRAWS), seed=6, classes=10).shares
    # timm's are float32: near 0 and 1, where most of them are if the concentration is small, bins
    # are wider than its rounding. In the last one are the pairs that are not mixed.
    ends = np.array([1e-5, 1e-4, 1e-3, 1e-2])
    edges = [-1, *ends, *np.linspace(0.05, 0.95, 19), *1 - ends[::-1], 2]
    assert two_samples(ours, timms, edges=edges) > 0.01


def test_boxes_and_their_share_are_distributed_as_timms() -> None:
    require_torchvision()
    from timm.data import mixup

    np.random.seed(5)  # timm's generator
    theirs = mixup.Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, switch_prob=0.3)
    drawn, uses_box = theirs._params_per_elem(DRAWS)
    timms = []
    for share in drawn[uses_box]:
        (top, bottom, left, right), after = mixup.cutmix_bbox_and_lam((3, 32, 24), share)
        timms.append((after, top + bottom, left + right))
    section = Mix(mixup=0.2, cutmix=1.0, switch=0.3)
    pairs = draw_pairs(section, range(2 * DRAWS), seed=6, classes=10)
    table = [[flags.sum(), DRAWS - flags.sum()] for flags in (pairs.is_cut, uses_box)]
    assert stats.chi2_contingency(table).pvalue > 0.01
    tops, lefts, bottoms, rights = boxes_of(pairs, height=32, width=24)[pairs.is_cut].T
    ours = shares_of(pairs, height=32, width=24)[pairs.is_cut], tops + bottoms, lefts + rights
    for values, expected in zip(ours, zip(*timms, strict=True), strict=True):
        edges = np.quantile(values, np.linspace(0, 1, 21))
        edges[[0, -1]] = -1, 100
        counts = [np.histogram(each, np.unique(edges))[0] for each in (values, expected)]
        assert stats.chi2_contingency(counts).pvalue > 0.01


def digits(*changes: str) -> Recipe:
    return load_recipe("digits_96", [*SMALL, SECTION, *changes])


@pytest.fixture(scope="module")
def alone() -> tuple[Tensor, Tensor]:
    """Images and labels of five updates of 96 samples, in one device batch each."""
    with closing(worker(digits(), workers=1, rank=0, device_batch=96)) as pipeline:
        batches = list(pipeline.training(range(5), clean=False))
    return torch.cat([it.images for it in batches]), torch.cat([it.labels for it in batches])


@pytest.mark.parametrize(("workers", "device_batch"), [(1, 48), (2, 24), (3, 16), (3, 32)])
def test_a_pair_is_the_same_on_any_number_of_workers_and_in_any_micro_batch(
    workers: int, device_batch: int, alone: tuple[Tensor, Tensor]
) -> None:
    recipe = digits("batch.bn_span=8")
    for rank in range(workers):
        pipeline = worker(recipe, workers=workers, rank=rank, device_batch=device_batch)
        with closing(pipeline), closing(pipeline.training(range(5), clean=False)) as batches:
            for positions, batch in zip(pipeline.positions(range(5)), batches, strict=True):
                rows = slice(positions.start, positions.stop)
                assert torch.equal(batch.images, alone[0][rows])
                assert torch.equal(batch.labels, alone[1][rows])


def test_mixing_is_of_the_images_that_a_recipe_without_it_shows(
    alone: tuple[Tensor, Tensor],
) -> None:
    recipe = digits("data.mix=null")
    with closing(worker(recipe, workers=1, rank=0, device_batch=96)) as pipeline:
        plain = list(pipeline.training(range(3, 5), clean=False))
    batch = Batch(*(torch.cat(parts) for parts in zip(*plain, strict=True)))
    images, labels = mixed_by_hand(*batch, first=3 * 96, seed=recipe.seed)
    torch.testing.assert_close(alone[0][3 * 96 :].double(), images, rtol=0, atol=1e-6)
    for row, (share, own, partners) in zip(alone[1][3 * 96 :], labels, strict=True):
        assert row[own].item() == pytest.approx(share + (1 - share) * (own == partners), abs=1e-6)
        assert row.sum().item() == pytest.approx(1, abs=1e-6)
        assert row[partners] > 0 or share == 1


def test_mixing_ends_with_an_update_and_its_box_follows_the_size() -> None:
    """With a batch schedule and growing images; clean images are never mixed."""
    recipe = digits(
        "data.mix.until={epochs: 0.3}",
        "batch.schedule=[{after: {steps: 2}, global_batch: 192, lr_factor: 1}]",
        "data.resolution=[{until: {steps: 3}, image_size: 8}]",
        "duration={steps: 6}",
        "polish={clean: {steps: 1}}",
    )
    plan = make_plan(recipe)
    # 0.3 epochs of 1,437 images: two updates of 96, and the nearest number of 192, one.
    assert plan.mix_steps == 3
    with closing(worker(recipe, workers=1, rank=0, device_batch=96)) as pipeline:
        batches = list(pipeline.training(range(5), clean=False))
        assert [batch.images.shape[-1] for batch in batches] == [8] * 4 + [12] * 4
        assert [batch.labels.ndim for batch in batches] == [2] * 4 + [1] * 4
        assert not batches[-1].labels.is_floating_point()
        for clean in (
            pipeline.training(range(5, 6), clean=True),
            pipeline.validation(),
            pipeline.statistics(96),
        ):
            with closing(clean):
                assert all(batch.labels.dtype == torch.int64 for batch in clean)
        positions = range(96, 192)
        request: Request = pipeline.training_request(positions, clean=False)
    pairs = request.mix
    assert pairs is not None
    small, large = (boxes_of(pairs, height=side, width=side) for side in (8, 80))
    assert np.abs(10 * small - large)[pairs.is_cut].max() <= 20  # a pixel at each end of a box
    assert np.array_equal(
        pairs.shares, draw_pairs(BOTH, positions, seed=recipe.seed, classes=10).shares
    )


def test_device_batches_are_even_whatever_fits() -> None:
    recipe = digits("batch={global_batch: 180, bn_span: 15}")
    for fits in (1, 7, 31, 59, 90, 180):
        plan = make_plan(recipe, workers=1, fits=fits)
        assert plan.device_batch % 30 == 0
        assert plan.device_batch <= max(fits, 30)
    assert make_plan(recipe, workers=6).device_batch == 30
    # A worker's 15 samples are not pairs, and 12 workers' pairs would have two halves of a span.
    with pytest.raises(PlanError, match=r"data\.mix.*possible workers: 6"):
        make_plan(recipe, workers=12)
    # 4, 12 and more divide the batch, and their device batches would not be even or not whole.
    with pytest.raises(PlanError, match=r"global_batch.*possible: 1, 2, 3, 6$"):
        make_plan(recipe, workers=7)
    asked = recipe.with_execution(device_batch=45)
    with pytest.raises(PlanError, match=r"execution\.device_batch: 45 .*data\.mix.* 30 or 60"):
        make_plan(asked)
    # An evaluation takes any number of images at a time.
    measuring = make_plan(asked.mathematics).measuring(workers=1, device_batch=45)
    assert measuring.device_batch == 45
    plain = digits("batch={global_batch: 180, bn_span: 15}", "data.mix=null")
    assert make_plan(plain, workers=12).device_batch == 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.mix={probability: 0.5}", "data.mix: .*mixup.*cutmix"),
        ("data.mix={mixup: 0, cutmix: null}", "data.mix: .*mixup.*cutmix"),
        ("data.mix={mixup: 0.2, probability: 1.5}", r"data\.mix\.probability"),
        ("data.mix={mixup: 0.2, probability: 0}", r"data\.mix\.probability"),
        ("data.mix={mixup: -1}", r"data\.mix\.mixup"),
        ("data.mix={mixup: 1, cutmix: 1, switch: -0.1}", r"data\.mix\.switch"),
        ("data.mix={cutmix: 1, switch: 0.5}", "data.mix: .*mixup"),
        ("batch={global_batch: 45, bn_span: 15}", r"batch\.global_batch \(45\).* 30 or 60"),
        ("protocol={kind: hardsync, learners: 2}", r"data\.mix .*protocol"),
    ],
)
def test_what_cannot_be_mixed_is_refused_in_one_line(change: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        digits(change)
    assert len(str(caught.value).splitlines()) == 2  # the recipe's name, and the problem


def test_mixing_cannot_outlast_augmented_images() -> None:
    with pytest.raises(RecipeError, match=r"data\.mix\.until \(step 9\) .* 8"):
        make_plan(digits("data.mix.until={steps: 9}"))


def test_measurements_of_another_length_mix_throughout() -> None:
    recipe = digits(
        "data.mix.until={steps: 5}", "data.resolution=[{until: {steps: 3}, image_size: 8}]"
    )
    assert make_plan(recipe).mix_steps == 5
    for short in (of_few_updates(recipe), at_constant_rate(recipe, updates=4)):
        plan = make_plan(short)
        assert plan.mix_steps == plan.train_steps
        assert not plan.sizes


def test_positions_that_divide_a_pair_are_refused() -> None:
    for positions in (range(1, 5), range(3)):
        with pytest.raises(ValueError, match="whole pairs"):
            draw_pairs(BOTH, positions, seed=0, classes=5)


def test_purposes_have_the_numbers_that_the_reference_draws_from() -> None:
    assert (Stream.MIX, Stream.MIX_BOX) == (11, 12)
    pipeline = worker(digits(), workers=1, rank=0, device_batch=96)
    other_seed = replace(pipeline, seed=pipeline.seed + 1)
    first, second = (
        it.training_request(range(96), clean=False).mix for it in (pipeline, other_seed)
    )
    assert first is not None
    assert second is not None
    assert not np.array_equal(first.shares, second.shares)
    pipeline.close()
