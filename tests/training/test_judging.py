"""Who judges a stage: pictures held out, counted here with plain PyTorch; a tie undoes it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.training.stages import end_stage

LABELS = torch.arange(10) % 5


def scores(right: int) -> Tensor:
    """Return logits of ten pictures, of which so many get the highest score for their label."""
    found = torch.nn.functional.one_hot(LABELS, 5).float()
    found[right:] = found[right:].roll(1, dims=1)
    return found


class Told:
    """A session before its second stage, of a model that returns what it is shown."""

    def __init__(self, *, before: int, after: Tensor) -> None:
        self.events: list[dict[str, Any]] = []
        self.undone = 0
        batches = [(after[:7], LABELS[:7]), (after[7:], LABELS[7:])]
        first = {"name": "train", "held_out": before / 10, "kept": True, "seconds": 0.0}
        numbers = {"top1": 0.5, "top5": 1.0, "loss": 1.0}
        self.session: Any = SimpleNamespace(
            judged=True,
            model=nn.Identity(),
            backend=Serial(torch.device("cpu")),
            pipeline=SimpleNamespace(
                held_out_samples=range(10),
                held_out=lambda: iter(batches),
                validation=lambda: iter(batches),
            ),
            plan=SimpleNamespace(val_samples=10, epoch=float),
            last_kept={**first, **numbers},
            stages=[{**first, **numbers}],
            before={"model": {}},
            step=7,
            seconds=1.0,
            emit=self.events.append,
            go_back=self.go_back,
            save=lambda: None,
        )

    def go_back(self) -> None:
        self.undone += 1


@pytest.mark.parametrize(
    ("before", "after", "kept"), [(6, 7, True), (6, 6, False), (6, 5, False), (0, 0, False)]
)
def test_a_stage_is_kept_where_more_of_the_pictures_are_right_and_a_tie_is_not_more(
    before: int, after: int, kept: bool
) -> None:
    told = Told(before=before, after=scores(after))
    end_stage(told.session, "affine", num_steps=3)
    stage = told.session.stages[-1]
    assert (stage["held_out"], stage["kept"]) == (after / 10, kept)
    assert told.undone == (not kept)
    assert told.session.before == {}
    decision = told.events[-1]
    assert (decision["before"], decision["after"]) == (before / 10, after / 10)


def test_a_model_whose_loss_is_no_number_is_not_kept_though_it_meets_labels_by_chance() -> None:
    broken = scores(10)
    broken[-1] = math.nan
    told = Told(before=1, after=broken)
    end_stage(told.session, "clean", num_steps=3)
    stage = told.session.stages[-1]
    assert stage["held_out"] > 0.1
    assert not stage["kept"]
    assert told.undone == 1


def test_a_stage_that_failed_is_undone_however_well_it_did_and_says_why() -> None:
    told = Told(before=3, after=scores(9))
    end_stage(told.session, "clean", num_steps=2, note="it overflowed", failed=True)
    stage = told.session.stages[-1]
    assert (stage["held_out"], stage["kept"], stage["note"]) == (0.9, False, "it overflowed")
    assert told.undone == 1
    assert told.events[0] == {
        "event": "note",
        "stage": "clean",
        "step": 7,
        "text": "it overflowed",
    }
