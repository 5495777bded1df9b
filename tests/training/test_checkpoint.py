"""Checkpoint files: what they hold, what stays on the disk, and what is refused."""

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from largebatch.errors import CheckpointError
from largebatch.recipe.loading import load_recipe
from largebatch.storage import checksum
from largebatch.training.checkpoint import (
    CHECKSUM,
    HEADER,
    Checkpoint,
    Retention,
    Writer,
    copy_state,
    load_checkpoint,
    newest_checkpoint,
    parse_checkpoint,
    write_checkpoint,
)
from largebatch.training.state import Progress

RECIPE = load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml")


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint.of(
        RECIPE,
        {
            "model": {"weight": torch.arange(3.0)},
            "optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []},
            "scaler": {},
            "ema": {},
            "progress": {"step": step, "images": 96 * step, "train_seconds": 1.0, "seconds": 1.5},
            "stages": [
                {"name": "train", "steps": 5, "seconds": 1.0, "top1": 0.5, "top5": 1.0, "loss": 2.0}
            ],
            "snapshot": {},
            "extra": {},
        },
    )


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rewritten(content: bytes, change: Any) -> bytes:  # noqa: ANN401 -- a function of JSON
    """Return a checkpoint with a right checksum, whose header `change` has changed."""
    tensors = safetensors.torch.load(content)
    header = json.loads(tensors[HEADER].numpy().tobytes())
    change(header)
    text = json.dumps(header).encode()
    tensors[HEADER] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    body = safetensors.torch.save(tensors)[:-4]
    return body + checksum([body])


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = replace(checkpoint(7), origin={"plan": {"steps": 9}, "data": {"train": "ab"}})
    path = write_checkpoint(tmp_path / "checkpoints", saved)
    loaded = load_checkpoint(path)
    assert path.name == "step-00000007.safetensors"
    assert (loaded.recipe, loaded.progress) == (RECIPE, Progress(7, 0, 0, 672, 1.0, 1.5))
    assert (loaded.stages, loaded.origin) == (saved.stages, saved.origin)
    for part in ("model", "optimizer"):
        torch.testing.assert_close(loaded.state[part], saved.state[part])


def test_every_type_and_layout_of_tensor_comes_back(tmp_path: Path) -> None:
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
    state = {**checkpoint(1).state, "model": tensors}
    path = write_checkpoint(tmp_path, Checkpoint.of(RECIPE, copy_state(state)))
    loaded = load_checkpoint(path).state["model"]
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_nothing_in_a_checkpoint_is_code(tmp_path: Path) -> None:
    content = write_checkpoint(tmp_path, checkpoint(7)).read_bytes()
    header = json.loads(safetensors.torch.load(content)[HEADER].numpy().tobytes())
    assert set(header) == {"format", "recipe", "origin", "state"}
    assert CHECKSUM in safetensors.torch.load(content)
    assert not content.startswith(b"PK")


def test_the_newest_stay_and_the_best_and_every_tenth(tmp_path: Path) -> None:
    writer = Writer(tmp_path, Retention(last=2, every=10))
    (tmp_path / "notes.txt").write_text("not ours")
    for step in (5, 10, 12, 15, 17):
        best = {"best": 0.9, "best_step": 12} if step >= 12 else {}
        state = checkpoint(step).state
        progress = {**state["progress"], **best}
        writer.write(Checkpoint.of(RECIPE, {**state, "progress": progress}))
    writer.wait()
    kept = [f"step-{step:08d}.safetensors" for step in (10, 12, 15, 17)]
    assert names(tmp_path) == ["notes.txt", *kept]


def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    writer = Writer(tmp_path / "run/checkpoints", Retention(last=1, every=None))
    writer.write(checkpoint(5))
    writer.wait()
    with monkeypatch.context() as patched:
        full_disk(patched)
        writer.write(checkpoint(6))
        with pytest.raises(CheckpointError, match=r"step-00000006.*: No space left on device"):
            writer.wait()
    assert names(tmp_path / "run/checkpoints") == ["step-00000005.safetensors"]
    writer.write(checkpoint(7))
    writer.wait()
    assert names(tmp_path / "run/checkpoints") == ["step-00000007.safetensors"]


def test_a_state_that_is_not_finite_is_not_written_over_a_good_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path, Retention(last=1, every=None))
    writer.write(checkpoint(5))
    broken = {**checkpoint(6).state, "model": {"weight": torch.tensor([1.0, float("nan")])}}
    writer.write(Checkpoint.of(RECIPE, broken))
    with pytest.raises(CheckpointError, match="not written: model/weight holds values that are"):
        writer.wait()
    assert names(tmp_path) == ["step-00000005.safetensors"]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    state = {**checkpoint(5).state, "model": {"weight": weight}}
    writer = Writer(tmp_path, Retention(last=1, every=None))
    writer.write(Checkpoint.of(RECIPE, copy_state(state)))
    weight += 1
    writer.wait()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert torch.equal(load_checkpoint(found.path).state["model"]["weight"], torch.zeros(3))


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
    assert found.path == older
    assert parse_checkpoint(found.content, source="it").progress.step == 5
    found.warn()
    assert f"{path}: " in caplog.text
    assert "going back to step-00000005.safetensors" in caplog.text
    with pytest.raises(CheckpointError, match="step-00000006.safetensors: "):
        load_checkpoint(path)


