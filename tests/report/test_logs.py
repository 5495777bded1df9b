"""Logs of other programs are read by the names that they have there."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from largebatch.errors import CheckpointError, LargebatchError
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
    "lightning.csv": Expected(15, 60, 6, 0.5, 0.0581404, 0.195135, 0.935),
    "keras.csv": Expected(9, NAN, 9, NAN, 0.42938, 0.418264, 0.9125),
    "keras_diverged.csv": Expected(5, NAN, 5, NAN, NAN, INF, 0.1025, "diverged"),
    "fastai.csv": Expected(4, NAN, 4, NAN, 1.29467, 0.738248, 0.89, "underfit"),
    "mmengine.json": Expected(8, 38, 4, 0.3, 0.283357, NAN, 0.9125),
    "detectron2.json": Expected(6, 60, NAN, 0.3, 0.391263, 0.351648, NAN),
    "deit.txt": Expected(5, NAN, 5, 5e-4, 5.00594, 4.98059, 0.01, "underfit", 1000),
    "ultralytics.csv": Expected(3, NAN, 3, 4.18583e-4, 2.38365, 2.29291, 0.14, "underfit"),
    "transformers.json": Expected(6, 30, 3, 0.433333, 1.76183, 1.77432, 0.72, "underfit"),
    "transformers_filtered.json": Expected(10, 40, 4, 1e38, NAN, INF, 0.1025, "diverged"),
    "convnext.txt": Expected(3, NAN, 3, 0.0376953, 3.79683, 3.35025, 0.14, "underfit"),
    "run-.-tag-train_loss.csv": Expected(20, 20, NAN, NAN, 0.392064, NAN, NAN),
}
"""Logs of small networks on digits, by eleven tools; DeiT had noise. Two runs diverged.
Lightning and detectron2 count updates from 0: their last ones, 59 of both, are the sixtieth."""

TRANSCRIBED = {
    "dino.txt": Expected(4, NAN, 4, 0.01, 6.83, 6.82, 0.0037, "underfit", 1000),
    "torchvision.csv": Expected(3, NAN, 3, 0.5, 6.5, 6.4, 0.0094, "underfit", 1000),
    "wandb_history.csv": Expected(4, 200, 2, NAN, 0.7, 0.8, 0.75),
}
"""Made up in the formats of the tools: DINO's log.txt, names of torchvision's meters,
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
    assert [cause.check for cause in find_causes(record)] == [expected.cause] * bool(expected.cause)


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


def read(path: Path, content: str, *, classes: int | None = None) -> Record:
    path.write_text(content)
    return read_record(path, classes=classes)


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
    assert ("diverged" in [cause.check for cause in find_causes(record)]) == diverged


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
    causes = [cause for cause in find_causes(record) if cause.check == "diverged"]
    assert len(causes) == (begin is not None)
    if begin is not None:
        assert f"not finite at step {10 * begin + 10}" in causes[0].text


