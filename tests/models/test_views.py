"""Evaluation on several views of each image, beside airbench's formula written by hand."""

from pathlib import Path

import pytest
import torch
from short_runs import STATISTICS, a_recipe
from torch import Tensor, nn
from torch.nn import functional as F

from largebatch import run
from largebatch.distributed.serial import Serial
from largebatch.errors import LargebatchError
from largebatch.models.wrappers import MeanOfViews
from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.options import Options
from largebatch.training.evaluation import Metrics, evaluate

SIDE = 9


def network() -> nn.Module:
    """A network whose logits differ between all views."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 7), nn.Tanh())


def by_hand(model: nn.Module, images: Tensor, *, views: int) -> Tensor:
    """Sum the weighted logits of each view, cut from images padded row by row and column by column.

    >>> by_hand(nn.Flatten(), torch.zeros(1, 1, 2, 2), views=6).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    """
    rows = torch.cat([images[:, :, 1:2], images, images[:, :, -2:-1]], dim=2)
    larger = torch.cat([rows[..., 1:2], rows, rows[..., -2:-1]], dim=3)
    height, width = images.shape[2:]
    weights = {0: 0.25, 1: 0.5, 2: 0.25} if views == 6 else {1: 1.0}
    total = torch.zeros(())
    for start, weight in weights.items():
        view = larger[:, :, start : start + height, start : start + width]
        total = total + weight * (model(view) + model(view.flip(3))) / 2
    return total


@pytest.mark.parametrize("views", [2, 6])
def test_evaluate_measures_the_mean_of_the_views(views: int) -> None:
    model, images, labels = network(), torch.randn(40, 3, SIDE, SIDE), torch.arange(40) % 7
    batches = list(zip(images.split(16), labels.split(16), strict=True))
    found = evaluate(MeanOfViews(model, views=views), batches, Serial(torch.device("cpu")))
    with torch.no_grad():
        logits = by_hand(model, images, views=views)
    assert found.top1 == logits.argmax(1).eq(labels).double().mean().item()
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item())


def test_a_recipe_and_a_checkpoint_are_evaluated_on_their_views(tmp_path: Path) -> None:
    recipe = a_recipe(STATISTICS, changes=("evaluation.views=2",))
    summary = run(recipe, out=tmp_path / "run")

    def measured(*overrides: str) -> Metrics:
        options = Options(out=tmp_path / "run", overrides=overrides)
        return evaluate_checkpoint(tmp_path / "run", options).metrics

    assert measured().loss == pytest.approx(summary.stages[-1].loss)
    assert measured("evaluation.views=6").loss != summary.stages[-1].loss
    with pytest.raises(LargebatchError, match="execution and evaluation"):
        measured("seed=2")
