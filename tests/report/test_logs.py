"""Logs of other programs are read by the names that they have there."""

import csv
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from largebatch.errors import CheckpointError
from largebatch.report.diagnosis import find_causes
from largebatch.report.logs import read_record
from largebatch.report.record import Record

LOGS = Path(__file__).parent / "logs"
NAN, INF = math.nan, math.inf


class Expected(NamedTuple):
    """What a log holds, as its lines say."""

    rows: int
    """Rows of training."""

    updates: float
    """Their number; NaN where the log has none."""

    epochs: float
    peak: float
    """The highest learning rate."""

    loss: float
    """The last training loss."""

    val_loss: float
    """The last one; infinite where it was not finite."""

    top1: float
    """The best one, a part of 1."""

    cause: str | None = None
    classes: int | None = 10


MADE_BY_THEIR_TOOLS = {
    "timm.csv": Expected(5, NAN, 5, 0.3, 0.183596, 0.326424, 0.92),
    "lightning.csv": Expected(15, 59, 6, 0.5, 0.0581404, 0.195135, 0.935),
    "keras.csv": Expected(9, NAN, 9, NAN, 0.42938, 0.418264, 0.9125),
    "keras_diverged.csv": Expected(5, NAN, 5, NAN, NAN, INF, 0.1025, "diverged"),
    "fastai.csv": Expected(4, NAN, 4, NAN, 1.29467, 0.738248, 0.89, "underfit"),
    "mmengine.json": Expected(8, 38, 4, 0.3, 0.283357, NAN, 0.9125),
    "detectron2.json": Expected(6, 59, NAN, 0.3, 0.391263, 0.351648, NAN),
    "deit.txt": Expected(5, NAN, 5, 5e-4, 5.00594, 4.98059, 0.01, "underfit", 1000),
    "ultralytics.csv": Expected(3, NAN, 3, 4.18583e-4, 2.38365, 2.29291, 0.14, "underfit"),
    "transformers.json": Expected(6, 30, 3, 0.433333, 1.76183, 1.77432, 0.72, "fewer updates"),
    "transformers_filtered.json": Expected(10, 40, 4, 1e38, NAN, INF, 0.1025, "diverged"),
    "skorch.json": Expected(5, NAN, 5, NAN, 2.19205, 2.19431, 0.40625, "underfit"),
    "convnext.txt": Expected(3, NAN, 3, 0.0376953, 3.79683, 3.35025, 0.14, "underfit"),
    "run-.-tag-train_loss.csv": Expected(20, 20, NAN, NAN, 0.392064, NAN, NAN),
}
"""Logs of small networks on digits, by twelve tools; DeiT had noise. Two runs diverged."""

TRANSCRIBED = {
    "dino.txt": Expected(4, NAN, 4, 0.01, 6.83, 6.82, 0.0037, "underfit", 1000),
    "detr.txt": Expected(3, NAN, 3, 1e-4, 15.2, 15.5, NAN, classes=None),
    "torchvision.csv": Expected(3, NAN, 3, 0.5, 6.5, 6.4, 0.0094, "underfit", 1000),
    "wandb_history.csv": Expected(4, 199, 2, NAN, 0.7, 0.8, 0.75),
}
"""Made up in the formats of the tools: DINO's and DETR's log.txt, names of torchvision's meters,
and a history of W&B that pandas wrote, with its index."""


@pytest.mark.parametrize("name", [*MADE_BY_THEIR_TOOLS, *TRANSCRIBED])
def test_logs_of_tools_are_read_as_they_mean_it(name: str) -> None:
    expected = (MADE_BY_THEIR_TOOLS | TRANSCRIBED)[name]
    record = read_record(LOGS / name, classes=expected.classes)
    val_loss = record.val_loss[~np.isnan(record.val_loss)]
    found = (
        *(len(record.loss), record.updates or NAN, record.epochs, record.peak, record.loss[-1]),
        val_loss[-1] if val_loss.size else NAN,
        np.nanmax(record.top1) if np.isfinite(record.top1).any() else NAN,
    )
    assert found == pytest.approx(expected[:7], rel=1e-5, nan_ok=True)
    assert [cause.kind for cause in find_causes(record)] == [expected.cause] * bool(expected.cause)


