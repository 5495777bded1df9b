"""Draws that ranks, workers and epochs share are found."""

from unittest import mock

import numpy as np
import pytest
import torch
from planted_parts import Augmented, random_data
from torch.utils.data import DataLoader

from largebatch.audit.randomness import Draws, check_augmentation, compare_draws
from largebatch.audit.ranks import Ranks
from largebatch.distributed.serial import Serial

RANKS = Ranks(Serial(torch.device("cpu")))
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
    finding = compare_draws(ranks)
    assert (finding.level, finding.figure) == (level, figure)


def test_one_process_draws_anew() -> None:
    loader = DataLoader(Augmented(random_data(64), lambda: torch.randn(8)), 8)
    (finding,) = check_augmentation(mock.Mock(loader=loader), RANKS)
    assert finding.level == "fine"
    assert "differ" in finding.text
