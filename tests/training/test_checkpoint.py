"""Checkpoint files: what they hold, what stays on the disk, and what is refused."""

import errno
import json
import math
import os
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from on_forked_workers import on_forked_workers
from short_runs import CLEAN, EMA, STATISTICS, SWA, a_recipe, weights
from torch import Tensor, nn

from largebatch import models, run
from largebatch.distributed.serial import Serial
from largebatch.errors import CheckpointError, RecipeError
from largebatch.recipe.loading import load_recipe
from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.options import Options
from largebatch.training.checkpoint import (
    CHECKSUM,
    CONTENT,
    Checkpoint,
    Origin,
    Saver,
    Writer,
    _checksum,
    constants_of,
    copy_state,
    load_checkpoint,
    newest_checkpoint,
    parse_checkpoint,
    require_storable,
    write_checkpoint,
)
from largebatch.training.state import Progress
from largebatch.training.step_log import Requests

RECIPE = load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml")


def checkpoint(step: int, **parts: object) -> Checkpoint:
    state = {
        "model": {"weight": torch.arange(3.0)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []},
        "scaler": {},
        "ema": {},
        "progress": {"step": step, "images": 96 * step, "train_seconds": 1.0, "seconds": 1.5},
        "stages": [
            {"name": "train", "steps": 5, "seconds": 1.0, "top1": 0.5, "top5": 1.0, "loss": 2.0}
        ],
        "snapshot": {},
    }
    return Checkpoint.of(RECIPE, {**state, **parts})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(3).bfloat16(),
        "half": torch.randn(3).half(),
        "double": torch.randn(3).double(),
        "count": torch.tensor(5),
        "bool": torch.tensor([True, False]),
        "int8": torch.tensor([-1, 2, 3], dtype=torch.int8),
        "nothing": torch.empty(0, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.arange(10.0)[2:5],
    }
    tensors["same"] = tensors["half"]
    state = copy_state({**checkpoint(7).state, "model": tensors})
    saved = Checkpoint.of(RECIPE, state, Origin(data={"train": "ab"}))
    path = write_checkpoint(tmp_path / "checkpoints", saved)
    loaded = load_checkpoint(path)
    assert path.name == "step-00000007.safetensors"
    assert (loaded.recipe, loaded.progress) == (RECIPE, Progress(7, 0, 0, 672, 1.0, 1.5))
    assert (loaded.stages, loaded.origin) == (saved.stages, saved.origin)
    assert loaded.state["model"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.state["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded.state["model"][name], tensor)
    torch.testing.assert_close(loaded.state["optimizer"], saved.state["optimizer"])


def test_a_checkpoint_is_a_file_of_safetensors_as_readable_as_others(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(7))
    assert safetensors.torch.load_file(path)["/model/weight"].tolist() == [0, 1, 2]
    (tmp_path / "other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_the_newest_stay_and_the_best(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep_last=2)
    (tmp_path / "notes.txt").write_text("not ours")
    for step in (5, 10, 12, 15, 17):
        best = {"best": 0.9, "best_step": 12} if step >= 12 else {}
        writer.write(checkpoint(step, progress={"step": step, **best}))
    writer.wait()
    kept = [f"step-{step:08d}.safetensors" for step in (12, 15, 17)]
    assert names(tmp_path) == ["notes.txt", *kept]


@pytest.mark.parametrize("at", ["write", "flush"])
def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        if at == "write":
            raise safetensors.SafetensorError("I/O error: No space left on device")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "run").mkdir()
    writer = Writer(tmp_path / "run/checkpoints", keep_last=1)
    writer.write(checkpoint(5))
    writer.wait()
    with monkeypatch.context() as patched:
        if at == "write":
            patched.setattr(safetensors.torch, "save_file", refuse)
        else:
            patched.setattr(os, "fsync", refuse)
        writer.write(checkpoint(6))
        with pytest.raises(CheckpointError, match="step-00000006.*No space left"):
            writer.wait()
    assert names(tmp_path / "run/checkpoints") == ["step-00000005.safetensors"]
    writer.write(checkpoint(7))
    writer.wait()
    assert names(tmp_path / "run/checkpoints") == ["step-00000007.safetensors"]


def test_a_state_that_is_not_finite_is_not_written_over_a_good_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep_last=1)
    writer.write(checkpoint(5))
    writer.write(checkpoint(6, model={"weight": torch.tensor([1.0, float("nan")])}))
    with pytest.raises(CheckpointError, match="model/weight"):
        writer.wait()
    assert names(tmp_path) == ["step-00000005.safetensors"]


class Masked(nn.Module):
    """A linear model with constants: masks that are partly infinite, stored and not."""

    mask: Tensor
    same: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16 * 16)
        self.head = nn.Linear(16 * 16, num_classes)
        mask = torch.zeros(16, 16).masked_fill(torch.ones(16, 16).triu(9).bool(), -math.inf)
        self.register_buffer("mask", mask)
        self.register_buffer("same", mask.clone(), persistent=False)
        self.prior = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.mean(1) + (self.mask + self.same).softmax(1)
        logits: Tensor = self.head(self.norm(pixels.flatten(1))) + self.prior[0]
        return logits