@pytest.mark.parametrize(
    ("content", "top1"),
    [
        ("epoch,train_loss,eval_loss,eval_top1,eval_top5\n0,6.9,6.9,0.1,0.5\n", [0.001]),
        ("epoch,loss,val_acc\n0,2,0.8\n1,1,15\n", [0.008, 0.15]),
        ("epoch,loss,train_acc,val_acc\n0,6.9,1.5,0.8\n", [0.008]),
        ("epoch,loss,val_acc1,val_acc5\n0,6.9,0.8,3.1\n", [0.008]),
        ("epoch,train_loss,val_loss,val_acc1\n0,1.4,1.2,0.7\n", [0.7]),
        ("epoch,train_loss,val_loss,val_acc1\n0,2.3,99,0.3\n", [0.3]),
        ("epoch,train_loss,val_acc,val_acc5\n0,2.3,0.6,2.5\n", [0.006]),
        ("epoch,loss,Val Acc (%)\n0,6.9,0.4\n", [0.004]),
        ("epoch,loss,valAcc\n0,0.1,1.0000001\n", [1.0000001]),
        ("epoch,loss,val_acc\n0,2,nan\n1,1,nan\n", []),
        ("epoch,train_loss,valid_loss,accuracy\n0,2,1,0.5\n", [0.5]),  # fastai's
        ("epoch,loss,val_loss,acc\n0,2,1,0.5\n", [NAN]),  # may be of training
        ("epoch,accuracy,loss\n0,0.9,0.2\n", []),  # Keras's without validation
        ("step,train_loss,acc,val_loss\n1,2,0.5,\n2,1,0.6,\n2,,,1.5\n", [NAN]),
        ("epoch,train_loss,train_accuracy\n0,2,0.5\n", []),
        ("epoch,phase,loss,acc\n0,train,2,0.3\n0,val,1.8,0.4\n", [0.4]),
        ('{"mode": "train", "loss": 2}\n{"mode": "val", "accuracy_top-1": 40}\n', [0.4]),
        ('{"train": {"loss": 2, "acc": 0.6}, "val": {"loss": 1.5, "acc": 0.5}}', [0.5]),
        ("epoch,loss,val_loss,val_acc\n0,6.9,6.8,0.30 %\n1,6.8,6.8,0.4%\n", [0.003, 0.004]),
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
        ("step,loss,lr\n10,3,9\n20,2,9\n30,9,9\nlr,step,loss\n8,20,1.5\n", [3, 1.5], 20),
        ("step,loss,lr\n10,3,9\nlr,step,loss,top\n8,20,1.5,0\n8,30,1,0\n", [3, 1.5, 1], 30),
        ("step,loss\n1/30,3\n2/30,2\n", [3, 2], 2),
        (RESUMED, [3, 1, 0.5], 30),
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
        ("epoch,loss,val_acc\n0,2,8735\n", "val_acc.*8735"),
        ("epoch,test_loss\n0,2\n", "no training loss"),
        ("epoch,loss\n0,2\n1,1\n0,1.5\n", "go back"),
        ("epoch,top1\n0,0.5\n", "no training loss"),
        ("", "no rows"),
        ("epoch,train_loss\n", "no rows"),
    ],
)
def test_what_would_be_misread_is_refused(content: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path / "log", content)


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
    assert cause.text == "the validation loss was not finite at epoch 1"


def noisy(updates: int) -> list[float]:
    """Return losses of single updates that fall from 2.3 to 0.4, as a healthy run has them."""
    noise = np.random.default_rng(3).normal(0, 0.25, updates)
    falling = 2.3 - 1.9 * np.linspace(0, 1, updates) ** 0.5
    return [max(0.05, float(loss)) for loss in falling + noise]


def as_trainer_state(rows: list[dict[str, float]]) -> str:
    summary = {"train_runtime": 9.0, "train_loss": 99.0, "epoch": 3.0, "step": 300}
    return json.dumps({"global_step": 300, "log_history": [*rows, summary]})


def as_wandb_of_trainer(rows: list[dict[str, float]]) -> str:
    """Return the history of W&B as pandas writes it, with the counters of Trainer and its own."""
    lines = [",_step,_runtime,train/loss,train/epoch,train/global_step,train/learning_rate"]
    lines[0] += ",train/train_loss,train/train_runtime"
    for place, row in enumerate(rows):
        cells = (row[key] for key in ("loss", "epoch", "step", "learning_rate"))
        lines.append(f"{place},{place},1.5,{','.join(map(str, cells))},,")
    return "\n".join([*lines, f"{len(rows)},{len(rows)},1.5,,3.0,300,,99.0,9.0"]) + "\n"


def as_mlflow(rows: list[dict[str, float]]) -> str:
    """Return MLflow's own table of metrics, in the order of its keys."""
    lines = ["key,value,timestamp,run_uuid,step,is_nan"]
    for key in ("epoch", "learning_rate", "loss"):
        lines += [f"{key},{row[key]},1795810300,a1,{row['step']},0" for row in rows]
    return "\n".join(lines)


def as_accelerate(rows: list[dict[str, float]]) -> str:
    lines = ["completed_steps,epoch,train_loss,lr"]
    lines += [",".join(str(row[key]) for key in ("step", "epoch", "loss", "learning_rate"))
              for row in rows]  # fmt: skip
    return "\n".join(lines)