RESUMED = """{"iteration": 9, "loss": 3}
{"iteration": 19, "loss": 2}
{"iteration": 29, "loss": 9}
{"iteration": 19, "loss": 1}
{"iteration": 29, "loss": 0.5}
{"iter"""


@pytest.mark.parametrize("blank", ["", "nan"])
@pytest.mark.parametrize(
    "name", ["lightning.csv", "keras.csv", "wandb_history.csv", "mmengine.json"]
)
def test_a_log_that_another_program_wrote_again_as_one_table_is_read_alike(
    name: str, blank: str, tmp_path: Path
) -> None:
    path = LOGS / name
    with path.open() as file:
        rows = list(map(json.loads, file) if path.suffix == ".json" else csv.DictReader(file))
    names = dict.fromkeys(key for row in rows for key in row)
    cells = [[place, *(row.get(key) or blank for key in names)] for place, row in enumerate(rows)]
    cells = [[blank if cell == "NA" else cell for cell in row] for row in cells]
    with (tmp_path / "log.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["", *names], *cells])
    was, found = read_record(path), read_record(tmp_path / "log.csv")
    for column in ("step", "epoch", "loss", "lr", "val_epoch", "val_loss", "top1"):
        np.testing.assert_allclose(getattr(found, column), getattr(was, column), rtol=1e-12)


def read(path: Path, content: str, **known: int) -> Record:
    path.write_text(content)
    return read_record(path, **known)


@pytest.mark.parametrize(
    ("content", "val_loss", "diverged"),
    [
        # unmeasured cells in every way that tools write them
        *(
            (f"epoch,loss,val_loss\n0,2,{text}\n1,1,0.9\n2,0.8,{text}\n", [0.9], False)
            for text in ("nan", "N/A", "", "null", "-")
        ),
        ("epoch,loss,val_loss\n0,2,1.9\n1,1,nan\n2,0.8,0.7\n3,0.7,nan\n", [1.9, 0.7], False),
        ("epoch,loss,val_loss,val_acc\n0,2,1.9,0.3\n1,1,nan,nan\n", [1.9], False),
        ("epoch,loss,val_loss,val_acc\n0,2,1.9,0.3\n1,1,nan,0.1\n", [1.9, INF], False),
        ("epoch,loss,val_loss\n0,2,1.9\n1,1,1.2\n2,1,nan\n3,1,nan\n", [1.9, 1.2, INF, INF], False),
        # rows of validation between those of training, as pandas fills them
        ("step,loss,val_loss\n1,2,nan\n2,1,nan\n2,nan,0.9\n", [0.9], False),
        ("step,loss,val_loss\n1,2,nan\n1,nan,1.9\n2,1,nan\n2,nan,0.9\n", [1.9, 0.9], False),
        ("step,loss,val_loss\n1,2,\n1,,1.9\n2,nan,\n2,,nan\n", [1.9, INF], True),
        # a loss that is missing up to the end
        ("epoch,loss\n0,2\n1,nan\n2,nan\n", [], True),
        ("epoch,loss,val_loss\n0,2,1.9\n1,,\n2,,\n", [1.9], True),
        ("epoch,loss,lr\n0,2,0.1\n1,1,0.1\n,,\n,,\n", [], False),
        ("epoch,loss,val_loss\n0,2,1.9\n1,nan,1.2\n", [1.9, 1.2], True),
        ("step,loss,lr\n1,2,\n2,1,\n2,,0.1\n", [], False),
        ("epoch,loss,hours\n0,2,\n1,1,\n1,,0.3\n", [], False),  # a summary
    ],
)  # fmt: skip
def test_cells_that_were_not_measured_are_no_losses_and_a_loss_that_stays_away_is_lost(
    content: str, val_loss: list[float], diverged: bool, tmp_path: Path
) -> None:
    record = read(tmp_path / "log.csv", content)
    assert record.val_loss[~np.isnan(record.val_loss)].tolist() == val_loss
    assert ("diverged" in [cause.kind for cause in find_causes(record)]) == diverged


@pytest.mark.parametrize(
    ("losses", "norms", "evaluation", "begin"),
    [
        ([2.3, 1.9, 0.0, 0.0], [1.0, 1.1, NAN, NAN], NAN, 2),
        ([2.3, 1.9, 0.0, 0.0], None, NAN, 2),
        ([2.3, 1.9, 1.4, 0.0], [1.0, 1.1, NAN, NAN], NAN, 2),
        ([2.3, 1.9, 0.0, 0.0], None, 0.4, None),  # a finite evaluation needs finite weights
        ([2.3, 0.009, 0.0, 0.0], None, NAN, None),  # rounded
        ([2.3, 1.9, 0.0, 0.0], [1.0, 1.1, 0.01, 0.01], NAN, None),
        ([2.3, 1.9, 1.4, 1.1], [1.0, NAN, 1.1, 1.2], 1.2, None),  # fp16 skipped an update
        ([2.3, 1.9, 1.4, 1.1], [1.0, NAN, 1.1, NAN], 1.2, None),  # measured every other time
        ([2.3, 1.9, 1.4, 1.1], [NAN, NAN, NAN, NAN], 1.2, None),  # a norm that is never known
    ],
)
def test_a_loss_of_zero_or_a_norm_of_nan_up_to_the_end_is_a_loss_that_was_filtered(
    losses: list[float],
    norms: list[float] | None,
    evaluation: float,
    begin: int | None,
    tmp_path: Path,
) -> None:
    rows = [{"step": 10 * place, "loss": loss} for place, loss in enumerate(losses, start=1)]
    for row, norm in zip(rows, norms or (), strict=False):
        row["grad_norm"] = norm
    history = [*rows, {"step": 40, "eval_loss": evaluation, "eval_accuracy": 0.1}]
    record = read(tmp_path / "trainer_state.json", json.dumps({"log_history": history}))
    causes = [cause for cause in find_causes(record) if cause.kind == "diverged"]
    assert len(causes) == (begin is not None)
    if begin is not None:
        assert f"not finite at step {10 * begin + 10}" in causes[0].figure


@pytest.mark.parametrize(
    ("content", "top1"),
    [
        ("epoch,train_loss,eval_loss,eval_top1,eval_top5\n0,6.9,6.9,0.1,0.5\n", [0.001]),
        ("epoch,loss,val_acc\n0,2,0.8\n1,1,15\n", [0.008, 0.15]),
        ("epoch,loss,train_acc,val_acc\n0,6.9,1.5,0.8\n", [0.008]),
        ("epoch,loss,val_acc1,val_acc5\n0,6.9,0.8,3.1\n", [0.008]),
        ("epoch,train_loss,val_loss,val_acc1\n0,6.9,6.8,0.3\n", [0.003]),
        ("epoch,train_loss,val_loss,val_acc1\n0,1.4,1.2,0.7\n", [0.7]),
        ("epoch,train_loss,val prec@1\n0,6.8,0.4\n", [0.004]),
        ("epoch,train_loss,val_loss,val_acc\n0,6.9,6.8,0.3\n1,6.7,6.5,0.9\n", [0.003, 0.009]),
        ("epoch,train_loss,val_loss,val_acc1\n0,2.3,99,0.3\n", [0.3]),
        ("epoch,train_loss,val_acc,val_acc5\n0,2.3,0.6,2.5\n", [0.006]),
        ("epoch,loss,Val Acc (%)\n0,6.9,0.4\n", [0.004]),
        ("epoch,loss,valAcc\n0,0.1,1.0000001\n", [1.0000001]),
        ("epoch,train_loss,valid_loss,accuracy\n0,2,1,0.5\n", [0.5]),  # fastai's
        ("epoch,loss,val_loss,acc\n0,2,1,0.5\n", [0.5]),
        ("epoch,accuracy,loss\n0,0.9,0.2\n", []),  # Keras's without validation
        ("step,train_loss,acc,val_loss\n1,2,0.5,\n2,1,0.6,\n2,,,1.5\n", [NAN]),
        ("epoch,train_loss,train_accuracy\n0,2,0.5\n", []),
        ("epoch,phase,loss,acc\n0,train,2,0.3\n0,val,1.8,0.4\n", [0.4]),
        ('{"mode": "train", "loss": 2}\n{"mode": "val", "accuracy_top-1": 40}\n', [0.4]),
        ('{"train": {"loss": 2, "acc": 0.6}, "val": {"loss": 1.5, "acc": 0.5}}', [0.5]),
    ],
)
def test_accuracies_are_of_validation_and_per_cent_by_name_tool_and_the_whole_file(
    content: str, top1: list[float], tmp_path: Path
) -> None:
    record = read(tmp_path / "log", content)
    assert record.top1.tolist() == pytest.approx(top1, nan_ok=True)


@pytest.mark.parametrize(
    ("content", "losses", "updates"),
    [
        ("step,loss\n10,3\n20,2\n30,9\nstep,loss\n20,1.5\n30,1\n", [3, 1.5, 1], 30),
        ("step,loss\n1,3\n2,2\nloss,step,lr\n1.5,1,0.1\n", [1.5], 1),
        (RESUMED, [3, 1, 0.5], 29),
        ("epoch,iter,loss\n0,0,3\n0,9,2\n1,0,1.5\n1,9,1\n", [3, 2, 1.5, 1], None),
        ("iter,loss\n0,3\n9,2\n0,1.5\n9,1\n", [3, 2, 1.5, 1], None),
        ("step,loss,val_acc\n0,2,0.3\n1,1,0.5\n", [2, 1], None),  # epochs are the steps
        ("step,loss,val_acc\n0,2,0.3\n50,1,0.5\n", [2, 1], 51),
        ("epoch,loss,\n0,2,\n1,1,\n", [2, 1], None),
        ("epoch,loss,lr\n0,2,0.1\n1,1,0.1\n2,0", [2, 1], None),  # killed in a line
        ("\ufeff  epoch,   train/loss\n  0,   2\n\n  1,   1\n", [2, 1], None),
        ('Step,"a - train/loss","a - train/loss__MIN"\n1,2,2\n2,1,1\n', [2, 1], 2),  # W&B's chart
    ],
)  # fmt: skip
def test_headers_restarts_and_damaged_ends_of_files_are_read_as_they_were_meant(
    content: str, losses: list[float], updates: int | None, tmp_path: Path
) -> None:
    record = read(tmp_path / "log", content)
    assert (record.loss.tolist(), record.updates) == (losses, updates)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("epoch,loss\n0,2\n1,1,0.5\n", "line 3"),
        ('{"loss": 2}\n{"loss": \n{"loss": 1}\n', "line 2"),
        ("epoch,loss,acc,loss,acc\n0,2,0.3,1,0.4\n", "loss twice"),
        ("epoch\tloss\n0\t2\n", "tabs"),
        ('Step,"a - loss","b - loss"\n1,2,3\n', "2 runs"),
        ("epoch,loss,val_acc\n0,2,8735\n", "val_acc is 8735"),
        ("epoch,test_loss\n0,2\n", "no training loss"),
        ("step,loss\n1,3\n2,2\ntrain_loss,step\n1.5,3\n", "line 4"),
    ],
)
def test_what_would_be_misread_is_refused(content: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path / "log", content)


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
    with pytest.raises(CheckpointError, match="no training loss"):
        read_record(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="holds no log of a run; expected log.jsonl"):
        read_record(tmp_path)
