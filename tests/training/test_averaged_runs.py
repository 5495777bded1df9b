"""What a Schedule-Free run is measured at: the average of its weights, with statistics of its own.

The average is computed here from the two sets of weights in a checkpoint, and its statistics by
plain PyTorch over the whole training set at once.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from plain_images import GREY, load, training_files
from short_runs import AFFINE, BEFORE, CLEAN, STATISTICS, a_recipe, content, log, timms, weights
from torch import Tensor, nn

from largebatch import run
from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import digits
from largebatch.recipe.recipe import Recipe
from largebatch.runs.checkpoints import evaluate_checkpoint
from largebatch.runs.options import Options
from largebatch.training.judging import Judge

EVERY = 1437
MOMENTUM = 0.9
FREE = (
    *("optimizer.kind=schedule-free", "optimizer.statistics_samples=96"),
    *("schedule.decay.kind=constant", "batch.bn_span=96", "model.arguments.drop_rate=0"),
)


def free(*polish: str, changes: tuple[str, ...] = ()) -> Recipe:
    return a_recipe(*(polish or (STATISTICS,)), changes=(*FREE, *changes))


def average_of(state: dict[str, Any]) -> OrderedDict[str, Tensor]:
    """Return x of y = (1 - momentum) z + momentum x; parameters are numbered by their groups."""
    names = [name for name, value in state["model"].items() if not _is_buffer(name)]
    decayed = [name for name in names if state["model"][name].ndim > 1]
    plain = [name for name in names if state["model"][name].ndim <= 1]
    found: OrderedDict[str, Tensor] = OrderedDict(state["model"])
    for number, name in enumerate([*decayed, *plain]):
        y, z = state["model"][name].double(), state["optimizer"]["state"][number]["z"].double()
        found[name] = ((y - (1 - MOMENTUM) * z) / MOMENTUM).float()
    return found


def _is_buffer(name: str) -> bool:
    return name.rpartition(".")[2] in {"running_mean", "running_var", "num_batches_tracked"}


def images(part: str) -> tuple[Tensor, Tensor]:
    folder = digits.write_digits()
    paths = training_files(folder)
    if part == "val":
        paths = sorted(folder.glob("val/*/*"), key=lambda path: (path.parent.name, path.name))
    return load(paths, colours=GREY, size=16)


@torch.no_grad()
def measured(recipe: Recipe, state: dict[str, Any]) -> float:
    """Return the loss of the average, whose statistics are of all training images at once."""
    model = timms(recipe)
    model.load_state_dict(average_of(state))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # what comes replaces what was
            layer.reset_running_stats()
    shown, _ = images("train")
    model.train()(shown)
    shown, labels = images("val")
    return F.cross_entropy(model.eval()(shown), labels).item()


def test_an_evaluation_is_of_the_average_with_statistics_of_its_own(tmp_path: Path) -> None:
    recipe = free(
        changes=(
            *(f"batch={{global_batch: {EVERY}, bn_span: {EVERY}}}", "evaluation.every_epochs=3"),
            f"optimizer.statistics_samples={EVERY}",
        )
    )
    run(recipe, out=tmp_path / "run", max_steps=3)
    expected = measured(recipe, content(tmp_path / "run"))
    assert main(["polish", str(tmp_path / "run"), "--out", str(tmp_path / "polished")]) == DONE
    records = [*log(tmp_path / "run", "evaluation"), *log(tmp_path / "polished", "evaluation")]
    losses = [record["loss"] for record in records]
    losses.append(evaluate_checkpoint(tmp_path / "run", Options(out=tmp_path)).metrics.loss)
    assert losses == pytest.approx([expected] * 4, rel=1e-4)


def test_evaluations_change_no_bit_of_a_run(tmp_path: Path) -> None:
    often = free(changes=("evaluation.every_epochs=0.14",))
    run(free(), out=tmp_path / "seldom")
    run(often, out=tmp_path / "often")
    assert len(log(tmp_path / "often", "evaluation")) > len(log(tmp_path / "seldom", "evaluation"))
    ours, other = weights(tmp_path / "often"), weights(tmp_path / "seldom")
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


def test_when_the_schedule_ends_the_model_is_the_average(tmp_path: Path) -> None:
    """Also where its last part is clean; what follows starts there."""
    recipe = free(CLEAN)
    run(recipe, out=tmp_path / "run", max_steps=7)
    run(recipe, out=tmp_path / "whole")
    last = content(tmp_path / "whole")
    assert not any(group["train_mode"] for group in last["optimizer"]["param_groups"])
    assert any(g["train_mode"] for g in content(tmp_path / "run")["optimizer"]["param_groups"])
    before, after = log(tmp_path / "whole", "evaluation")
    assert (before["stage"], after["stage"]) == ("train", "clean")
    assert main(["evaluate", str(tmp_path / "whole")]) == DONE
    assert main(["export", str(tmp_path / "whole"), "--out", str(tmp_path / "out")]) == DONE


def test_a_run_before_the_end_is_exported_only_when_it_was_polished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its average has no statistics until images were looked at."""
    run(free(CLEAN, AFFINE), out=tmp_path / "run", max_steps=3)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == USER
    assert "Schedule-Free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    found = average_of(content(tmp_path / "run"))
    assert main(["polish", str(tmp_path / "run"), "--out", str(tmp_path / "polished")]) == DONE
    assert main(["export", str(tmp_path / "polished"), "--out", str(tmp_path / "out")]) == DONE
    polished = weights(tmp_path / "polished")
    for name in (name for name in found if not _is_buffer(name)):
        torch.testing.assert_close(polished[name], found[name], rtol=1e-5, atol=1e-6)


def test_a_run_that_was_ended_before_its_last_evaluation_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last checkpoint was written after the last update, and no stage had ended yet."""
    recipe = free(changes=(f"execution.checkpoints.every_steps={BEFORE}",))
    run(recipe, out=tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Judge, "end", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            run(recipe, out=tmp_path / "run")
    assert content(tmp_path / "run")["progress"]["step"] == BEFORE
    resumed = run(recipe, out=tmp_path / "run", resume=True)
    assert [stage.name for stage in resumed.stages] == ["train", "statistics"]
    ours, other = weights(tmp_path / "run"), weights(tmp_path / "whole")
    torch.testing.assert_close(ours, other, rtol=0, atol=0)