def masked(**buffers: Any) -> Callable[[int], nn.Module]:  # noqa: ANN401 -- also no tensors
    def build(num_classes: int) -> nn.Module:
        model = Masked(num_classes)
        for name, value in buffers.items():
            model.register_buffer(name, value)
        return model

    return build


def build_masked(monkeypatch: pytest.MonkeyPatch, build: Callable[[int], nn.Module]) -> None:
    monkeypatch.setitem(models._OURS, "masked", (build, {}))


OF_MASKED = ("model={name: masked}", "batch.bn_span=96", "optimizer={kind: sgd}")


@pytest.mark.parametrize("average", [EMA, SWA])
def test_a_model_with_infinite_constants_is_trained_saved_resumed_and_evaluated(
    average: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_masked(monkeypatch, Masked)
    often = "execution.checkpoints={every_steps: 1}"
    recipe = a_recipe(average, CLEAN, STATISTICS, changes=(*OF_MASKED, often))
    for folder, parts in (("whole", [None]), ("parts", [6, None])):
        for steps in parts:
            summary = run(recipe, out=tmp_path / folder, max_steps=steps, resume=steps != parts[0])
    assert summary.status == "finished"
    ours, other = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], other[name]) for name in other)
    new = Masked(10)
    assert torch.equal(ours["mask"], new.mask)
    assert torch.equal(ours["prior"], new.prior)
    found = evaluate_checkpoint(tmp_path / "parts", Options())
    assert found.metrics.loss == pytest.approx(summary.loss, rel=1e-6)


def test_a_constant_that_becomes_infinite_elsewhere_is_refused(tmp_path: Path) -> None:
    constants = constants_of(Masked(3))
    assert set(constants) == {"mask", "prior"}
    model = Masked(3).state_dict()
    other = {"head.weight": torch.ones(3, 256, dtype=torch.float8_e4m3fn)}  # no isfinite of torch's
    writer = Writer(tmp_path, keep_last=1, constants=constants)
    writer.write(checkpoint(5, model={**model, **other}))
    worse = model["mask"].clone()
    worse[3, 0] = math.inf
    writer.write(checkpoint(6, model={**model, "mask": worse}))
    with pytest.raises(CheckpointError, match="mask"):
        writer.wait()
    assert names(tmp_path) == ["step-00000005.safetensors"]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1).expand(7),
        torch.ones(2, 1).expand(2, 3),
        torch.arange(8.0).unfold(0, 4, 2),
        torch.ones(3, dtype=torch.complex128),
        torch.ones(3).to_sparse(),
    ],
    ids=["expand", "expand of a row", "unfold", "type", "sparse"],
)
def test_a_buffer_that_no_checkpoint_can_hold_is_refused_before_the_run(
    value: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_masked(monkeypatch, masked(table=value))
    with pytest.raises(RecipeError, match=r"masked: table "):
        run(a_recipe(CLEAN, changes=OF_MASKED), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_views_without_shared_elements_are_stored(tmp_path: Path) -> None:
    table = torch.arange(64.0).view(4, 16)
    model = Masked(3)
    model.register_buffer("part", table[:, 2:7:2].t())
    model.register_buffer("empty", torch.empty(0, 3).expand(5, 0, 3))
    model.register_buffer("one", torch.ones(1).expand(1, 1, 1))
    require_storable(model, "masked")


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_the_newest_that_can_be_read_is_taken_and_what_is_skipped_is_named(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    older = write_checkpoint(tmp_path, checkpoint(5))
    path = write_checkpoint(tmp_path, checkpoint(6))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.checkpoint.progress.step) == (older, 5)
    assert parse_checkpoint(found.content, source="it").progress.step == 5
    assert f"{path}: " in caplog.text
    with pytest.raises(CheckpointError, match="step-00000006.safetensors: "):
        load_checkpoint(path)


def test_every_flipped_bit_and_zeroed_page_is_found(tmp_path: Path) -> None:
    saved = checkpoint(5, model={"weight": torch.randn(64, 64)})
    content = write_checkpoint(tmp_path, saved).read_bytes()
    generator = random.Random(0)
    for _ in range(400):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        with pytest.raises(CheckpointError, match="^it: "):
            parse_checkpoint(bytes(changed), source="it")
    zeroed = content[:-8192] + bytes(4096) + content[-4096:]
    with pytest.raises(CheckpointError, match="it: damaged: "):
        parse_checkpoint(zeroed, source="it")


def _with(value: object, *keys: str) -> Any:  # noqa: ANN401 -- a function of JSON
    def change(header: dict[str, Any]) -> None:
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["state"].pop("optimizer"), "'optimizer'"),
        (_with(5, "format"), "this version"),
        (_with([], "state", "model"), "model"),
        (_with(-1, "state", "progress", "step"), "step: "),
        (_with("five", "state", "progress", "step"), "step: "),
        (_with(None, "state", "stages"), "valid list"),
        (_with({"$tensor": "absent"}, "state", "model", "weight"), "'absent'"),
        (_with({"$tensor": [1]}, "state", "model", "weight"), ""),
        (_with("name: x", "recipe"), "its recipe"),
        (_with(None, "recipe"), ""),
        (_with(7, "origin"), ""),
        (_with(7, "origin", "classes"), "classes"),
    ],
)
def test_wrong_contents_with_a_correct_checksum_are_refused(
    change: Any,  # noqa: ANN401 -- a function of JSON
    message: str,
    tmp_path: Path,
) -> None:
    content = write_checkpoint(tmp_path, checkpoint(5)).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][CONTENT])
    change(header)
    tensors, text = safetensors.torch.load(content), json.dumps(header)
    metadata = {CONTENT: text, CHECKSUM: _checksum(text, tensors)}
    with pytest.raises(CheckpointError, match=f"^it: .*{message}"):
        parse_checkpoint(safetensors.torch.save(tensors, metadata), source="it")


