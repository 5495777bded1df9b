"""`largebatch polish` on a file of weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import digits
from largebatch.models import zoo

SMALL = ["--set", "data.image_size=16", "--set", "data.eval_resize=null", "--samples", "320"]


def polish_file(model: nn.Sequential, folder: Path) -> int:
    """Write the model's weights and polish them; return the exit status."""
    torch.save(model.state_dict(), folder / "theirs.pth")
    words = ["--model", "resnet10t", "--weights", str(folder / "theirs.pth"), *SMALL]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zoo, "build", lambda *_, **__: model)
        data = ["--data", str(digits.write_digits())]
        return main(["polish", *words, *data, "--out", str(folder / "ours.pth")])


def network(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(*norms, nn.Conv2d(3, 10, 16), nn.Flatten())


def test_the_file_has_the_statistics_of_every_layer_that_was_measured(tmp_path: Path) -> None:
    assert polish_file(network(nn.BatchNorm2d(3), nn.BatchNorm2d(3)), tmp_path) == DONE
    after = torch.load(tmp_path / "ours.pth")
    for layer in "01":
        assert after[f"{layer}.running_mean"].all()
        assert after[f"{layer}.running_var"].ne(1).all()


def test_a_model_without_batchnorm_is_refused(tmp_path: Path) -> None:
    model = network(nn.InstanceNorm2d(3, track_running_stats=True))
    assert polish_file(model, tmp_path) == USER