@pytest.mark.parametrize("form", [as_trainer_state, as_wandb_of_trainer, as_mlflow, as_accelerate])
def test_rows_whose_epochs_are_fractions_are_updates(
    form: Callable[[list[dict[str, float]]], str], tmp_path: Path
) -> None:
    """300 updates in three epochs, logged by twos: no noise of theirs is a spike."""
    rows = [
        {"loss": loss, "epoch": 2 * place / 100, "step": 2 * place, "learning_rate": 0.1}
        for place, loss in enumerate(noisy(150), start=1)
    ]
    record = read(tmp_path / "log", form(rows), classes=10)
    assert (len(record.loss), record.updates, record.epochs) == (150, 300, 3.0)
    assert record.by_update
    assert find_causes(record) == []
    rows[100]["loss"] = rows[101]["loss"] = rows[102]["loss"] = 9.0
    rows[103]["loss"] = rows[104]["loss"] = 8.0
    (cause,) = find_causes(read(tmp_path / "log", form(rows), classes=10))
    assert cause.check == "rate beyond the edge"
    assert "at step 20" in cause.text  # the 101st to 105th row


def test_a_spike_is_found_after_losses_that_were_infinite_at_the_start(tmp_path: Path) -> None:
    """As mixed precision may log them until its scale fits."""
    losses = ["inf"] * 8 + [f"{loss:.3f}" for loss in noisy(300)]
    losses[208:223] = ["9"] * 15
    rows = [f"{step},{loss}" for step, loss in enumerate(losses)]
    record = read(tmp_path / "log", "\n".join(["step,loss", *rows]), classes=10)
    assert [cause.check for cause in find_causes(record)] == ["rate beyond the edge"]
    assert record.onset() == 208


def test_rows_of_an_epoch_that_leaves_out_its_last_batch_are_its_means(tmp_path: Path) -> None:
    rows = [
        {"loss": 2 - place / 3, "epoch": 0.99 * place, "step": 78 * place} for place in (1, 2, 3)
    ]
    record = read(tmp_path / "log.json", as_trainer_state(rows))
    assert not record.by_update
    assert record.updates == 234
    assert record.epochs == pytest.approx(2.97)


@pytest.mark.parametrize(
    ("steps", "updates"),
    [
        ([49, 99, 149], 150),  # Lightning and detectron2 count from 0, and log every fiftieth
        ([50, 100, 150], 150),
        ([0, 50, 100], 101),
        ([0, 1, 2], 3),
        ([1, 2, 3], 3),
        ([7], 7),
    ],
)
def test_updates_are_counted_from_the_number_of_the_first_one(
    steps: list[int], updates: int, tmp_path: Path
) -> None:
    rows = [f"{step},{2 - place / 4}" for place, step in enumerate(steps)]
    assert read(tmp_path / "log", "\n".join(["step,loss", *rows])).updates == updates


@pytest.mark.parametrize(
    ("content", "kind", "chosen", "value"),
    [
        ("step,global_step,loss\n1,50,2\n2,100,1\n", "step", "global_step", 100),
        ("iter,update,loss\n4,1,2\n8,2,1\n", "step", "update", 2),
        ("epoch,loss,train_loss\n0,2,3\n1,1,2\n", "loss", "train_loss", 2),
        ("epoch,total_loss,loss\n0,2,3\n1,1,2\n", "loss", "total_loss", 1),
        ("epoch,loss,val_acc,val_top1\n0,2,40,41\n1,1,50,52\n", "top1", "val_top1", 0.52),
        ("epoch,loss,val_loss,eval_loss\n0,2,3,4\n1,1,2,1.5\n", "val_loss", "eval_loss", 1.5),
        ("epoch,loss,lr-a,lr-b\n0,2,0.1,1\n1,1,0.2,1\n", "lr", "lr-b", 1),
        ("epoch,loss,val_acc\n0,6.9,0.1\n1,6.8,0.3\n", "top1", "val_acc:percent", 0.003),
        ("epoch,loss,val_acc\n0,6.9,0.1\n1,6.8,0.3\n", "top1", "val_acc:fraction", 0.3),
        ("step,train/box_loss,train/cls_loss\n1,2,3\n2,1,2\n", "loss", "train/cls_loss", 2),
        # one of both accuracies is per cent, and the other cannot be, by the validation loss
        ("epoch,loss,train_acc,val_loss,val_acc\n0,1,60,.9,.7\n", "top1", "val_acc:fraction", 0.7),
        ("epoch,loss,val_loss,val_acc,val_acc5\n0,1,.9,.7,95\n", "top1", "val_acc:fraction", 0.7),
    ],
)
def test_what_a_log_does_not_show_is_asked_for(
    content: str, kind: str, chosen: str, value: float, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="--columns") as refused:
        read(tmp_path / "log", content)
    assert kind in str(refused.value)
    record = read_record(tmp_path / "log", columns=[f"{kind}={chosen}"])
    assert getattr(record, kind)[-1] == pytest.approx(value)
    assert chosen.partition(":")[0] in record.notes[0]


