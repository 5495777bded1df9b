"""Figures of a script's evaluation are named by the way in which they were averaged."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from largebatch.audit.evaluation import check_evaluation
from largebatch.audit.ranks import Ranks
from largebatch.distributed.serial import Serial
from largebatch.rules import Finding

RANKS = Ranks(Serial(torch.device("cpu")))


class First(nn.Module):
    """Classifier whose scores are its inputs."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images


def loader(number: int = 10) -> DataLoader[Any]:
    """Return batches of 4, 4 and 2 samples of two classes; the first 5 are classified rightly."""
    scores = torch.tensor([[2.0, 0.0]] * 12)
    return DataLoader(
        Subset(TensorDataset(scores, (torch.arange(12) > 4).long()), range(number)), 4
    )


def checked(evaluate: Callable[[], float], **words: object) -> dict[str, Finding]:
    words = {"inner": First(), "averaged": None, "val_loader": loader(), "forward": None, **words}
    return {it.check: it for it in check_evaluation(mock.Mock(evaluate=evaluate, **words), RANKS)}


@pytest.mark.parametrize(
    ("value", "level", "text"),
    [
        pytest.param(0.5, "fine", "0.5, the figure of each sample once", id="exact"),
        pytest.param(50.0, "fine", "0.5, the figure of each sample once", id="percent"),
        pytest.param(1.25 / 3, "fault", "the mean of the batch means", id="batch means"),
        pytest.param(41.67, "fault", "the mean of the batch means", id="rounded per cent"),
        pytest.param(5 / 3, "fault", "over the number of batches", id="number of batches"),
        pytest.param(0.42, "note", "top-1 over each sample once is 0.5", id="near a mistake"),
        pytest.param(0.9, "note", "top-1 over each sample once is 0.5", id="something else"),
    ],
)
def test_a_figure_is_named(value: float, level: str, text: str) -> None:
    finding = checked(lambda: value)["evaluation mean"]
    assert finding.level == level
    assert text in finding.text


def test_the_average_of_the_weights_may_be_what_is_evaluated() -> None:
    class Other(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flip(1)

    labels = torch.tensor([1, 1, 1, 0])
    data = DataLoader(TensorDataset(torch.tensor([[2.0, 0.0]] * 4), labels), 4)
    finding = checked(lambda: 0.75, val_loader=data, averaged=Other())["evaluation mean"]
    assert finding.level == "fine"


def test_a_wrapper_that_computes_on_batches_is_within_the_exact_evaluation() -> None:
    class Flipped:
        def __init__(self, loader: DataLoader[Any]) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            for images, labels in self.loader:
                yield [images.flip(1), labels]

    wrapper = Flipped(loader(8))  # 5 of 8 without the wrapper
    finding = checked(lambda: 0.375, val_loader=wrapper)["evaluation mean"]
    assert (finding.level, finding.text[:23]) == ("fine", "evaluate() gives 0.375,")


def test_padding_is_seen_though_one_sample_of_many_moves_the_figure_little() -> None:
    data = TensorDataset(torch.tensor([[2.0, 0.0]] * 101), (torch.arange(101) > 40).long())
    padded = DataLoader(data, 6, sampler=[*range(101), 0])
    findings = checked(lambda: 42 / 102, val_loader=padded)
    assert findings["evaluation mean"].level == findings["evaluation samples"].level == "note"
    assert checked(lambda: 41 / 101, val_loader=padded)["evaluation samples"].level == "fine"


def test_hooks_are_removed_and_an_error_is_raised_for_all() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))

    def fail() -> float:
        raise RuntimeError("no data")

    with pytest.raises(Exception, match="worker 0.*no data"):
        checked(fail, inner=model)
    assert not model[0]._forward_pre_hooks
