"""Layers whose mode is compared between workers."""

from unittest import mock

from torch import nn

from largebatch.audit.replicas import check_modes


def test_modes_are_compared_of_layers_that_depend_on_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Dropout(0), nn.BatchNorm1d(2))
    ranks = mock.Mock(size=2, gather=lambda own: [own, []])
    (finding,) = check_modes(model, {name for name, _ in model.named_modules()}, ranks)
    assert (finding.check, finding.level, finding.figure) == ("training mode", "fault", 2.0)
    assert check_modes(model, {"0", "2"}, ranks) == []