@pytest.mark.parametrize(
    ("content", "column", "values"),
    [
        ("step,iter,loss\n1,0,2\n2,1,1\n", "step", [1, 2]),  # one counter from 0 and from 1
        ("step,global_step,loss\n1,1,2\n2,2,1\n1,3,.5\n2,4,.4\n", "step", [1, 2, 3, 4]),
        ("step,train_loss_step,train_loss_epoch\n1,2,2\n2,1,1.5\n", "loss", [2, 1]),
        ("epoch,loss,val_acc_step,val_acc_epoch\n0,2,40,41\n", "top1", [0.41]),
        ("epoch,loss,lr-SGD,lr-SGD/pg1\n0,2,1,.1\n1,1,.5,.05\n", "lr", [1, 0.5]),  # one schedule
        ("epoch,loss,train_loss\n0,2,2\n1,1,1\n", "loss", [2, 1]),
        ("epoch,loss,lr,lr_scale,lr_patience\n0,2,.1,1,3\n1,1,.2,1,3\n", "lr", [0.1, 0.2]),
        ("epoch,train/loss,metrics/accuracy_top1,lr/pg0,lr/pg1\n1,2,.1,.07,.01\n2,1,.2,.02,.02\n",
         "lr", [0.01, 0.02]),  # Ultralytics's group 0 is the biases
    ],
)  # fmt: skip
def test_columns_that_agree_or_that_their_tool_explains_are_read(
    content: str, column: str, values: list[float], tmp_path: Path
) -> None:
    assert getattr(read(tmp_path / "log", content), column).tolist() == pytest.approx(values)


def test_names_that_are_not_known_are_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("epoch,loss\n0,2\n1,1\n")
    for columns in (["los=loss"], ["loss"], ["loss=train"], ["top1=acc"]):
        with pytest.raises(LargebatchError):
            read_record(tmp_path / "log", columns=columns)


def test_a_column_has_one_kind_and_a_per_cent_sign_is_no_part_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("epoch,loss,val_acc,acc\n0,2,5%,7%\n1,1,9%,8%\n")
    assert read_record(tmp_path / "log", columns=["top1=acc"]).top1.tolist() == [0.07, 0.08]
    for columns in ("val_loss=loss", "top1=loss,loss=loss"):
        with pytest.raises(CheckpointError, match="loss"):
            read_record(tmp_path / "log", columns=[columns])


def test_mlflow_marks_a_value_that_is_no_number(tmp_path: Path) -> None:
    header = "key,value,timestamp,run_uuid,step,is_nan\n"
    rows = "".join(f"loss,{value},0,a1,{step},{mark}\n"
                   for step, (value, mark) in enumerate([(2, 0), (1.5, 0), (0, 1)]))  # fmt: skip
    record = read(tmp_path / "log", header + rows)
    assert record.loss.tolist() == pytest.approx([2, 1.5, NAN], nan_ok=True)
    with pytest.raises(CheckpointError, match="2 runs"):
        read(tmp_path / "log", header + rows + rows.replace("a1", "b2"))


def test_a_json_file_of_another_kind_and_a_folder_without_a_log_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(CheckpointError, match="no training loss"):
        read_record(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="log.jsonl"):
        read_record(tmp_path)
