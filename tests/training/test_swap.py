"""Replicas that are trained alone on the digits: their mean against plain PyTorch."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_forked_workers import on_forked_workers
from plain_images import GREY, load, shuffled, training_files
from polish_reference import assert_right, one_pass
from short_runs import BROAD, CLEAN, HALF, JUDGED, a_recipe, content, log, timms, weights
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD

from largebatch import run
from largebatch.data.datasets import digits
from largebatch.data.order import replica_seed
from largebatch.distributed.serial import Serial
from largebatch.errors import DivergedError, RecipeError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_pipeline
from largebatch.runs.checkpoints import polish_checkpoint
from largebatch.runs.options import Options
from largebatch.tracking.events import Summary
from largebatch.training.loop import train
from largebatch.training.step_log import StepLog

SWAP = "swap: {steps: 2, replicas: 3, batch: 48, lr: 0.05}"
MEASURED = "statistics: {samples: 97}"
WIDE = "swap: {steps: 2, replicas: 3, batch: 96, lr: 0.05}"
PLAIN = ("batch.bn_span=96", "optimizer.weight_decay=0.01", "model.arguments.drop_rate=0")


def by_plain_pytorch(recipe: Recipe, begun: dict[str, Tensor], replica: int) -> dict[str, Tensor]:
    """Two updates of momentum SGD on the batches of a replica, at a rate that falls to zero."""
    model = timms(recipe).train()
    model.load_state_dict(begun)
    named = dict(model.named_parameters())
    matrices = [weight for weight in named.values() if weight.ndim > 1]
    vectors = [weight for weight in named.values() if weight.ndim == 1]
    decayed: dict[str, Any] = {"params": matrices, "weight_decay": 0.01}
    optimizer = SGD([decayed, {"params": vectors}], lr=1, momentum=0.9)
    plan = make_plan(recipe, workers=1)
    pipeline = open_pipeline(recipe, plan, Serial(torch.device("cpu")), folder=None)
    seed = replica_seed(recipe.seed, replica)
    assert plan.replica is not None
    own = pipeline.replica(plan.replica, seed=seed)
    for step, (images, labels) in enumerate(own.training(range(2), clean=False)):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * step / 2)) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
        optimizer.step()
    return model.state_dict()


def stop_in_exchange(number: int, patched: pytest.MonkeyPatch) -> None:
    """Request a stop of the run at the n-th exchange of its workers."""
    share, calls = StepLog.share, [0]

    def stopping(self: StepLog, bad: Tensor) -> bool:
        found = share(self, bad)
        calls[0] += 1
        self.stopped = self.stopped or calls[0] == number
        return found

    patched.setattr(StepLog, "share", stopping)


def go_on(recipe: Recipe, folder: Path) -> Summary:
    return run(recipe, out=folder, resume=True)


def assert_same(ours: object, other: object) -> None:
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


def test_the_mean_is_that_of_models_trained_separately_on_one_worker_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers share a BatchNorm span in the schedule, and none here."""
    recipe = a_recipe(WIDE, MEASURED, changes=PLAIN)
    with monkeypatch.context() as patched:
        stop_in_exchange(1, patched)
        assert run(recipe, out=tmp_path / "1").status == "interrupted"
    assert content(tmp_path / "1")["replicas"]["num"] == 0
    begun = weights(tmp_path / "1")
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    summary = go_on(recipe, tmp_path / "1")
    on_forked_workers(go_on, recipe, tmp_path / "2", workers=2)
    ours = weights(tmp_path / "1")
    other = weights(tmp_path / "2")
    torch.testing.assert_close(other, ours)  # statistics are sums over the workers' shares

    replicas = [by_plain_pytorch(recipe, begun, replica) for replica in range(3)]
    mean = {n: torch.stack([each[n].double() for each in replicas]).mean(0) for n in begun}
    model = timms(recipe).double()
    for name, _ in model.named_parameters():
        assert other[name].equal(ours[name])
        torch.testing.assert_close(ours[name].double(), mean[name], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(begun["fc.weight"].double(), mean["fc.weight"], rtol=1e-2)
    files = training_files(digits.write_digits())
    order = shuffled(len(files), seed=recipe.seed)[:97]
    images, labels = load([files[row] for row in order], colours=GREY, size=16)
    model.load_state_dict(ours)
    right = one_pass(model, [(part.double(), labels) for part in images.split(96)])
    assert_right(model, right, rel=1e-3)

    train, swap, statistics = summary.stages
    assert [stage.name for stage in summary.stages] == ["train", "swap", "statistics"]
    assert swap.before is not None
    assert len({train.loss, swap.loss, statistics.loss}) == 3
    assert (swap.before.loss, swap.note) == (train.loss, "3 replicas, 2 updates of 96 samples each")


@pytest.mark.long
@pytest.mark.parametrize("judged", [True, False])
def test_a_run_stopped_between_replicas_ends_with_identical_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: bool
) -> None:
    affine = "affine: {steps: 2, lr: 0.05}"
    recipe = a_recipe(CLEAN, "ema: 0.5", SWAP, affine, MEASURED, *(JUDGED,) * judged)
    whole = run(recipe, out=tmp_path / "whole")
    for stop in (2, 1):  # in the second replica; in the one that then starts again
        with monkeypatch.context() as patched:
            stop_in_exchange(stop, patched)
            run(recipe, out=tmp_path / "parts", resume=stop == 1)
        assert content(tmp_path / "parts")["replicas"]["num"] == 1
        assert bool(content(tmp_path / "parts")["snapshot"]) == judged
    parts = go_on(recipe, tmp_path / "parts")
    assert_same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert content(tmp_path / "parts")["replicas"] == {}
    timeless = [[replace(stage, seconds=0.0) for stage in end.stages] for end in (parts, whole)]
    assert timeless[0] == timeless[1]
    assert [stage.name for stage in parts.stages] == [
        *("train", "clean", "ema", "swap", "affine", "statistics"),
    ]


