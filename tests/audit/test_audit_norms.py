"""Running statistics under an audit."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from largebatch.audit.norms import loss_of
from largebatch.audit.ranks import Ranks
from largebatch.audit.replicas import check_modes
from largebatch.distributed.serial import Serial


class TwoHeads(nn.Module):
    """A network whose output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(numbers))
        return logits, -logits


def first_head(logits: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(logits[0], labels)


def test_the_loss_of_a_model_with_several_outputs_is_that_of_its_loss_function() -> None:
    torch.manual_seed(1)
    model, batch = TwoHeads(), (torch.randn(12, 8), torch.randint(0, 4, (12,)))

    def loss_on(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return first_head(model(batch[0]), batch[1]), len(batch[1])

    found = loss_of(model, [batch], loss_on, Ranks(Serial(torch.device("cpu"))))
    exact = first_head(model.eval()(batch[0]), batch[1]).detach()
    assert found == pytest.approx(float(exact), rel=1e-6)


class Functional(nn.Module):
    """A layer that reads its mode."""

    def forward(self, numbers: Tensor) -> Tensor:
        return dropout(numbers, training=self.training)


def test_modes_are_compared_of_layers_that_depend_on_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Functional(), nn.Dropout(0), nn.BatchNorm1d(2))
    ranks = mock.Mock(size=2, gather=lambda own: [own, []])
    (finding,) = check_modes(model, {name for name, _ in model.named_modules()}, ranks)
    assert (finding.check, finding.level, finding.figure) == ("training mode", "fault", 2.0)
    assert check_modes(model, {"0", "2"}, ranks) == []
