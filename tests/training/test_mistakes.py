"""What a run got wrong, image by image: checked with timm's model on images read by Pillow."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_forked_workers import on_forked_workers
from plain_images import GREY, load
from short_runs import LEARNED, a_recipe, log, timms, weights
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch import run
from largebatch.data.datasets import digits
from largebatch.distributed.serial import Serial
from largebatch.recipe.recipe import Recipe
from largebatch.training.evaluation import Answer, Answers
from largebatch.training.judging import find_mistakes

CPU = Serial(torch.device("cpu"))


def be_worker(recipe: Recipe, folder: Path) -> None:
    run(recipe, out=folder)


class Finished(NamedTuple):
    """A run on several workers, and the predictions of its model for images read by Pillow."""

    folder: Path
    labels: Tensor
    logits: Tensor
    model: nn.Module


def looked_at(model: nn.Module, split: str) -> tuple[Tensor, Tensor]:
    """Return the labels of a split, and what the model makes of its images."""
    root = digits.write_digits()
    files = sorted(root.glob(f"{split}/*/*"), key=lambda file: file.parts[-2:])
    images, labels = load(files, colours=GREY, size=16)
    with torch.no_grad():
        return labels, model.eval()(images)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    changes = (*LEARNED, "monitor=generalization_gap")
    recipe = a_recipe("clean: {steps: 2}", changes=changes)
    folder = tmp_path_factory.mktemp("mistakes") / "run"
    on_forked_workers(be_worker, recipe, folder, workers=request.param)
    model = timms(recipe)
    model.load_state_dict(weights(folder))
    return Finished(folder, *looked_at(model, "val"), model)


def test_the_mistakes_of_a_run_are_those_of_its_model(finished: Finished) -> None:
    folder, labels, logits, _ = finished
    predicted = logits.argmax(1)
    wrong = (predicted != labels).nonzero().flatten()
    first, last = log(folder, "mistakes")
    assert (first["stage"], last["stage"], last["step"]) == ("train", "clean", 40)
    assert last["classes"] == [str(digit) for digit in range(10)]
    assert last["sizes"] == labels.bincount().tolist()
    assert last["samples"] == wrong.tolist()
    assert last["labels"] == labels[wrong].tolist()
    assert last["predicted"] == predicted[wrong].tolist()
    assert len(wrong) == round((1 - log(folder, "evaluation")[-1]["top1"]) * 360)


def test_the_gap_of_a_run_is_that_of_all_images_it_was_trained_on(finished: Finished) -> None:
    """Without augmentation and dropout."""
    first, last = log(finished.folder, "generalization_gap")
    assert (first["stage"], last["stage"], last["step"]) == ("train", "clean", 40)
    labels, logits = looked_at(finished.model, "train")
    loss = F.cross_entropy(logits.double(), labels)
    on_validation = F.cross_entropy(finished.logits.double(), finished.labels)
    assert last["samples"] == len(labels) == 1437
    assert last["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert last["top1"] == (logits.argmax(1) == labels).double().mean().item()
    assert last["seconds"] > 0
    assert last["gap"] == pytest.approx((on_validation - loss).item(), abs=1e-4)


def test_shares_of_any_length_are_gathered_in_the_order_of_the_index() -> None:
    generator = torch.Generator().manual_seed(4)
    logits, labels = torch.randn(11, 5, generator=generator), torch.arange(11) % 5
    shares = [[9, 0, 4, 10, 1, 2], [], [3, 8, 5, 7, 6]]

    def gather(worker: Thread) -> Answer:
        answers, backend = Answers(), worker
        own = shares[worker.rank]
        for part in (own[:4], own[4:]):
            if part:
                answers.add(logits[part], labels[part])
        anything: Any = backend
        return answers.gather(np.array(own, dtype=np.int64), np.arange(11), anything)

    for found in on_threads(gather, workers=3):
        assert found.sample.tolist() == list(range(11))
        assert found.label.tolist() == labels.tolist()
        assert found.predicted.tolist() == logits.argmax(1).tolist()
        expected = F.cross_entropy(logits, labels, reduction="none")
        np.testing.assert_allclose(found.loss, expected, rtol=1e-6)


def test_a_class_without_images_has_the_size_0() -> None:
    found = Answer(
        sample=np.arange(4),
        label=np.array([0, 1, 1, 0]),
        predicted=np.array([1, 0, 1, 1]),
        loss=np.zeros(4),
    )
    mistakes = find_mistakes(found, stage="train", step=3, classes=("a", "b", "c"))
    assert mistakes.sizes == (2, 2, 0)
    assert mistakes.samples == (0, 1, 3)
