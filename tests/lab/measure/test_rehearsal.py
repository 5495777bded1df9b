"""What is foretold of a worker, against what a worker on this machine does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from on_forked_workers import on_forked_workers
from short_runs import CLEAN, DIGITS, NARROW, a_recipe
from torch import Tensor

from largebatch import load_recipe, run
from largebatch.cli.main import DONE, USER, main
from largebatch.data.order import sample_ids
from largebatch.distributed.torch_distributed import TorchGroup
from largebatch.lab.measure.rehearsal import Message, rehearse
from largebatch.lab.planner.cluster import load_cluster
from largebatch.models.of_recipe import build_model
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.runs.passes import saved_bytes
from largebatch.runs.state import build_criterion
from largebatch.tracking.events import StageName
from largebatch.training.loop import Update
from largebatch.training.step_log import StepLog

FUJITSU = "resnet50_86016_fujitsu"
TINY = ["model={name: cifar_resnet8}", "data.image_size=16", "batch.bn_span=48"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(TINY, id="two spans"),
        pytest.param([*TINY, "precision=bf16"], id="bf16"),
        pytest.param([NARROW, "data.image_size=16"], id="of timm"),
    ],
)
def test_activations_are_those_that_a_real_forward_pass_keeps(changes: Sequence[str]) -> None:
    recipe = load_recipe(DIGITS, changes)
    plan = make_plan(recipe, workers=1)
    model = build_model(recipe, torch.device("cpu"))
    side = recipe.data.image_size
    images = torch.randn(plan.device_batch, 3, side, side)
    labels = torch.randint(10, (plan.device_batch,))
    with saved_bytes(model) as kept:
        loss = build_criterion(recipe.loss)(model(images), labels)
        measured = sum(kept.values())
    del loss  # it keeps the activations alive until here
    rehearsed = rehearse(recipe, workers=1).memory["activations"]
    # PyTorch's meta device gives moments of bf16 images two bytes, where others keep four.
    assert rehearsed == pytest.approx(measured, rel=0 if recipe.precision == "fp32" else 1e-3)


def count_messages(changes: Sequence[str], folder: Path) -> list[Message]:
    """Return what the third update of a run sends."""
    found: list[list[Message]] = [[]]
    reduce, gather, add = TorchGroup.all_reduce, TorchGroup.all_gather, StepLog.add

    def reducing(group: TorchGroup, tensor: Tensor) -> Any:  # noqa: ANN401 -- a private type
        found[-1].append(Message("sum", group.world_size, tensor.nbytes))
        return reduce(group, tensor)

    def gathering(group: TorchGroup, tensor: Tensor) -> Tensor:
        found[-1].append(Message("gather", group.world_size, tensor.nbytes))
        return gather(group, tensor)

    def adding(log: StepLog, stage: StageName, update: Update, *, seconds: float) -> None:
        add(log, stage, update, seconds=seconds)
        found.append([])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGroup, "all_reduce", reducing)
        patch.setattr(TorchGroup, "all_gather", gathering)
        patch.setattr(StepLog, "add", adding)
        run(a_recipe(CLEAN, changes=tuple(changes)), out=folder / "run", max_steps=3)
    return found[2]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="whole spans"),
        pytest.param(["optimizer={kind: muon}"], id="Muon"),
        pytest.param(
            ["execution.device_batch=12", "batch.bn_span=24", "reduction.dtype=bf16"],
            id="shared spans, four micro-batches, in bf16",
            marks=pytest.mark.long,
        ),
    ],
)
def test_messages_are_those_of_an_update_on_two_workers(
    changes: Sequence[str], tmp_path: Path
) -> None:
    sent = on_forked_workers(count_messages, changes, tmp_path, workers=2)
    foretold = rehearse(a_recipe(CLEAN, changes=tuple(changes)), workers=2).messages
    assert sorted(sent) == sorted(foretold)


def test_the_first_samples_are_those_of_the_worker() -> None:
    """Positions 48 to 95: the rest of a block of 64, and half of its second copy."""
    recipe = load_recipe(DIGITS, [*TINY, "data.repeats=3"])
    found = rehearse(recipe, workers=2, rank=1)
    order = sample_ids(range(64), seed=recipe.seed, num_samples=1437)
    second = [order[3 * place % 64] for place in range(32)]
    assert found.first_samples == (*order[48:].tolist(), *second)


def test_an_average_of_the_weights_is_one_more_copy() -> None:
    plain, ema = (
        rehearse(load_recipe(DIGITS, [*TINY, f"polish={{{polish}}}"]), workers=2)
        for polish in (CLEAN, "ema: 0.9")
    )
    copy = plain.memory["parameters"] + plain.memory["buffers"]
    assert ema.total == plain.total + copy


def test_an_update_of_the_paper_is_foretold_for_each_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--workers", "2048", "--rank", "5", "--cluster", "abci-v100"]
    assert main(["lab", "rehearse", FUJITSU, *words]) == DONE
    rows = {line[:15].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}
    assert rows["worker"] == "5 of 2,048, numbered from 0 on abci-v100: GPU 1 of node 1"
    assert rows["parameters"] == "102.23 MB"
    assert rows["activations"] == "1.89 GB"
    assert rows["together"] == "2.25 GB of 16.00 GB, libraries not counted"
    assert rows["an update"] == "6 sums over 2,048 workers, 51.43 MB"


def test_a_device_batch_that_does_not_fit_is_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = load_cluster("abci-v100")
    assert cluster.gpu is not None
    gpu = cluster.gpu.model_copy(update={"memory_gigabytes": 2.001})
    small = cluster.model_copy(update={"gpu": gpu})
    monkeypatch.setattr("largebatch.cli.lab.load_cluster", lambda _: small)
    tiny = [word for change in TINY for word in ("--set", change)]
    assert main(["lab", "rehearse", str(DIGITS), *tiny, "--cluster", "abci-v100"]) == USER
    printed = capsys.readouterr()
    assert "activations" in printed.out
    assert "and the GPU has 2.00 GB; give a smaller execution.device_batch" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--rank", "2"], "workers are numbered 0 to 1", id="rank"),
        pytest.param(["--workers", "7"], "cannot be divided over 7 workers", id="no division"),
        pytest.param(["--workers", "9000", "--cluster", "abci-v100"], "has 4,352", id="too many"),
        pytest.param(
            ["--set", "batch.bn_span=null", "--set", "polish=null"],
            "resnet18 has BatchNorm",
            id="recipe",
        ),
        pytest.param(
            ["--set", "protocol={kind: softsync, learners: 2}", "--set", "polish=null"],
            "protocol",
            id="protocol",
        ),
    ],
)
def test_what_would_be_refused_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [] if "--workers" in words else ["--workers", "2"]
    assert main(["lab", "rehearse", str(DIGITS), *workers, *words]) == USER
    assert message in capsys.readouterr().err