def test_every_flipped_bit_and_zeroed_page_is_found(tmp_path: Path) -> None:
    state = {**checkpoint(5).state, "model": {"weight": torch.randn(64, 64)}}
    content = write_checkpoint(tmp_path, Checkpoint.of(RECIPE, state)).read_bytes()
    generator = random.Random(0)
    for _ in range(400):
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        with pytest.raises(CheckpointError):
            parse_checkpoint(bytes(changed), source="it")
    zeroed = content[:4096] + bytes(4096) + content[8192:]
    with pytest.raises(CheckpointError, match="it: damaged: its checksum does not match"):
        parse_checkpoint(zeroed, source="it")


def _without(*keys: str) -> Any:  # noqa: ANN401 -- a function of JSON
    def change(header: dict[str, Any]) -> None:
        for key in keys[:-1]:
            header = header[key]
        del header[keys[-1]]

    return change


def _with(value: object, *keys: str) -> Any:  # noqa: ANN401 -- a function of JSON
    def change(header: dict[str, Any]) -> None:
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("state", "optimizer"), "not a complete checkpoint: 'optimizer'"),
        (_without("state", "progress"), "not a complete checkpoint"),
        (_with(3, "format"), "not a checkpoint of this version"),
        (_with([], "state", "model"), "model is no mapping"),
        (_with([], "state", "model", "weight"), "model/weight is not a tensor"),
        (_with({"a": {"b": 1}}, "state", "ema"), "ema/a is not a tensor"),
        (_with([7], "state", "optimizer", "param_groups"), "param_groups"),
        (_with(None, "state", "optimizer", "param_groups"), "param_groups"),
        (_without("state", "optimizer", "param_groups"), "param_groups"),
        (_with(-1, "state", "progress", "step"), "step: Input should be greater than or equal to"),
        (_with("five", "state", "progress", "step"), "step: Input should be a valid integer"),
        (_with(None, "state", "stages"), "not a complete checkpoint"),
        (_with({"$tensor": "absent"}, "state", "model", "weight"), "'absent'"),
        (_with({"$tensor": [1]}, "state", "model", "weight"), "not a complete checkpoint"),
        (_with("name: x", "recipe"), "its recipe"),
        (_with(None, "recipe"), "recipe is not a text"),
        (_with({"recipe": 1}, "origin"), "not a complete checkpoint"),
        (_with(7, "origin"), "not a complete checkpoint"),
        (_with(7, "origin", "trackers"), "trackers is no mapping"),
        (_with(7, "origin", "classes"), "valid list"),
    ],
)
def test_wrong_contents_with_a_right_checksum_are_refused(
    change: Any,  # noqa: ANN401 -- a function of JSON
    message: str,
    tmp_path: Path,
) -> None:
    content = write_checkpoint(tmp_path, checkpoint(5)).read_bytes()
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_checkpoint(rewritten(content, change), source="it")
    assert str(caught.value).startswith("it: ")


def test_the_state_of_a_protocol_is_read_from_files_of_format_4(tmp_path: Path) -> None:
    content = write_checkpoint(tmp_path, checkpoint(5)).read_bytes()
    lost = {"learner": 1, "update": 3, "mini_batch": None, "silent": True}

    def to_format_4(header: dict[str, Any]) -> None:
        header["format"] = 4
        state = header["state"]
        del state["extra"]
        state["protocol"] = {"outer": {"$tensor": "/model/weight"}}
        state["progress"] |= {"gradients": [7, 8], "lost": [lost]}

    state = parse_checkpoint(rewritten(content, to_format_4), source="it").state
    protocol = state["extra"]["protocol"]
    assert torch.equal(protocol["momentum"]["outer"], torch.arange(3.0))
    assert (protocol["gradients"], protocol["lost"]) == ([7, 8], [lost])
    assert set(state["progress"]) == {"step", "images", "train_seconds", "seconds"}


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    with pytest.raises(CheckpointError, match=r"x.pt: there is no such checkpoint"):
        load_checkpoint(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="cannot read the checkpoint: Is a directory"):
        load_checkpoint(tmp_path)


def test_checkpoints_of_which_none_can_be_read_are_not_a_fresh_start(tmp_path: Path) -> None:
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