def test_replicas_that_diverge_end_the_run_or_are_rolled_back(tmp_path: Path) -> None:
    absurd = "swap: {steps: 12, replicas: 2, batch: 48, lr: 1e30}"
    with pytest.raises(DivergedError, match="in its updates 0 to 9; lower polish.swap.lr$"):
        run(a_recipe(absurd, MEASURED), out=tmp_path / "ended")
    summary = run(a_recipe(absurd, MEASURED, JUDGED), out=tmp_path / "judged")
    train, swap, _ = summary.stages
    assert (swap.name, swap.kept, swap.loss) == ("swap", False, train.loss)
    assert swap.note is not None
    assert swap.note.endswith("lower polish.swap.lr")
    run(a_recipe(MEASURED, JUDGED), out=tmp_path / "without")
    assert_same(weights(tmp_path / "judged"), weights(tmp_path / "without"))


@pytest.mark.long
def test_replicas_begin_at_a_loss_scale_for_their_own_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scales: list[float] = []

    def begun(*args: Any, **options: Any) -> Any:  # noqa: ANN401 -- those of train
        scales.extend(each.get_scale() for each in args if isinstance(each, GradScaler))
        return train(*args, **options)

    monkeypatch.setattr("largebatch.training.swap.train", begun)
    changes = (*HALF, "batch.global_batch=384", "batch.bn_span=24", "duration={steps: 3}")
    small = "swap: {steps: 1, replicas: 2, batch: 24, lr: 0.05}"
    run(a_recipe(small, MEASURED, changes=changes), out=tmp_path / "run")
    assert scales == [log(tmp_path / "run", "step")[-1]["loss_scale"] / 16] * 2


def test_a_mean_of_replicas_is_judged_by_its_own_statistics(tmp_path: Path) -> None:
    summary = run(a_recipe(SWAP, MEASURED, JUDGED, changes=(BROAD,)), out=tmp_path / "run")
    assert [stage.name for stage in summary.stages] == ["train", "swap"]
    (drift,) = log(tmp_path / "run", "drift")
    assert (drift["stage"], drift["samples"]) == ("swap", 97)
    polished = polish_checkpoint(tmp_path / "run", Options(out=tmp_path / "again"), samples=97)
    assert [stage.name for stage in polished.stages] == ["swap", "statistics"]
    for stage in polished.stages:  # measured again, they are the same
        assert stage.loss == pytest.approx(summary.stages[-1].loss, rel=1e-6)


def test_every_replica_has_an_order_of_its_own_whatever_the_workers() -> None:
    recipe = a_recipe("swap: {epochs: 0.5, replicas: 2, batch: 96, lr: 0.1}", MEASURED)
    first, *others = [make_plan(recipe, workers=workers).replica for workers in (1, 2, 8)]
    assert first is not None
    assert others == [first, first]
    assert first.steps == round(0.5 * recipe.train_samples / 96)
    seeds = [replica_seed(recipe.seed, replica) for replica in range(1000)]
    assert len({*seeds, recipe.seed}) == 1001
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("polish", "message"),
    [
        ((SWAP,), "swap needs statistics: the running statistics of an average belong to other"),
        (
            ("swap: {steps: 2, replicas: 3, batch: 32, lr: 0.05}", MEASURED),
            r"polish.swap.batch \(32\) must be a multiple of batch.bn_span \(48\)",
        ),
    ],
)
def test_replicas_that_cannot_be_trained_or_measured_are_refused(
    polish: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        a_recipe(*polish)
