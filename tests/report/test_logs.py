"""Logs of other programs are read by the names that they have there."""

import json
import math
from pathlib import Path

import pytest

from largebatch.errors import CheckpointError
from largebatch.report.diagnosis import find_causes
from largebatch.report.logs import read_record

TIMM = """epoch,train_loss,eval_loss,eval_top1,eval_top5,lr
0,2.31,2.1,31.5,80.0,0.0001
1,1.20,1.0,62.0,93.0,0.1
2,0.60,0.9,71.25,95.0,0.05
"""
LIGHTNING = """epoch,lr-SGD,step,train_loss,val_acc,val_loss
,0.1,49,,,
0,,49,2.0,,
0,,59,,0.4,1.9
,0.05,99,,,
1,,99,1.0,,
1,,119,,0.7,1.1
"""
TRAINER = {
    "global_step": 20,
    "log_history": [
        {"epoch": 0.5, "learning_rate": 0.02, "loss": 2.2, "step": 5},
        {"epoch": 1.0, "learning_rate": 0.01, "loss": 1.5, "step": 10},
        {"epoch": 1.0, "eval_accuracy": 0.55, "eval_loss": 1.4, "step": 10},
        {"epoch": 2.0, "learning_rate": 0.0, "loss": 1.1, "step": 20},
        {"epoch": 2.0, "step": 20, "train_loss": 1.6, "train_runtime": 9.0},
    ],
}


def test_timms_summary_is_read_by_epochs_and_percentages_become_parts(tmp_path: Path) -> None:
    (tmp_path / "summary.csv").write_text(TIMM)
    record = read_record(tmp_path, classes=10)
    assert record.loss.tolist() == [2.31, 1.2, 0.6]
    assert record.top1.tolist() == [0.315, 0.62, 0.7125]
    assert record.val_epoch.tolist() == [1, 2, 3]  # timm's epochs are counted from 0
    assert record.epochs == 3
    assert (record.peak, record.updates, record.by_update) == (0.1, None, False)
    assert record.chance == pytest.approx(math.log(10))


def test_lightnings_metrics_have_their_rates_in_other_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(LIGHTNING)
    record = read_record(tmp_path)
    assert record.loss.tolist() == [2.0, 1.0]
    assert record.lr.tolist() == [0.1, 0.05]
    assert record.val_loss.tolist() == [1.9, 1.1]
    assert record.top1.tolist() == [0.4, 0.7]
    assert record.updates == 99


def test_the_trainers_last_entry_is_no_row_of_its_losses(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(TRAINER))
    record = read_record(tmp_path)
    assert record.loss.tolist() == [2.2, 1.5, 1.1]
    assert record.step.tolist() == [5, 10, 20]
    assert (record.updates, record.by_update, record.epochs) == (20, True, 2.0)
    assert record.top1.tolist() == [0.55]


@pytest.mark.parametrize("first", [0, 1])
def test_updates_are_counted_and_named_by_the_numbers_of_the_log(
    first: int, tmp_path: Path
) -> None:
    losses = ["2.3", "2.2", "2.1", "nan"]
    rows = [f"{place},{loss}" for place, loss in enumerate(losses, start=first)]
    (tmp_path / "log.csv").write_text("\n".join(["step,loss", *rows]))
    record = read_record(tmp_path / "log.csv")
    assert record.updates == 4
    assert find_causes(record)[0].figure.endswith(f"not finite at step {3 + first}")


def test_an_evaluation_without_a_loss_is_not_one_whose_loss_was_not_finite(tmp_path: Path) -> None:
    head, rows = "step,epoch,loss,val_acc,val_loss", ["0,0,2.3,0.3", "1,1,0.5,0.6", "2,2,0.1,0.9"]
    path, found = tmp_path / "log.csv", {}
    for words in (",,", "2.2,,0.3", "2.2,nan,0.3"):
        columns = zip(rows, words.split(","), strict=True)
        path.write_text("\n".join([head, *map(",".join, columns)]))
        found[words] = read_record(path, classes=10)
    assert "validation loss" in found[",,"].unchecked
    assert find_causes(found[",,"]) == find_causes(found["2.2,,0.3"]) == []
    (cause,) = find_causes(found["2.2,nan,0.3"])
    assert cause.figure == "the validation loss was not finite at epoch 1"


def test_scalars_of_tensorboard_are_rows_by_step(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step, loss in enumerate([2.5, 1.5, 0.5]):
            writer.add_scalar("Loss/train", 9.0, step)
            writer.add_scalar("train/loss", loss, step)
            writer.add_scalar("train/lr", 0.1 * step, step)
        writer.add_scalar("val/loss", 0.75, 2)
        writer.add_scalar("val/top1", 0.5, 2)
    record = read_record(tmp_path)
    assert record.loss.tolist() == [2.5, 1.5, 0.5]
    assert record.lr.tolist() == pytest.approx([0.0, 0.1, 0.2])
    assert (record.val_loss.tolist(), record.top1.tolist()) == ([0.75], [0.5])


def test_event_files_of_several_runs_are_not_mixed(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for name in ("a", "b"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalar("Loss/train", 1.0, 0)
    with pytest.raises(CheckpointError, match=r"Loss/train is in .*a and in .*b; give one of the"):
        read_record(tmp_path)
    assert read_record(tmp_path / "a").loss.tolist() == [1.0]


def test_timms_accuracies_are_per_cent_however_low(tmp_path: Path) -> None:
    header = "epoch,train_loss,eval_loss,eval_top1,eval_top5\n"
    (tmp_path / "summary.csv").write_text(f"{header}0,6.9,6.9,0.1,0.5\n")
    assert read_record(tmp_path).top1.tolist() == [0.001]


def test_what_another_log_lacks_is_not_checked_and_raises_no_cause(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n1,2.3\n2,1.0\n3,0.4\n")
    record = read_record(tmp_path / "log.csv")
    assert find_causes(record) == []
    assert record.unchecked == [
        *("learning rate", "losses against guessing", "validation loss"),
        *("exact BatchNorm statistics", "accuracy by class", "noise scale", "waits for samples"),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("epoch,top1\n0,0.5\n", "has no training loss; expected a column such as train_loss or"),
        ("", "cannot be read as a log: has no rows"),
        ("epoch,train_loss\n", "cannot be read as a log: has no rows"),
        ("epoch;train_loss\n1;2.3\n", "expected commas between columns, found semicolons"),
        (b"\xff\xfe\x00binary", "cannot be read as a log"),
    ],
)
def test_a_file_without_losses_is_refused(content: str | bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=words):
        read_record(path)


def test_a_json_file_of_another_kind_and_a_folder_without_a_log_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="expected the list log_history"):
        read_record(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="holds no log of a run; expected log.jsonl"):
        read_record(tmp_path)
