"""What decides on a stage: images held out, counted here with plain PyTorch; a tie undoes it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD

from largebatch.distributed.serial import Serial
from largebatch.tracking.events import Decision, Event, Note, StageName, StageResult
from largebatch.training.judging import Evaluator, Judge
from largebatch.training.state import Progress, TrainState, Updater
from largebatch.training.step_log import RunLog

LABELS = torch.arange(10) % 5


def scores(right: int) -> Tensor:
    """Return logits of ten images, some of which have the highest score for their label."""
    found = torch.nn.functional.one_hot(LABELS, 5).float()
    found[right:] = found[right:].roll(1, dims=1)
    return found


class Second:
    """A judge before its second stage, of a model that returns what it is shown."""

    def __init__(self, *, before: int, after: Tensor) -> None:
        self.events: list[Event] = []
        batches = [(after[:7], LABELS[:7]), (after[7:], LABELS[7:])]
        first = StageResult(
            name="train", steps=7, seconds=0.0, top1=0.5, top5=1.0, loss=1.0, held_out=before / 10
        )
        anything: Any = None
        self.state = TrainState(
            model=nn.Identity(),
            updater=Updater(SGD([torch.zeros(1)]), anything, anything),
            scaler=GradScaler("cpu", enabled=False),
            average=None,
            progress=Progress(step=7),
            stages=[first],
        )
        pipeline: Any = SimpleNamespace(
            held_out_samples=range(10),
            held_out=lambda: iter(batches),
            validation=lambda: iter(batches),
            validation_samples=np.arange(10),
            evaluated_samples=np.arange(10),
            classes=tuple("abcde"),
            plan=SimpleNamespace(val_samples=10, epoch=float),
        )
        backend = Serial(torch.device("cpu"))
        log = RunLog(Path(), self.state)
        log.trackers.append(SimpleNamespace(record=self.events.append))
        evaluator = Evaluator(
            graph=False,
            state=self.state,
            pipeline=pipeline,
            backend=backend,
            views=1,
            average_samples=None,
        )
        self.judge = Judge(
            evaluator=evaluator,
            saver=SimpleNamespace(save=lambda: None),  # type: ignore[arg-type]
            log=log,
            decides=True,
            measures_gap=False,
        )

    def end(self, name: StageName, **how: Any) -> StageResult:  # noqa: ANN401 -- passed on
        """End a stage; return its result, and in `rolled_back` how often it was undone."""
        with mock.patch.object(TrainState, "roll_back") as rolled_back:
            self.judge.begin()
            self.judge.end(name, num_steps=3, **how)
        self.rolled_back = rolled_back.call_count
        return self.state.stages[-1]


@pytest.mark.parametrize(
    ("before", "after", "kept"), [(6, 7, True), (6, 6, False), (6, 5, False), (0, 0, False)]
)
def test_a_stage_is_kept_where_more_of_the_images_are_right_and_a_tie_is_not_more(
    before: int, after: int, kept: bool
) -> None:
    second = Second(before=before, after=scores(after))
    stage = second.end("affine")
    assert (stage.held_out, stage.kept) == (after / 10, kept)
    assert second.rolled_back == (not kept)
    assert second.state.snapshot == {}
    decision = second.events[-1]
    assert isinstance(decision, Decision)
    assert (decision.before, decision.after) == (before / 10, after / 10)


def test_a_model_whose_loss_is_no_number_is_not_kept_though_it_meets_labels_by_chance() -> None:
    broken = scores(10)
    broken[-1] = math.nan
    second = Second(before=1, after=broken)
    stage = second.end("clean")
    assert stage.held_out is not None
    assert stage.held_out > 0.1
    assert not stage.kept
    assert second.rolled_back == 1


def test_a_stage_that_failed_is_rolled_back_however_well_it_did_and_says_why() -> None:
    second = Second(before=3, after=scores(9))
    stage = second.end("clean", note="it overflowed", failed=True)
    assert (stage.held_out, stage.kept, stage.note) == (0.9, False, "it overflowed")
    assert second.rolled_back == 1
    assert second.events[0] == Note(kind="stage", stage="clean", step=7, text="it overflowed")


def test_the_held_out_samples_are_evaluated_uncompiled_as_the_validation_data_is() -> None:
    stances: list[str] = []

    @contextmanager
    def uncompiled() -> Iterator[None]:
        stances.append("eager")
        yield
        stances.append("default")

    def during(images: Tensor) -> Tensor:
        assert stances[-1] == "eager"
        return images

    second = Second(before=6, after=scores(7))
    with (
        mock.patch("largebatch.training.judging.uncompiled", uncompiled),
        mock.patch.object(second.state.model, "forward", during),
    ):
        assert second.end("affine").kept
    assert stances == ["eager", "default"] * 2
