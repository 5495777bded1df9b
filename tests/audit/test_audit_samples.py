"""Numbers of a loader's samples, what is said of samplers on all ranks, and shared draws."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from on_forked_workers import on_forked_workers
from planted_parts import Augmented, random_data
from programs import output_of
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from largebatch.audit import samples as audit_samples
from largebatch.audit.randomness import Draws, check_augmentation, compare_draws
from largebatch.audit.ranks import Ranks
from largebatch.audit.samples import NoNumbersError, check_samples, epochs_of, torch_loader
from largebatch.audit.subject import Subject
from largebatch.distributed.connection import connect
from largebatch.distributed.serial import Serial
from largebatch.rules import Finding

CPU = torch.device("cpu")


def subject_of(loader: object, **words: object) -> Subject:
    usual = {"loader": loader, "set_epoch": None, "steps": 3}
    subject: Subject = mock.Mock(**usual | words)
    return subject


def serially(loader: object) -> Sequence[Finding]:
    return check_samples(subject_of(loader), Ranks(Serial(CPU)))


def named(findings: Sequence[Finding], check: str) -> Finding:
    (finding,) = (it for it in findings if it.check == check)
    return finding


@pytest.mark.parametrize(
    ("number", "level"),
    [pytest.param(801, "fine", id="one of 801"), pytest.param(15, "note", id="7 of 15")],
)
def test_a_dropped_rest_is_a_note_if_it_is_a_large_part(number: int, level: str) -> None:
    found = serially(DataLoader(random_data(number), 8, shuffle=True, drop_last=True))
    assert named(found, "samples").level == level


def test_drawing_with_replacement_is_no_fault() -> None:
    sampler = WeightedRandomSampler([1.0] * 64, 64)
    finding = named(serially(DataLoader(random_data(64), 8, sampler=sampler)), "samples")
    assert finding.level == "note"
    assert finding.text.endswith("as WeightedRandomSampler draws them")


@pytest.mark.parametrize(
    ("words", "may_set", "level"),
    [
        pytest.param({}, True, "unknown", id="the script may set it"),
        pytest.param({}, False, "fault", id="nothing sets it"),
        pytest.param({"set_epoch": lambda _: None}, True, "fault", id="no effect"),
    ],
)
def test_one_order_is_a_fault_only_if_nothing_sets_the_epoch(
    words: dict[str, object], may_set: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_samples, "may_set_epoch", lambda: may_set)
    data = random_data(20)
    sampler: DistributedSampler[object] = DistributedSampler(data, num_replicas=1, rank=0)
    subject = subject_of(DataLoader(data, 8, sampler=sampler), **words)
    finding = named(check_samples(subject, Ranks(Serial(CPU))), "epoch order")
    assert finding.level == level
    assert "set_epoch" in finding.remedy


def test_samples_that_a_subset_repeats_are_expected_as_often() -> None:
    repeating = Subset(random_data(20), [*range(20), 0, 0, 1])
    finding = named(serially(DataLoader(repeating, 23, shuffle=True)), "samples")
    assert (finding.level, finding.text[:10]) == ("fine", "23 samples")


def on_two(case: str) -> list[Finding]:
    """Check a loader on two ranks."""
    backend = connect("torch")
    data = random_data(63)
    sampler: DistributedSampler[object] = DistributedSampler(data)
    set_epoch = sampler.set_epoch
    loader = DataLoader(data, 8, sampler=sampler)
    if case == "one rank fails" and backend.rank == 1:
        loader = DataLoader(data, 8, sampler=Failing())
        set_epoch = None  # type: ignore[assignment]  # this sampler has none
    try:
        return check_samples(subject_of(loader, set_epoch=set_epoch), Ranks(backend))
    finally:
        backend.close()


class Failing:
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no index")


def test_padding_to_equal_shares_is_fine() -> None:
    found = on_forked_workers(on_two, "padded", workers=2)
    assert [it.level for it in found] == ["fine", "fine"]
    assert named(found, "samples").text.endswith("1 read again")


def test_an_error_on_one_rank_ends_the_check_on_all() -> None:
    with pytest.raises(RuntimeError, match="worker 1.*no index"):
        on_forked_workers(on_two, "one rank fails", workers=2)


def test_reading_samples_with_equal_generators_leaves_the_generators_as_they_were() -> None:
    before = torch.get_rng_state()
    assert len(audit_samples._fingerprints([torch.zeros(2), torch.ones(2)])) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_a_script_may_set_the_epoch_if_it_or_a_module_of_it_names_it(tmp_path: Path) -> None:
    call = "from largebatch.audit.samples import may_set_epoch\nprint(may_set_epoch())\n"
    programs = {
        "engine.py": "def train(loader, epoch): loader.sampler.set_epoch(epoch)\n",
        "with_engine.py": f"from engine import train\n{call}",
        "without.py": f"def offset_epoch(): return 1\n{call}import with_engine\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert output_of(sys.executable, str(tmp_path / "without.py")).split() == ["False", "True"]


def loader_of(number: int, **words: object) -> DataLoader[object]:
    return DataLoader(TensorDataset(torch.arange(number)), **words)  # type: ignore[arg-type]


def test_the_epoch_is_set_and_the_loader_restored() -> None:
    loader = loader_of(10, batch_size=4)
    sampler: DistributedSampler[object] = DistributedSampler(loader.dataset, 2, 0)
    loader = loader_of(10, batch_size=4, sampler=sampler)
    before = dict(vars(loader))
    first, second = epochs_of(loader, 2, sampler.set_epoch)
    assert vars(loader) == before
    sampler.set_epoch(1)
    assert list(sampler) == second.samples.tolist() != first.samples.tolist()


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        pytest.param([1, 2], "DataLoader", id="list"),
        pytest.param(DataLoader(Stream()), "Stream", id="iterable"),
        pytest.param(loader_of(4, sampler=Endless()), "9 of 4", id="endless"),
    ],
)
def test_a_loader_without_numbers_says_why(loader: object, message: str) -> None:
    with pytest.raises(NoNumbersError, match=message):
        epochs_of(loader, 1)


@pytest.mark.long
def test_accelerates_loader_sets_its_own_epochs() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = loader_of(12, batch_size=4, shuffle=True)
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    first, second = epochs_of(prepared, 2)
    assert sorted(first.samples) == sorted(second.samples) == list(range(12))
    assert not np.array_equal(first.samples, second.samples)
    assert torch_loader(prepared) is prepared.base_dataloader


NEW = np.arange(64).reshape(2, 1, 32)
"""Draws of one worker in two epochs, all different."""


@pytest.mark.parametrize(
    ("ranks", "level", "figure"),
    [
        pytest.param([NEW, NEW + 100], "fine", None, id="all different"),
        pytest.param([NEW, NEW, NEW + 100], "note", 2.0, id="two ranks alike"),
        pytest.param([NEW % 32, NEW + 100], "fault", 32.0, id="second epoch like the first"),
        pytest.param([NEW.reshape(2, 2, 16) % 16 + [[[0]], [[50]]]], "note", 2.0, id="workers"),
    ],
)
def test_shared_draws_are_named(ranks: list[Draws], level: str, figure: float | None) -> None:
    (finding,) = compare_draws(ranks)
    assert (finding.level, finding.figure) == (level, figure)


def test_one_process_draws_anew() -> None:
    loader = DataLoader(Augmented(random_data(64), lambda: torch.randn(8)), 8)
    (finding,) = check_augmentation(mock.Mock(loader=loader), Ranks(Serial(CPU)))
    assert finding.level == "fine"
    assert "differ" in finding.text