def test_where_none_can_be_read_the_errors_are_raised(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    for path in (tmp_path / "x.pt", tmp_path):
        with pytest.raises(CheckpointError, match=path.name):
            load_checkpoint(path)
    for step in (5, 6):
        write_checkpoint(tmp_path, checkpoint(step)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)step-00000006.*step-00000005"):
        newest_checkpoint(tmp_path)


def test_another_programs_file_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "theirs.pt")
    safetensors.torch.save_file({"weight": torch.ones(3)}, tmp_path / "theirs.safetensors")
    for name in ("theirs.pt", "theirs.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name}: "):
            load_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("minutes", "cost", "due"),
    [
        pytest.param("auto", 0.5, 120.0, id="every two minutes"),
        pytest.param("auto", 3.0, 300.0, id="at most 1 % of the time"),
        pytest.param(1.0, 3.0, 60.0, id="as configured"),
        pytest.param(None, 0.1, float("inf"), id="never"),
    ],
)
def test_a_checkpoint_is_due_by_time(
    minutes: Any,  # noqa: ANN401 -- as in a recipe
    cost: float,
    due: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 50.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    requests = Requests(Serial(torch.device("cpu")), save_minutes=minutes)
    now += 1000
    requests.note_saved(seconds=cost)
    for seconds in (1.0, 59.0, 61.0, 119.0, 121.0, 299.0, 301.0, 1e6):
        now = 1050 + seconds
        assert requests.save_is_late() == (seconds > due)


def save_by_the_clock_of_worker_0(folder: Path) -> None:
    """Train on one of two workers; write the steps of its saves. The clock of worker 1 is ahead."""
    steps: list[int] = []
    save, rank = Saver.save, int(os.environ["RANK"])

    def is_late(_: Requests) -> bool:
        return rank == 1 or (bool(due) and due.pop(0))

    def noted(saver: Saver) -> None:
        steps.append(saver.state.progress.step)
        save(saver)

    due = [step == 2 for step in range(6)]
    with (
        mock.patch.object(Requests, "save_is_late", is_late),
        mock.patch.object(Saver, "save", noted),
    ):
        run(a_recipe(CLEAN), out=folder / "run", report=False)
    (folder / str(rank)).write_text(str(steps))


def test_two_workers_save_after_the_same_update_by_the_clock_of_worker_0(tmp_path: Path) -> None:
    on_forked_workers(save_by_the_clock_of_worker_0, tmp_path, workers=2)
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "[3, 6, 8]"
