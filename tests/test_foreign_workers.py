"""Weights from elsewhere on two workers: as on one, and only worker 0 looks through the folder."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from largebatch import foreign
from largebatch.data import digits
from largebatch.data.building import Content
from largebatch.foreign import Foreign, compare_weights, polish_weights
from largebatch.models import zoo
from largebatch.runner import Options
from largebatch.workers import start_workers

SMALL = ("data.image_size=32", "data.eval_resize=null")


def refuse_to_look(*_: object) -> Content:
    raise AssertionError("worker 1 looked through the folder")


def both(what: Foreign, out: Path, data: Path) -> tuple[list[float], list[dict[str, Any]]]:
    """Polish the weights and compare; return what was measured."""
    if os.environ.get("RANK") == "1":
        vars(foreign)["open_content"] = refuse_to_look
    polished = polish_weights(what, Options(out=out, data=data), samples=320)
    options = Options(out=Path(), data=data)
    with compare_weights(what, options, samples=320, epochs=0.3, lr=0.01) as comparison:
        rows = [
            {key: getattr(row, key) for key in ("mode", "top1", "loss", "updates", "lr")}
            for row in comparison.rows
        ]
    measured = [polished.before.top1, polished.before.loss, polished.after.loss]
    return measured, rows


def test_two_workers_find_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(
        digits.write_digits(), tmp_path / "data", ignore=shutil.ignore_patterns("*.index")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    state = zoo.build("resnet10t", num_classes=10, arguments={}).state_dict()
    torch.save(state, tmp_path / "theirs.pth")
    what = Foreign(model="resnet10t", weights=tmp_path / "theirs.pth", overrides=SMALL)
    together = start_workers(both, what, tmp_path / "2.pth", tmp_path / "data", workers=2)
    alone = both(what, tmp_path / "1.pth", tmp_path / "data")
    assert together[0] == pytest.approx(alone[0], rel=1e-4)
    assert [row["mode"] for row in alone[1]] == ["none", "statistics", "affine", "clean"]
    for ours, other in zip(together[1], alone[1], strict=True):
        near = {"loss": pytest.approx(other["loss"], rel=1e-3)}
        near["top1"] = pytest.approx(other["top1"], abs=1.5 / 360)
        assert ours == {**other, **near}
    one, two = (load(tmp_path / name) for name in ("1.pth", "2.pth"))
    assert not one["bn1.running_mean"].equal(state["bn1.running_mean"])
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


def load(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(path)
    return found
