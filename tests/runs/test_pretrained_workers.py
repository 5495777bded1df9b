"""Weights from elsewhere on two workers: as on one, and only worker 0 looks through the folder."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from on_forked_workers import on_forked_workers
from torch import Tensor

from largebatch.data.datasets import digits
from largebatch.data.index.index import Content
from largebatch.models import zoo
from largebatch.runs import pretrained
from largebatch.runs.options import Options
from largebatch.runs.pretrained import polish_weights

SMALL = ("data.image_size=16", "data.eval_resize=null")


def refuse_to_look(*_: object) -> Content:
    raise AssertionError("worker 1 looked through the folder")


def polished(weights: Path, options: Options) -> list[float]:
    """Polish the weights; return what was measured."""
    _look_on_worker_0_alone()
    found = polish_weights("resnet10t", weights, options, samples=320)
    return [found.before.top1, found.before.loss, found.after.loss]


def _look_on_worker_0_alone() -> None:
    if os.environ.get("RANK") == "1":
        vars(pretrained)["open_content"] = refuse_to_look


def test_two_workers_find_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(
        digits.write_digits(), tmp_path / "data", ignore=shutil.ignore_patterns("*.index")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    state = zoo.build("resnet10t", num_classes=10, arguments={}).state_dict()
    torch.save(state, tmp_path / "theirs.pth")
    theirs = tmp_path / "theirs.pth"
    first, second = (
        Options(out=tmp_path / f"{n}.pth", data=tmp_path / "data", overrides=SMALL) for n in (1, 2)
    )
    together = on_forked_workers(polished, theirs, second, workers=2)
    assert together == pytest.approx(polished(theirs, first), rel=1e-4)
    one, two = (load(tmp_path / name) for name in ("1.pth", "2.pth"))
    assert not one["bn1.running_mean"].equal(state["bn1.running_mean"])
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def load(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(path)
    return found
