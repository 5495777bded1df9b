from pathlib import Path

import pytest
import torch

from largebatch.errors import CheckpointError
from largebatch.recipe.loading import load_recipe
from largebatch.training.state import (
    Checkpoint,
    Progress,
    load_checkpoint,
    newest_checkpoint,
    parse_checkpoint,
    save_checkpoint,
)

RECIPE = load_recipe(Path(__file__).parents[2] / "recipes" / "digits_96.yaml")


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
        },
    )


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", checkpoint(7))
    loaded = load_checkpoint(path)
    assert path.name == "step-00000007.pt"
    assert (loaded.recipe, loaded.progress) == (RECIPE, Progress(7, 0, 0, 672, 1.0, 1.5))
    assert loaded.stages == checkpoint(7).stages
    for part in ("model", "optimizer"):
        torch.testing.assert_close(loaded.state[part], checkpoint(7).state[part])


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save_checkpoint(tmp_path, checkpoint(step))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-00000010.pt",
        "step-00000015.pt",
    ]


def test_a_save_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, checkpoint(5))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, checkpoint(6))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005.pt"]


@pytest.mark.parametrize("damage", [b"", b"not a checkpoint", None])
def test_the_newest_that_can_be_read_is_taken(tmp_path: Path, damage: bytes | None) -> None:
    save_checkpoint(tmp_path, checkpoint(5))
    path = save_checkpoint(tmp_path, checkpoint(6))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage is None else damage)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert parse_checkpoint(found, source="it").progress.step == 5
    with pytest.raises(CheckpointError, match="step-00000006.pt: not a readable checkpoint"):
        load_checkpoint(path)


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"x.pt: there is no such checkpoint"):
        load_checkpoint(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="cannot read the checkpoint: Is a directory"):
        load_checkpoint(tmp_path)


def test_checkpoints_of_which_none_can_be_read_are_not_a_fresh_start(tmp_path: Path) -> None:
    for step in (5, 6):
        save_checkpoint(tmp_path, checkpoint(step)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)step-00000006.pt.*step-00000005.pt"):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, checkpoint(5))
    content = torch.load(path)
    del content["optimizer"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="not a complete checkpoint: .*optimizer"):
        load_checkpoint(path)


def test_another_programs_file_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "theirs.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of this version of largebatch"):
        load_checkpoint(tmp_path / "theirs.pt")
